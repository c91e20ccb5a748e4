#!/bin/bash
# Trains dlrm: 1 x tpu7x:2x4x4, 8 hosts, on_demand, in us-central1-c.
# Printed by `tpu-embedding launch`. Read it before you run it.
#
#   bash FILE          creates what is missing and starts the run; may be repeated
#   bash FILE logs     follows the log of the first host, until Ctrl-C
#   bash FILE delete   deletes the machines; the bucket stays
#
# What ends the machines, which cost money until then:
# Each start of the job ends after 6h. The cluster's autoscaler deletes a machine about
# 10 minutes after its last job. The cluster itself stays, and costs a fee, until `bash
# FILE delete`.
set -euo pipefail
name=dlrm
project=my-project
zone=us-central1-c
region=us-central1
bucket=my-bucket
service_account=trainer@my-project.iam.gserviceaccount.com
slices=(dlrm-0)
product=tpu7x-standard-4t
cluster=dlrm
context=gke_my-project_us-central1-c_dlrm
job=dlrm
jobs=(dlrm dlrm-doctor)
flags=(
    --num-nodes=8
    --placement-policy=dlrm-topology
    --enable-autoscaling
    --min-nodes=0
    --max-nodes=8
)
network_flags=(--network=default)

# Runs a command, which may fail because its resource is gone already. "not found" alone
# would also match a missing gcloud, or a missing plug-in of kubectl.
unless_gone() {
    local output
    output=$("$@" 2>&1 | tee -a /dev/stderr) ||
        grep --quiet --extended-regexp --regexp="NOT_FOUND|code=404" \
            --regexp="[Rr]esource '.*' was not found" \
            --regexp="doesn't have a resource type" <<<"$output"
}

connect() {
    gcloud container clusters get-credentials "$cluster" \
        --project="$project" --location="$zone"
}
stop() {
    connect && kubectl delete jobset "${jobs[@]}" --context="$context" \
        --cascade=foreground --ignore-not-found
}
case "${1:-start}" in
start) ;;
logs)
    connect
    exec kubectl logs --context="$context" --container=tpu-embedding --tail=-1 \
        --follow --selector="jobset.sigs.k8s.io/jobset-name=$job,\
jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    ;;
delete)
    # All programs end first, and save their state. A failure stops no other deletion.
    status=0
    unless_gone stop || status=1
    unless_gone gcloud container clusters delete "$cluster" \
        --project="$project" --location="$zone" --quiet || status=1
    unless_gone gcloud compute resource-policies delete "$name-topology" \
        --project="$project" --region="$region" --quiet || status=1
    exit "$status"
    ;;
*)
    echo "usage: bash $0 [logs | delete]" >&2
    exit 2
    ;;
esac
trap '(($? == 0)) || echo "Machines may exist, and cost money: bash $0 delete" >&2' EXIT

# Nothing is created where the zone lacks the machines, or the account does not exist.
gcloud compute machine-types describe "$product" \
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
gcloud storage cp /path/to/dist/tpu_embedding-0.1.0-py3-none-any.whl "gs://$bucket/$name/launch/" --project="$project"

# The cluster and its JobSet controller. They cost money from here on.
if ! gcloud container clusters describe "$cluster" \
    --project="$project" --location="$zone" >/dev/null 2>&1; then
    gcloud container clusters create "$cluster" \
        --project="$project" --location="$zone" --release-channel=regular \
        --machine-type=e2-standard-4 --num-nodes=1 --addons=GcsFuseCsiDriver \
        --workload-pool="$project.svc.id.goog" "${network_flags[@]}"
fi
connect
if ! kubectl get customresourcedefinition jobsets.jobset.x-k8s.io \
    --context="$context" >/dev/null 2>&1; then
    kubectl apply --context="$context" --server-side \
        --filename=https://github.com/kubernetes-sigs/jobset/releases/download/v0.8.1/manifests.yaml
fi
# Pods act as the service account, without a key file.
gcloud iam service-accounts add-iam-policy-binding "$service_account" \
    --project="$project" --role=roles/iam.workloadIdentityUser \
    --member="serviceAccount:$project.svc.id.goog[default/$name]" >/dev/null

# The machines: a node pool for each slice.
if ! gcloud compute resource-policies describe "$name-topology" \
    --project="$project" --region="$region" >/dev/null 2>&1; then
    gcloud compute resource-policies create workload-policy "$name-topology" \
        --project="$project" --region="$region" --type=HIGH_THROUGHPUT \
        --accelerator-topology=2x4x4
fi
for slice in "${slices[@]}"; do
    if ! gcloud container node-pools describe "$slice" --cluster="$cluster" \
        --project="$project" --location="$zone" >/dev/null 2>&1; then
        gcloud container node-pools create "$slice" --cluster="$cluster" \
            --project="$project" --location="$zone" --machine-type="$product" \
            --service-account="$service_account" --scopes=cloud-platform \
            --workload-metadata=GKE_METADATA "${flags[@]}"
    fi
done

# The job. One that runs is left alone; one that has ended starts again, and resumes.
ended=$(kubectl get jobset "$job" --context="$context" --ignore-not-found \
    --output=jsonpath='{.status.terminalState}')
if [[ -n "$ended" ]]; then
    kubectl delete jobset "$job" --context="$context"
fi
kubectl apply --context="$context" --filename=- <<'END_OF_MANIFEST'
apiVersion: v1
kind: ServiceAccount
metadata:
  name: "dlrm"
  annotations:
    iam.gke.io/gcp-service-account: "trainer@my-project.iam.gserviceaccount.com"
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "dlrm"
  annotations:  # One slice per node pool: no two slices share one, and none is split.
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: "dlrm"
  ttlSecondsAfterFinished: 86400
  failurePolicy:
    maxRestarts: 3
    rules:
    - name: lifetimeIsOver
      action: FailJobSet
      onJobFailureReasons: [DeadlineExceeded]
  replicatedJobs:
  - name: slice
    replicas: 1
    template:
      spec:
        # One pod for each host. A pod that fails ends its job, so that all slices
        # restart together.
        parallelism: 8
        completions: 8
        completionMode: Indexed
        backoffLimit: 0
        activeDeadlineSeconds: 21600
        template:
          metadata:
            annotations: {"gke-gcsfuse/volumes": "true"}
          spec:
            serviceAccountName: "dlrm"
            restartPolicy: Never
            terminationGracePeriodSeconds: 300  # to save a checkpoint after SIGTERM
            nodeSelector: {"cloud.google.com/gke-tpu-accelerator": "tpu7x", "cloud.google.com/gke-tpu-topology": "2x4x4"}
            tolerations:
            - {key: google.com/tpu, operator: Exists, effect: NoSchedule}
            - {key: cloud.google.com/gke-spot, operator: Exists, effect: NoSchedule}
            containers:
            - name: tpu-embedding
              image: python:3.12
              command:
              - bash
              - -c
              - |
                # Installs the package and runs tpu-embedding. A run with records resumes.
                set -euo pipefail
                python -m pip install --quiet --root-user-action=ignore "$1"
                shift
                if [[ "$1" == train && -e /mnt/bucket/dlrm/results/metrics.jsonl ]]; then
                    set -- "$@" --resume
                fi
                exec tpu-embedding "$@"
              - pod.sh
              args:
              - "/mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]"
              - "train"
              - "dlrm"
              - "--output-dir"
              - "/mnt/bucket/dlrm/results"
              - "--data-dir"
              - "/mnt/bucket/criteo"
              - "--set"
              - "batch_size=65536"
              env:
              - {name: TPU_EMBEDDING_VERDICTS, value: /mnt/bucket/dlrm/verdicts}
              - {name: PYTHONUNBUFFERED, value: "1"}
              ports:  # of the runtime in a slice, between slices, and of JAX
              - containerPort: 8471
              - containerPort: 8080
              - containerPort: 8476
              resources:
                requests: {google.com/tpu: 4}
                limits: {google.com/tpu: 4}
              volumeMounts:
              - {name: bucket, mountPath: /mnt/bucket}
            volumes:
            - name: bucket
              csi:
                driver: gcsfuse.csi.storage.gke.io
                volumeAttributes: {bucketName: "my-bucket", mountOptions: implicit-dirs}
END_OF_MANIFEST
echo "Started. bash $0 logs follows the log; bash $0 delete deletes the machines."
