#!/bin/bash
# Trains dlrm: 1 x v4:2x4x4, 8 hosts, on_demand, in us-east5-a.
# Printed by `tpu-embedding launch`. Read it before you run it.
#
#   bash FILE          creates what is missing and starts the run; may be repeated
#   bash FILE logs     follows the log of the first host, until Ctrl-C
#   bash FILE delete   deletes the machines; the bucket stays
#
# What ends the machines, which cost money until then:
# Nothing but `bash FILE delete`: neither the end of the run nor an error.
set -euo pipefail
name=dlrm
project=my-project
zone=us-east5-a
region=us-east5
bucket=my-bucket
service_account=trainer@my-project.iam.gserviceaccount.com
slices=(dlrm-0)
product=v4-64
runtime_version=tpu-ubuntu2204-base
flags=(--node-id=dlrm-0 --network=default)
program=train
host_script=gs://my-bucket/dlrm/launch/host_train.sh

# Runs a command, which may fail because its resource is gone already. "not found" alone
# would also match a missing gcloud, or a missing plug-in of kubectl.
unless_gone() {
    local output
    output=$("$@" 2>&1 | tee -a /dev/stderr) ||
        grep --quiet --extended-regexp --regexp="NOT_FOUND|code=404" \
            --regexp="[Rr]esource '.*' was not found" \
            --regexp="doesn't have a resource type" <<<"$output"
}

# Runs a command on all hosts of all slices at the same time.
on_all_hosts() {
    local slice process processes=() status=0
    for slice in "${slices[@]}"; do
        gcloud compute tpus tpu-vm ssh "$slice" --project="$project" --zone="$zone" \
            --worker=all --quiet --command="$1" &
        processes+=("$!")
    done
    for process in "${processes[@]}"; do wait "$process" || status=1; done
    return "$status"
}
case "${1:-start}" in
start) ;;
logs)
    exec gcloud compute tpus tpu-vm ssh "${slices[0]}" \
        --project="$project" --zone="$zone" --worker=0 --quiet \
        --command="tail --lines=+1 --follow tpu_embedding_$program.log"
    ;;
delete)
    # All programs end first, and save their state. A failure stops no deletion.
    unless_gone on_all_hosts "for each in host_*.sh; do bash \$each stop; done" ||
        echo "A run may not have saved its last steps." >&2
    unless_gone gcloud compute tpus queued-resources delete "$name" \
        --project="$project" --zone="$zone" --force --quiet
    exit
    ;;
*)
    echo "usage: bash $0 [logs | delete]" >&2
    exit 2
    ;;
esac
trap '(($? == 0)) || echo "Machines may exist, and cost money: bash $0 delete" >&2' EXIT

# Nothing is created where the zone lacks the machines, or the account does not exist.
gcloud compute tpus accelerator-types describe "$product" \
    --project="$project" --zone="$zone" >/dev/null
gcloud iam service-accounts describe "$service_account" --project="$project" >/dev/null

# The bucket. In its hierarchical namespace a checkpoint is there whole or not at all.
if ! gcloud storage buckets describe "gs://$bucket" \
    --project="$project" >/dev/null 2>&1; then
    gcloud storage buckets create "gs://$bucket" --project="$project" \
        --location="$region" --uniform-bucket-level-access \
        --enable-hierarchical-namespace
fi
gcloud storage buckets add-iam-policy-binding "gs://$bucket" --project="$project" \
    --member="serviceAccount:$service_account" --role=roles/storage.objectUser >/dev/null
gcloud storage cp /path/to/configs/my_config.py "gs://$bucket/$name/launch/" --project="$project"
gcloud storage cp - "$host_script" --project="$project" <<'END_OF_HOST_SCRIPT'
#!/bin/bash
# Runs on each host, with `install`, `start` or `stop`. Each may be repeated.
set -euo pipefail
bucket=my-bucket
requirement='tpu-embedding[tpu,train]==0.1.0'
program=train
results=/mnt/bucket/dlrm/results
verdicts=/mnt/bucket/dlrm/verdicts
arguments=(
    train
    /mnt/bucket/dlrm/launch/my_config.py
    --output-dir
    /mnt/bucket/dlrm/results
    --data-dir
    /mnt/bucket/criteo
    --set
    batch_size=65536
    --restarts
    3
)

# Mounts the bucket by Cloud Storage FUSE, and installs the package.
install() {
    # cloud.google.com/storage/docs/cloud-storage-fuse/install
    if ! command -v gcsfuse >/dev/null; then
        local keys=/usr/share/keyrings/cloud.google.asc
        local packages=https://packages.cloud.google.com/apt
        curl --fail --silent --show-error "$packages/doc/apt-key.gpg" |
            sudo tee "$keys" >/dev/null
        echo "deb [signed-by=$keys] $packages" \
            "gcsfuse-$(lsb_release --codename --short) main" |
            sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
        sudo apt-get update --quiet
        sudo DEBIAN_FRONTEND=noninteractive \
            apt-get install --yes --quiet gcsfuse python3-venv
    fi
    sudo mkdir -p /mnt/bucket
    if ! mountpoint --quiet /mnt/bucket; then
        sudo chown "$USER" /mnt/bucket
        gcsfuse --implicit-dirs "$bucket" /mnt/bucket
    fi
    # The system's Python may be too old for the package; uv brings its own.
    if [[ ! -x "$HOME/tpu_embedding/bin/python" ]]; then
        python3 -m venv "$HOME/tpu_embedding_uv"
        "$HOME/tpu_embedding_uv/bin/pip" install --quiet uv
        "$HOME/tpu_embedding_uv/bin/uv" venv --python 3.12 "$HOME/tpu_embedding"
    fi
    "$HOME/tpu_embedding_uv/bin/uv" pip install --quiet \
        --python "$HOME/tpu_embedding/bin/python" "$requirement"
    "$HOME/tpu_embedding/bin/tpu-embedding" --version
}

# Starts the program, beyond the end of the SSH session. A run with records resumes.
start() {
    local files="$HOME/tpu_embedding_$program"
    if [[ -e "$files.pid" ]] && kill -0 "$(cat "$files.pid")" 2>/dev/null; then
        echo "$(hostname): runs already, as process $(cat "$files.pid")"
        return
    fi
    if [[ "$program" == train && -e "$results/metrics.jsonl" ]]; then
        arguments+=(--resume)
    fi
    # Left over from another slice, these would let the runtime wait for hosts that are
    # gone. It reads the present values from the metadata server.
    unset MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID
    export TPU_EMBEDDING_VERDICTS="$verdicts"
    nohup setsid "$HOME/tpu_embedding/bin/tpu-embedding" "${arguments[@]}" \
        >"$files.log" 2>&1 </dev/null &
    echo "$!" >"$files.pid"
    echo "$(hostname): started process $!"
}

# Ends the program, and waits while it saves its state.
stop() {
    local process file="$HOME/tpu_embedding_$program.pid"
    if [[ ! -e "$file" ]]; then
        return
    fi
    process=$(cat "$file")
    if kill -TERM "$process" 2>/dev/null; then
        timeout 300 tail --follow --pid="$process" /dev/null
    fi
}

"$1"
END_OF_HOST_SCRIPT

# The machines. They cost money from here on.
if ! gcloud compute tpus queued-resources describe "$name" \
    --project="$project" --zone="$zone" >/dev/null 2>&1; then
    gcloud compute tpus queued-resources create "$name" \
        --project="$project" --zone="$zone" \
        --accelerator-type="$product" --runtime-version="$runtime_version" \
        --service-account="$service_account" --scopes=cloud-platform \
        --valid-until-duration=24h "${flags[@]}"
fi
state=
while [[ "$state" != ACTIVE ]]; do
    state=$(gcloud compute tpus queued-resources describe "$name" \
        --project="$project" --zone="$zone" --format='value(state.state)')
    echo "$(date +%T): queued resource $name is $state"
    case "$state" in
    ACTIVE) ;;
    FAILED | SUSPENDED) false ;; # There was no capacity, or it was taken away.
    *) sleep 60 ;;
    esac
done

# Makes gcloud create its SSH key once, before it is needed many times.
gcloud compute tpus tpu-vm ssh "${slices[0]}" --project="$project" --zone="$zone" \
    --worker=0 --quiet --command=true
on_all_hosts "gcloud storage cp $host_script . && bash host_$program.sh install"
on_all_hosts "bash host_$program.sh start"
echo "Started. bash $0 logs follows the log; bash $0 delete deletes the machines."
