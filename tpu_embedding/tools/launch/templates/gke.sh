%%head

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
%%delete
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

%%bucket
%%uploads

# The cluster and its JobSet controller. They cost money from here on.
%%create_cluster
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
%%create_policy
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
%%manifest
END_OF_MANIFEST
echo "Started. bash $0 logs follows the log; bash $0 delete deletes the machines."
