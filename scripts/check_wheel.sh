#!/usr/bin/env bash
# Builds the source archive and the wheel, checks their metadata for a package index, and
# unpacks the wheel into a temporary directory. Runs it from there, first as a whole, then
# without the tools. Runs the commands after a plain installation, without any extra.
# test.sh calls this script. Its environment has the wheel's dependencies.
#   scripts/check_wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
help_on_request "$@"
[ "$#" -eq 0 ] || reject_option "$1"
root=$PWD directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python -m build --outdir "$directory" . >"$directory/build.log" 2>&1 || {
    cat "$directory/build.log"
    exit 1
}
python -m twine --no-color check --strict "$directory"/*.{whl,tar.gz}
max_bytes=2000000 num_bytes=$(wc -c <"$(echo "$directory"/*.whl)")
if [ "$num_bytes" -gt "$max_bytes" ]; then
    echo "The wheel must have at most $max_bytes bytes, got $num_bytes." >&2
    exit 1
fi
python -m pip install -qq --disable-pip-version-check --no-deps \
    --target "$directory/site" "$directory"/*.whl
cd "$directory"
export PYTHONPATH="$directory/site"
python - "$directory" <<'EOF'
import pathlib, sys
import tpu_embedding
where = pathlib.Path(tpu_embedding.__file__).resolve()
assert where.is_relative_to(pathlib.Path(sys.argv[1]).resolve()), where
assert (where.parent / "py.typed").is_file()
EOF
python -m tpu_embedding.tools.cli train synthetic --devices 2 --output-dir run \
    --set num_steps=2 --set batch_size=256 --set data.num_evaluation_samples=1024 |
    tail -n 1
uv venv --quiet plain
uv pip install --quiet --python plain/bin/python "$directory"/*.whl
(
    unset PYTHONPATH
    for options in --help "doctor --help" "compile --help" "inspect run"; do
        # shellcheck disable=SC2086
        plain/bin/tpu-embedding $options >plain.log || {
            echo "tpu-embedding $options fails without extras." >&2
            exit 1
        }
    done
    plain/bin/tpu-embedding export run served --format safetensors | tail -n 1
)
rm -r site/tpu_embedding/tools
files=(quickstart.md examples/linen_dlrm.py guides/{checkpoints,serving}.md)
python "$root/tests/docs/run_without_tools.py" "${files[@]}" | grep ': run$'
