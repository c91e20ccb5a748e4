#!/usr/bin/env bash
# The first hour on one host of a TPU v5p, v6e or 7x. Runs the doctor, then for each of
# the two backends the benchmark step, a profile of it, and a short training. Writes all
# results and a table of them to one directory to send back.
#
#   scripts/first_hour.sh [--output-dir DIR] [--seconds N]
#
#   --output-dir DIR  new directory for the results; runs/first_hour-TIME by default
#   --seconds N       time limit per part; 1500 by default, doubled for the doctor
#
# If a part fails or takes too long, the table says so, and the next part starts. Without
# a TPU, everything runs at a small size on emulated devices. The variable EXTRAS has the
# extras to install, "train,tpu" by default. The exit status is 1 if a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"

out=runs/first_hour-$(date +%Y%m%d-%H%M%S) limit=1500
while [ "$#" -gt 0 ]; do
    case "$1" in
    --output-dir | --seconds)
        if [ -z "${2-}" ]; then
            echo "scripts/first_hour.sh: $1 needs a value" >&2
            exit 2
        fi
        if [ "$1" = --seconds ]; then limit=$2; else out=$2; fi
        shift 2
        ;;
    *) reject_option "$1" ;;
    esac
done
if [ -e "$out" ]; then
    echo "scripts/first_hour.sh: --output-dir must be new, got $out" >&2
    exit 2
fi
setup_environment "${EXTRAS-train,tpu}"
mkdir -p "$out/logs"

# Runs a command with a time limit and records how it ended: run_part NAME COMMAND...
run_part() {
    local name=$1 begin=$SECONDS code=0 status=ok
    shift
    printf '%-22s' "$name"
    timeout --kill-after=30 "$limit" "$@" >"$out/logs/$name.log" 2>&1 || code=$?
    case $code in
    0) ;;
    124 | 137) status="not finished in $limit s" ;;
    *) status="exit status $code" ;;
    esac
    printf '%s\t%s\t%d\n' "$name" "$status" $((SECONDS - begin)) >>"$out/parts.tsv"
    echo "$status, $((SECONDS - begin)) s"
}

run_part devices python -m tpu_embedding.tools.doctor.child devices
step=() training=(--set num_steps=2000)
if ! grep -q '"platform": "tpu"' "$out/logs/devices.log"; then
    echo "Found no TPU: using emulated devices and small sizes."
    step=(--devices 8 --small --steps 2 --rounds 2)
    training=(--devices 8 --set num_steps=4 --set batch_size=64)
    training+=(--set data.num_evaluation_samples=256)
fi
limit=$((2 * limit)) run_part doctor python -m tpu_embedding.tools.cli doctor
for backend in xla sparse_core; do
    run_part "step_$backend" python benchmarks/step_time.py --backend "$backend" \
        --json "$out/step_$backend.json" "${step[@]}"
    run_part "profile_$backend" python benchmarks/step_time.py --backend "$backend" \
        --profile "$out/profile_$backend" "${step[@]}" --rounds 1 --steps 5
    run_part "training_$backend" python -m tpu_embedding.tools.cli train synthetic \
        --output-dir "$out/training_$backend" --set "backend=$backend" "${training[@]}"
done
python scripts/first_hour_table.py "$out"
