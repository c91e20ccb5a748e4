if ! gcloud container clusters describe "$cluster" \
    --project="$project" --location="$zone" >/dev/null 2>&1; then
    gcloud container clusters create "$cluster" \
        --project="$project" --location="$zone" --release-channel=regular \
        --machine-type=e2-standard-4 --num-nodes=1 --addons=GcsFuseCsiDriver \
        --workload-pool="$project.svc.id.goog" "${network_flags[@]}"
fi
