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
