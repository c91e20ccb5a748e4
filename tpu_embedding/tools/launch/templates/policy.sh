if ! gcloud compute resource-policies describe "$name-topology" \
    --project="$project" --region="$region" >/dev/null 2>&1; then
    gcloud compute resource-policies create workload-policy "$name-topology" \
        --project="$project" --region="$region" --type=HIGH_THROUGHPUT \
        --accelerator-topology=%%grid
fi
