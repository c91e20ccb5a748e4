#!/bin/bash

##### tpu-embedding launch create
# check that the config fits the slices
tpu-embedding compile dlrm --topology tpu7x:2x4x4 --slices 1 --set batch_size=65536
# check that the zone offers tpu7x-standard-4t
gcloud compute machine-types describe tpu7x-standard-4t --project=my-project --zone=us-central1-c --format=json
# check that the service account exists
gcloud iam service-accounts describe trainer@my-project.iam.gserviceaccount.com --project=my-project --format=json
# create the bucket
if ! gcloud storage buckets describe gs://my-bucket --project=my-project --raw --format=json >/dev/null; then
gcloud storage buckets create gs://my-bucket --project=my-project --location=us-central1 --uniform-bucket-level-access --enable-hierarchical-namespace
fi
# admit the machines to the bucket
gcloud storage buckets add-iam-policy-binding gs://my-bucket --project=my-project --member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/storage.objectUser
# create the workload policy
if ! gcloud compute resource-policies describe dlrm-topology --project=my-project --region=us-central1 --format=json >/dev/null; then
gcloud compute resource-policies create workload-policy dlrm-topology --project=my-project --region=us-central1 --type=HIGH_THROUGHPUT --accelerator-topology=2x4x4
fi
# create the instance template
if ! gcloud compute instance-templates describe dlrm --project=my-project --format=json >/dev/null; then
gcloud compute instance-templates create dlrm --project=my-project --machine-type=tpu7x-standard-4t --image-project=ubuntu-os-accelerator-images --image-family=ubuntu-accel-2404-amd64-tpu-tpu7x --boot-disk-size=200GB --boot-disk-type=hyperdisk-balanced --maintenance-policy=TERMINATE --provisioning-model=FLEX_START --max-run-duration=21600s --instance-termination-action=DELETE --service-account=trainer@my-project.iam.gserviceaccount.com --scopes=cloud-platform --network=default
fi
# create the machines
if ! gcloud compute instance-groups managed describe dlrm --project=my-project --zone=us-central1-c --format=json >/dev/null; then
gcloud compute instance-groups managed create dlrm --project=my-project --zone=us-central1-c --size=8 --template=dlrm --default-action-on-vm-failure=do-nothing --target-size-policy-mode=bulk --workload-policy=projects/my-project/regions/us-central1/resourcePolicies/dlrm-topology
fi
# wait for the machines
gcloud compute instance-groups managed wait-until dlrm --project=my-project --zone=us-central1-c --stable --timeout=3600

##### tpu-embedding launch setup
# copy a file to the bucket
gcloud storage cp dist/tpu_embedding-0.1.0-py3-none-any.whl gs://my-bucket/dlrm/launch/ --project=my-project
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
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
index=0
gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet --command=true
# install the package on all hosts
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
for index in "${!hosts[@]}"; do
  gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/setup_host.sh | bash -s -- my-bucket '"'"'/mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]'"'"'' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run --program doctor
# start doctor on all hosts
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
for index in "${!hosts[@]}"; do
  gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts doctor --expect tpu7x:2x4x4' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run
# start train on all hosts
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
for index in "${!hosts[@]}"; do
  gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts train dlrm --output-dir /mnt/bucket/dlrm/results --data-dir /mnt/bucket/criteo --set batch_size=65536 --coordinator '"'"''"${hosts[0]}"':8476'"'"' --num-processes '"'"''"${#hosts[@]}"''"'"' --process-id '"'"''"$index"''"'"' --restarts 3' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch logs
# follow the log of the first host
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
index=0
gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=tail --lines=+1 --follow tpu_embedding_train.log'

##### tpu-embedding launch status
# show the group
gcloud compute instance-groups managed describe dlrm --project=my-project --zone=us-central1-c '--format=yaml(targetSize,status)'
# show the machines
gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c

##### tpu-embedding launch stop
# stop train on all hosts
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
for index in "${!hosts[@]}"; do
  gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/stop_host.sh | bash -s -- train' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch run --resume
# start train on all hosts
mapfile -t hosts < <(gcloud compute instance-groups managed list-instances dlrm --project=my-project --zone=us-central1-c '--format=value(name)' | sort)
for index in "${!hosts[@]}"; do
  gcloud compute ssh ''"${hosts[$index]}"'' --project=my-project --zone=us-central1-c --quiet '--command=gcloud storage cat gs://my-bucket/dlrm/launch/run_host.sh | bash -s -- /mnt/bucket/dlrm/verdicts train dlrm --output-dir /mnt/bucket/dlrm/results --data-dir /mnt/bucket/criteo --set batch_size=65536 --resume --coordinator '"'"''"${hosts[0]}"':8476'"'"' --num-processes '"'"''"${#hosts[@]}"''"'"' --process-id '"'"''"$index"''"'"' --restarts 3' &
done
for job in $(jobs -p); do wait "$job"; done

##### tpu-embedding launch fetch
# copy the results
gcloud storage rsync gs://my-bucket/dlrm/results runs/dlrm --project=my-project --recursive

##### tpu-embedding launch delete
# delete the machines
if gcloud compute instance-groups managed describe dlrm --project=my-project --zone=us-central1-c --format=json >/dev/null; then
gcloud compute instance-groups managed delete dlrm --project=my-project --zone=us-central1-c --quiet
fi
# delete the instance template
if gcloud compute instance-templates describe dlrm --project=my-project --format=json >/dev/null; then
gcloud compute instance-templates delete dlrm --project=my-project --quiet
fi
# delete the workload policy
if gcloud compute resource-policies describe dlrm-topology --project=my-project --region=us-central1 --format=json >/dev/null; then
gcloud compute resource-policies delete dlrm-topology --project=my-project --region=us-central1 --quiet
fi
