#!/bin/bash
# Mounts the bucket and installs the package on a TPU host; may be repeated.
# Usage: setup_host.sh BUCKET REQUIREMENT
set -euo pipefail
bucket="$1"
requirement="$2"
keys=/usr/share/keyrings/cloud.google.asc
export DEBIAN_FRONTEND=noninteractive

# cloud.google.com/storage/docs/cloud-storage-fuse/install
if ! command -v gcsfuse >/dev/null; then
    curl --fail --silent --show-error \
        https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo tee "$keys" >/dev/null
    echo "deb [signed-by=$keys] https://packages.cloud.google.com/apt" \
        "gcsfuse-$(lsb_release --codename --short) main" |
        sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get update --quiet
    sudo apt-get install --yes --quiet gcsfuse python3-venv
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
