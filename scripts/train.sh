#!/usr/bin/env bash
# Sets up an environment in .venv, then trains: scripts/train.sh CONFIG [OPTIONS]
# Accepts the options of `tpu-embedding train`; with a CONFIG, --help lists them. The
# variable EXTRAS has the extras to install: "train" by default, "train,tpu" or
# "train,cuda" for accelerators.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"
setup_environment "${EXTRAS-train}"
# Huge pages for tables in host memory; see docs/guides/speed.md.
export GLIBC_TUNABLES="${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}"
exec tpu-embedding train "$@"
