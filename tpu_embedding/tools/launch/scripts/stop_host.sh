#!/bin/bash
# Stops tpu-embedding on a TPU host; a training run saves its state first.
# Usage: stop_host.sh PROGRAM
set -euo pipefail
files="$HOME/tpu_embedding_$1"
if [[ -e "$files.pid" ]] && kill -TERM "$(cat "$files.pid")" 2>/dev/null; then
    echo "$(hostname): asked process $(cat "$files.pid") to stop"
else
    echo "$(hostname): $1 does not run"
fi
