#!/bin/bash
# Runs on each host, with `install`, `start` or `stop`. Each may be repeated.
set -euo pipefail
%%variables

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
