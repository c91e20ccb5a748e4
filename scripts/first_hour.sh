#!/usr/bin/env bash
# The first hour on one host of a TPU v5p, v6e or 7x, from a clone: the doctor with its
# timings and profiles, then a short training with each backend. From an installed wheel,
# type the same commands; docs/guides/doctor.md has them.
#
#   scripts/first_hour.sh [--output-dir DIR]
#
#   --output-dir DIR  directory for the results; runs/first_hour-TIME by default
#
# Without a TPU, everything runs at a small size on emulated devices. The variable EXTRAS
# has the extras to install, "train,tpu" by default. The exit status is 1 if a part failed.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"

out=runs/first_hour-$(date +%Y%m%d-%H%M%S)
case "${1-}" in
'') ;;
--output-dir) out=${2:?"scripts/first_hour.sh: --output-dir needs a value"} ;;
*) reject_option "$1" ;;
esac
setup_environment "${EXTRAS-train,tpu}"

status=0
tpu-embedding doctor --timings --output-dir "$out" || status=1
training=(--set num_steps=2000)
if ! grep -q '"platform": "tpu"' "$out"/doctor-*.json; then
    training=(--devices 8 --set num_steps=4 --set batch_size=64)
    training+=(--set data.num_evaluation_samples=256)
fi
for backend in xla sparse_core; do
    tpu-embedding train synthetic --output-dir "$out/training_$backend" \
        --set "backend=$backend" "${training[@]}" || status=1
done
echo "Please send $out, or at least its doctor-*.json."
exit "$status"
