#!/usr/bin/env bash
# Sets up an environment in .venv, then checks the project. Stops at the first failure.
#   scripts/test.sh [-- PYTEST_OPTIONS]
#       The quick tier, to run before each change: format, lint, imports between folders,
#       and all tests that are not marked `full`.
#   scripts/test.sh --layer [-- PYTEST_OPTIONS]
#       The quick tier of the library, without the tests of tpu_embedding/tools, the
#       docs, the benchmarks and the scripts.
#   scripts/test.sh --all [-- PYTEST_OPTIONS]
#       The full tier, for continuous integration. It adds types, the tests marked `full`,
#       the docs, the wheel, export to and import from TensorFlow and the buffers of
#       jax-tpu-embedding in separate environments, Python 3.11 if it is installed, and
#       the lowest versions of all dependencies that pyproject.toml allows.
#   scripts/test.sh --exhaustive [-- PYTEST_OPTIONS]
#       The exhaustive tier, to run before a release. It adds the tests marked
#       `exhaustive`, and checks the argument shapes of all traced functions.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

help_on_request "$@"
# Checks the declared shapes and dtypes of the traced stages at every call. Only with the
# lowest versions and in the exhaustive tier, because it takes a fifth of the time.
traced=$(printf 'tpu_embedding.%s,' \
    functional.{steps,serving_lookup} recommenders.unique_ids \
    inputs.{buffer_sizes,containers,prepare,shard_inputs} dynamic lookup rows update)
check_shapes="--jaxtyping-packages=${traced}beartype.beartype"

tier=quick tests="not full" left_out=() all_checks=()
case "${1-}" in
--layer)
    tier=layer
    left_out=(--ignore=tpu_embedding/tools --ignore=benchmarks)
    left_out+=(--ignore=tests/{tools,docs,processes,benchmarks})
    left_out+=(--ignore=tests/test_{benchmarks,readme,scripts}.py)
    shift
    ;;
--all)
    tier=full tests="not exhaustive"
    shift
    ;;
--exhaustive)
    tier=exhaustive tests="" all_checks=("$check_shapes")
    shift
    ;;
esac
if [ "$#" -gt 0 ]; then
    [ "$1" = -- ] || reject_option "$1"
    shift
fi

section() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }

run_pytest() {
    python -m pytest -n "${TEST_PROCESSES:-2}" --dist worksteal "$@"
}

find_python311() {
    find_interpreter python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python
}

# Runs fewer tests, because pip finds an older jax for Python 3.11.
check_python311() {
    local PYTHON VENV=.venv-3.11
    if ! PYTHON=$(find_python311); then
        echo "Skipping Python 3.11: no interpreter with venv was found."
        return
    fi
    setup_environment dev
    run_pytest -m "not tpu_compiler" tests/tools/cli/test_command.py
}

# The lower bounds in pyproject.toml, on the oldest Python installed.
check_lowest_versions() {
    local python VENV=.venv-lowest
    python=$(find_python311 || command -v python)
    uv venv --quiet --allow-existing --python "$python" "$VENV"
    uv pip install --quiet --upgrade --resolution lowest-direct \
        --python "$VENV/bin/python" --editable ".[dev]"
    PATH="$PWD/$VENV/bin:$PATH"
    python -c 'import flax, jax, optax, orbax.checkpoint
print(*(f"{x.__name__} {x.__version__}" for x in (jax, flax, optax, orbax.checkpoint)))'
    run_pytest "$check_shapes" -m "not full and not tpu_compiler" \
        tests/nn/test_training.py tests/nn/test_linen.py tests/optimizers/test_golden.py \
        tests/checkpoint/test_saving.py tests/export/test_stablehlo.py \
        -k "not eight and not 8devices"
}

# In a separate environment, because TensorFlow is large and only these tests need it.
check_tensorflow() {
    local VENV=.venv-tf
    setup_environment dev,serving,tf
    TF_CPP_MIN_LOG_LEVEL=2 python -m pytest -n0 \
        tests/export/test_saved_model.py tests/checkpoint/imports/test_tensorflow.py
}

# Skipped where it cannot be installed: it has no wheel for some platforms.
check_jax_tpu_embedding() {
    local VENV=.venv-peer
    setup_environment dev
    if ! install "$VENV/bin/python" --editable ".[peer]"; then
        echo "Skipping jax-tpu-embedding: it cannot be installed here."
        return
    fi
    python -m pytest -n0 -m "" tests/sparse_core/test_jax_tpu_embedding.py
}

section "environment"
if [ "$tests" = "not full" ]; then
    setup_environment dev,tpu
else
    setup_environment dev,docs,tpu
fi
export JAX_PLATFORMS=cpu
# Otherwise, each process that a test starts would compile JAX's sources again.
unset PYTHONDONTWRITEBYTECODE
section "format and lint"
ruff format --check .
ruff check .
section "imports between folders"
lint-imports --no-cache
if [ "$tests" != "not full" ]; then
    # Runs two groups of checks in parallel, since each mostly uses one core.
    section "types, wheel and lowest versions; TensorFlow, a peer and Python 3.11"
    log=$(mktemp)
    {
        (check_tensorflow)
        (check_jax_tpu_embedding)
        (check_python311)
    } >"$log" 2>&1 &
    leg=$!
    trap 'kill "$leg" 2>/dev/null || true; rm -f "$log"' EXIT
    pyright --pythonpath "$(command -v python)"
    bash scripts/check_wheel.sh
    (check_lowest_versions)
    section "TensorFlow, a peer and Python 3.11"
    wait "$leg" || failed=yes
    cat "$log"
    [ -z "${failed-}" ]
fi
section "tests, $tier tier"
run_pytest -m "$tests" "${left_out[@]}" "${all_checks[@]}" "$@"
section "passed: $tier tier"
