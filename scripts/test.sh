#!/usr/bin/env bash
# Sets up an environment in .venv, then checks everything: format, lint, types, tests
# with examples and TPU compilations, and the wheel. Stops at the first failure.
#   scripts/test.sh [PYTEST_OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
setup_environment dev,tpu
export JAX_PLATFORMS=cpu

section() { printf '\n== %s\n' "$1"; }

section "format and lint"
ruff format --check .
ruff check .
section "types"
pyright --pythonpath "$(command -v python)"
section "tests"
python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal "$@"
section "wheel, from another directory"
bash scripts/check_wheel.sh
