"""The script of the first hour on a TPU: with fakes, and on emulated devices."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
PARTS = ["devices", "doctor"] + [
    f"{part}_{backend}"
    for backend in ("xla", "sparse_core")
    for part in ("step", "profile", "training")
]
FAKE = r"""#!/bin/sh
# Plays a TPU host, on which some parts fail.
case "$*" in
scripts/*) exec {python} "$@" ;;
*"child devices")
    echo '{{"platform": "tpu", "kinds": ["TPU v5", "TPU v5"],' \
        '"memory": [102005473280]}}' ;;
*" doctor")
    echo 'ok       versions: python 3.12.1, jax 0.12.0'
    echo 'FAILED   SparseCores, dim 8, Adam: table: 1 of 9 rows are wrong'
    echo '         -> Please report it, with this output.'
    exit 1 ;;
*--json*sparse_core.json*) ms=2.0 rounds=0 ;;
*--json*) ms=5.0 rounds=1 ;;
*--profile*/profile_sparse_core*) sleep 60 ;;
*train*backend=sparse_core*) echo 'no chips' >&2; exit 3 ;;
*train*)
    while [ "$1" != --output-dir ]; do shift; done
    mkdir "$2"
    echo '{{"step": 5, "train": {{}}}}' >"$2/metrics.jsonl"
    echo '{{"result": {{"step": 5, "metrics": {{"auc": 0.75}}}}}}' \
        >>"$2/metrics.jsonl" ;;
esac
if [ "${{ms-}}" ]; then
    backend=$3
    while [ "$1" != --json ]; do shift; done
    echo '{{"device": "TPU v5", "results": [{{"median_ms": '"$ms"',
        "fastest_ms": 1, "slowest_ms": 9, "devices": 2, "compile_seconds": 30,
        "rounds": '"$rounds"', "backends": ["'"$backend"'"]}}]}}' >"$2"
fi
"""


def run(folder, python, *options):
    """Runs the script in an environment whose `python` is the given script."""
    binaries = folder / "venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(python)
    (binaries / "python").chmod(0o755)
    for extra in ("core", "train", "tpu"):
        (folder / "venv" / f"installed-{extra}").touch()
    environment = os.environ | {
        "VENV": os.path.relpath(folder / "venv", ROOT),
        "PYTHONPATH": str(ROOT),
    }
    out = folder / "first hour"
    result = subprocess.run(
        ["bash", "scripts/first_hour.sh", "--output-dir", out, *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (out / "table.json").is_file(), result.stdout + result.stderr
    table = json.loads((out / "table.json").read_text())
    assert set(PARTS) <= {row["item"] for row in table}
    return result, {row["item"]: row for row in table}


def test_failed_parts_are_named_and_the_rest_goes_on(tmp_path):
    fake = FAKE.format(python=sys.executable)
    result, rows = run(tmp_path, fake, "--seconds", "2")
    assert result.returncode == 1
    wrong = rows["doctor: SparseCores, dim 8, Adam"]
    assert wrong["status"] == "FAILED" and "1 of 9 rows" in wrong["result"]
    assert rows["step_xla"]["result"].startswith("5.000 ms per step (1.000 to 9.000)")
    assert "2.50 times" in rows["ratio of steps"]["result"]
    assert rows["training_xla"]["result"].startswith("auc 0.750000, step 5")
    assert {item: rows[item]["status"] for item in PARTS} == dict.fromkeys(
        PARTS, "ok"
    ) | {
        "doctor": "exit status 1",
        "profile_sparse_core": "not finished in 2 s",
        "training_sparse_core": "exit status 3",
    }
