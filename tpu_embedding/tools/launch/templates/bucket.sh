# The bucket. In its hierarchical namespace a checkpoint is there whole or not at all.
if ! gcloud storage buckets describe "gs://$bucket" \
    --project="$project" >/dev/null 2>&1; then
    gcloud storage buckets create "gs://$bucket" --project="$project" \
        --location="$region" --uniform-bucket-level-access \
        --enable-hierarchical-namespace
fi
gcloud storage buckets add-iam-policy-binding "gs://$bucket" --project="$project" \
    --member="serviceAccount:$service_account" --role=roles/storage.objectUser >/dev/null
