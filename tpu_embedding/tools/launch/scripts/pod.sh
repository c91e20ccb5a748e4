#!/bin/bash
# Installs the package in a pod and runs tpu-embedding; a restarted pod resumes.
# Usage: pod.sh REQUIREMENT OUTPUT_DIR ARGUMENTS...
set -euo pipefail
requirement="$1"
output_dir="$2"
shift 2
python -m pip install --quiet --root-user-action=ignore "$requirement"
if [[ "$1" == train && "${RESTART_ATTEMPT:-0}" != 0 &&
    -e "$output_dir/metrics.jsonl" ]]; then
    set -- "$@" --resume
fi
exec tpu-embedding "$@"
