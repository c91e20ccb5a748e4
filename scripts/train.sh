#!/usr/bin/env bash
# Sets up an environment in .venv, then trains: scripts/train.sh CONFIG [OPTIONS]
# The options are those of `tpu-embedding train`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup_environment "${EXTRAS-}"
exec tpu-embedding train "$@"
