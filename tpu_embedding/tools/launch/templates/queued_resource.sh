%%head

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

%%bucket
%%uploads
gcloud storage cp - "$host_script" --project="$project" <<'END_OF_HOST_SCRIPT'
%%host_script
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
