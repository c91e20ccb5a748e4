#!/bin/bash

##### tpu-embedding launch create
# check that the config fits the slices
tpu-embedding compile configs/my_config.py --topology v4:2x4x4 --slices 1 --set batch_size=65536
# check that the zone offers v4-64
gcloud compute tpus accelerator-types describe v4-64 --project=my-project --zone=us-east5-a --format=json
# check that the service account exists
gcloud iam service-accounts describe trainer@my-project.iam.gserviceaccount.com --project=my-project --format=json
# create the bucket
if ! gcloud storage buckets describe gs://my-bucket --project=my-project --raw --format=json >/dev/null; then
gcloud storage buckets create gs://my-bucket --project=my-project --location=us-east5 --uniform-bucket-level-access --enable-hierarchical-namespace
fi
# admit the machines to the bucket
gcloud storage buckets add-iam-policy-binding gs://my-bucket --project=my-project --member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/storage.objectUser
# ask for the machines
if ! gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json >/dev/null; then
gcloud compute tpus queued-resources create dlrm --project=my-project --zone=us-east5-a --accelerator-type=v4-64 --runtime-version=tpu-ubuntu2204-base --node-id=dlrm-0 --valid-until-duration=24h --service-account=trainer@my-project.iam.gserviceaccount.com --scopes=cloud-platform --network=default
fi

##### tpu-embedding launch setup
# check that the machines are there
# state.state must be ACTIVE
gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json
# copy a file to the bucket
gcloud storage cp configs/my_config.py gs://my-bucket/dlrm/launch/ --project=my-project
# copy a script to the bucket
gcloud storage cp - gs://my-bucket/dlrm/launch/setup_host.sh --project=my-project <<'END_OF_INPUT'
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
END_OF_INPUT
# copy a script to the bucket
gcloud storage cp - gs://my-bucket/dlrm/launch/run_host.sh --project=my-project <<'END_OF_INPUT'
#!/bin/bash
# Runs tpu-embedding on a TPU host, beyond the end of the SSH session.
# Usage: run_host.sh VERDICTS_DIR ARGUMENTS...
# The output goes to ~/tpu_embedding_PROGRAM.log, the process id to the same .pid.
set -euo pipefail
export TPU_EMBEDDING_VERDICTS="$1"
shift
files="$HOME/tpu_embedding_$1"
if [[ -e "$files.pid" ]] && kill -0 "$(cat "$files.pid")" 2>/dev/null; then
    echo "$(hostname): runs already, as process $(cat "$files.pid")"
    exit 0
fi
# Left over from another slice, these would let the runtime wait for hosts that are gone.
# Where there are several slices, it reads the present values from the metadata server.
unset MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID
nohup setsid "$HOME/tpu_embedding/bin/tpu-embedding" "$@" \
    >"$files.log" 2>&1 </dev/null &
echo "$!" >"$files.pid"
echo "$(hostname): started process $!"
END_OF_INPUT
# copy a script to the bucket
gcloud storage cp - gs://my-bucket/dlrm/launch/stop_host.sh --project=my-project <<'END_OF_INPUT'
#!/bin/bash
# Stops tpu-embedding on a TPU host; a training run saves its state first.
# Usage: stop_host.sh PROGRAM
set -euo pipefail
files="$HOME/tpu_embedding_$1"
if [[ -e "$files.pid" ]] && kill -TERM "$(cat "$files.pid")" 2>/dev/null; then
    echo "$(hostname): asked process $(cat "$files.pid") to stop"
else
    echo "$(hostname): $1 does not run"
fi
END_OF_INPUT
# reach a host
hosts=(dlrm-0)
index=0
gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=0 --quiet --command=true
# install the package on all hosts
hosts=(dlrm-0)
for index in "${!hosts[@]}"; do
  gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=all --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/setup_host.sh | bash -s -- my-bucket '"'"'tpu-embedding[tpu,train]==0.1.0'"'"'' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run --program doctor
# check that the machines are there
# state.state must be ACTIVE
gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json
# start doctor on all hosts
hosts=(dlrm-0)
for index in "${!hosts[@]}"; do
  gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=all --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts doctor --expect v4:2x4x4' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run
# check that the machines are there
# state.state must be ACTIVE
gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json
# start train on all hosts
hosts=(dlrm-0)
for index in "${!hosts[@]}"; do
  gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=all --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts train /mnt/bucket/dlrm/launch/my_config.py --output-dir /mnt/bucket/dlrm/results --data-dir /mnt/bucket/criteo --set batch_size=65536 --restarts 3' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch logs
# follow the log of the first host
hosts=(dlrm-0)
index=0
gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=0 --quiet '--command=tail --lines=+1 --follow tpu_embedding_train.log'

##### tpu-embedding launch status
# show the request
gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a '--format=yaml(state)'
# show the slices
gcloud compute tpus tpu-vm list --project=my-project --zone=us-east5-a

##### tpu-embedding launch stop
# stop train on all hosts
hosts=(dlrm-0)
for index in "${!hosts[@]}"; do
  gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=all --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/stop_host.sh | bash -s -- train' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run --resume
# check that the machines are there
# state.state must be ACTIVE
gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json
# start train on all hosts
hosts=(dlrm-0)
for index in "${!hosts[@]}"; do
  gcloud compute tpus tpu-vm ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-east5-a --worker=all --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts train /mnt/bucket/dlrm/launch/my_config.py --output-dir /mnt/bucket/dlrm/results --data-dir /mnt/bucket/criteo --set batch_size=65536 --resume --restarts 3' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch fetch
# copy the results
gcloud storage rsync gs://my-bucket/dlrm/results runs/dlrm --project=my-project --recursive

##### tpu-embedding launch delete
# delete the machines
if gcloud compute tpus queued-resources describe dlrm --project=my-project --zone=us-east5-a --format=json >/dev/null; then
gcloud compute tpus queued-resources delete dlrm --project=my-project --zone=us-east5-a --force --quiet
fi
