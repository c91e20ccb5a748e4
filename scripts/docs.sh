#!/usr/bin/env bash
# Builds the documentation in docs/_build/html. Warnings are errors.
#   scripts/docs.sh [-- SPHINX_OPTIONS]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"
if [ "$#" -gt 0 ]; then
    [ "$1" = -- ] || reject_option "$1"
    shift
fi
setup_environment docs
export JAX_PLATFORMS=cpu
python -m sphinx -W --keep-going -b html "$@" docs docs/_build/html
echo "Open docs/_build/html/index.html"
