#!/usr/bin/env bash
# Creates a Cloud TPU VM or slice, installs this package on all of its hosts, and starts
# a command on all of them. Can be run again: it keeps machines and runs that exist.
#
#   scripts/launch_tpu_vm.sh OPTIONS -- COMMAND [ARGUMENT...]
#
#   --name NAME             name of the slice
#   --project PROJECT       Google Cloud project
#   --zone ZONE             zone, such as us-east5-b
#   --type TYPE             accelerator type, such as v6e-16
#   --wheel FILE            wheel of this package: pip wheel --no-deps --wheel-dir dist .
#   --copy FILE             copies a file, such as a config, to each host; may be repeated
#   --bucket BUCKET         mounts a bucket on each host, at /mnt/bucket
#   --spot                  uses spot machines, which are cheaper and can be preempted
#   --queued                uses a queued resource, which waits up to a day for capacity
#   --runtime VERSION       software of the hosts; depends on the type by default
#   --create-option OPTION  passes an option to gcloud's create, such as --reserved or
#                           --service-account=ACCOUNT; may be repeated
#   --dry-run               prints the commands without running them
#
# Paths are relative to the project's folder. The machines cost money until you delete
# them; the last printed lines show how.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"

usage_error() {
    echo "scripts/launch_tpu_vm.sh: $1; see scripts/launch_tpu_vm.sh --help" >&2
    exit 2
}

name='' project='' zone='' type='' wheel='' bucket='' runtime='' queued='' dry_run=''
create_options=(--quiet)
files=()
while [ "$#" -gt 0 ]; do
    option=$1
    shift
    case "$option" in
    --) break ;;
    --spot) create_options+=(--spot) ;;
    --queued) queued=yes ;;
    --dry-run) dry_run=yes ;;
    --name | --project | --zone | --type | --wheel | --copy | --bucket | --runtime | \
        --create-option)
        [ "$#" -gt 0 ] || usage_error "$option needs a value"
        case "$option" in
        --copy) files+=("$1") ;;
        --create-option) create_options+=("$1") ;;
        *) printf -v "${option#--}" %s "$1" ;;
        esac
        shift
        ;;
    *) reject_option "$option" ;;
    esac
done
for required in name project zone type wheel; do
    [ "${!required}" ] || usage_error "--$required is required"
done
files+=("$wheel")
for file in "${files[@]}"; do
    [ -f "$file" ] || usage_error "files of --wheel and --copy must exist, got $file"
done
[ "$#" -gt 0 ] || usage_error "pass a command to start after --"
if [ -z "$runtime" ]; then
    case "$type" in
    v4-*) runtime=tpu-ubuntu2204-base ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    *) usage_error "--runtime is required for the type $type" ;;
    esac
fi

# The gcloud commands.
place=(--project="$project" --zone="$zone")
if [ "$queued" ]; then
    resource=(gcloud compute tpus queued-resources)
    create_options+=(--node-id="$name" --runtime-version="$runtime")
    create_options+=(--valid-until-duration=24h)
    delete=("${resource[@]}" delete "$name" "${place[@]}" --force)
else
    resource=(gcloud compute tpus tpu-vm)
    create_options+=(--version="$runtime")
    delete=("${resource[@]}" delete "$name" "${place[@]}")
fi
create=("${resource[@]}" create "$name" "${place[@]}" --accelerator-type="$type")
describe=("${resource[@]}" describe "$name" "${place[@]}")
ssh=(gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --quiet)

# Prints a command with shell quoting.
show() {
    printf '%q' "$1"
    printf ' %q' "${@:2}"
    echo
}

run() {
    if [ "$dry_run" ]; then show "$@"; else "$@"; fi
}

wait_for_capacity() {
    local state=
    while [ "$state" != ACTIVE ]; do
        state=$("${describe[@]}" --format='value(state.state)')
        echo "$(date +%T): queued resource $name is $state"
        case "$state" in
        ACTIVE) ;;
        FAILED | SUSPENDED) return 1 ;; # Out of capacity, or preempted.
        *) sleep 60 ;;
        esac
    done
}

# Prints the script to run on each host with `install`, `start` or `stop`.
host_script() {
    echo "#!/usr/bin/env bash"
    printf 'wheel=%q bucket=%q\n' "$(basename "$wheel")" "$bucket"
    printf 'command=('
    printf ' %q' "$@"
    printf ' )\n'
    cat <<'END_OF_HOST_SCRIPT'
set -euo pipefail
cd
is_running() { [ -e run.pid ] && kill -0 "$(cat run.pid)" 2>/dev/null; }

install() {
    if [ ! -x tpu_embedding/bin/python ]; then
        # The system's Python may be too old for the package; uv installs its own.
        sudo apt-get update --quiet
        sudo DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet python3-venv
        python3 -m venv uv
        uv/bin/pip install --quiet uv
        uv/bin/uv venv --python 3.12 tpu_embedding
    fi
    uv/bin/uv pip install --quiet --python tpu_embedding/bin/python \
        --reinstall-package tpu-embedding "$HOME/${wheel}[tpu,train]"
    if [ "$bucket" ] && ! mountpoint --quiet /mnt/bucket; then mount_bucket; fi
}

# cloud.google.com/storage/docs/cloud-storage-fuse/install
mount_bucket() {
    local keys=/usr/share/keyrings/cloud.google.asc
    local packages=https://packages.cloud.google.com/apt
    if ! command -v gcsfuse >/dev/null; then
        curl --fail --silent --show-error "$packages/doc/apt-key.gpg" |
            sudo tee "$keys" >/dev/null
        echo "deb [signed-by=$keys] $packages" \
            "gcsfuse-$(lsb_release --codename --short) main" |
            sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
        sudo apt-get update --quiet
        sudo DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet gcsfuse
    fi
    sudo mkdir -p /mnt/bucket
    sudo chown "$USER" /mnt/bucket
    gcsfuse --implicit-dirs "$bucket" /mnt/bucket
}

# The command keeps running after the SSH session ends.
start() {
    export PATH="$HOME/tpu_embedding/bin:$PATH" PYTHONUNBUFFERED=1
    nohup setsid "${command[@]}" >>run.log 2>&1 </dev/null &
    echo "$!" >run.pid
    echo "$(hostname): started process $!"
}

# Waits while the run saves its state.
stop() {
    if is_running; then
        kill -TERM "$(cat run.pid)"
        timeout 300 tail --follow --pid="$(cat run.pid)" /dev/null
    fi
}

if [ "$1" != stop ] && is_running; then
    echo "$(hostname): process $(cat run.pid) is already running"
else
    "$1"
fi
END_OF_HOST_SCRIPT
}

finish() {
    local status=$?
    rm -r "$folder"
    if [ "$status" -ne 0 ]; then
        echo "Machines may exist and cost money. To delete them:" >&2
        show "${delete[@]}" >&2
    fi
}
folder=$(mktemp -d)
trap finish EXIT
host_script "$@" >"$folder/host.sh"
files+=("$folder/host.sh")

if [ "$dry_run" ] || ! "${describe[@]}" >/dev/null 2>&1; then
    run "${create[@]}" "${create_options[@]}" # They cost money from now on.
fi
if [ "$queued" ] && [ -z "$dry_run" ]; then wait_for_capacity; fi
run gcloud compute tpus tpu-vm scp "${files[@]}" "$name:" "${place[@]}" \
    --worker=all --quiet
if [ "$dry_run" ]; then cat "$folder/host.sh"; fi
run "${ssh[@]}" --worker=all --command="bash host.sh install"
run "${ssh[@]}" --worker=all --command="bash host.sh start"

echo "Follow the first host's log, until Ctrl-C:"
show "${ssh[@]}" --worker=0 --command="tail --lines=+1 --follow run.log"
echo "Stop the run, which saves its state, but keep the machines:"
show "${ssh[@]}" --worker=all --command="bash host.sh stop"
echo "Delete the machines, which cost money until then:"
show "${delete[@]}"
