"""The script of the first hour on a TPU, with a fake of the command."""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FAKE = r"""#!/bin/sh
# Plays a TPU host. Records its calls; trainings with SparseCores fail.
echo "$*" >>"$CALLS"
case "$*" in
doctor*)
    mkdir -p "$4"
    echo '{"platform": "tpu"}' >"$4/doctor-host.json" ;;
*backend=sparse_core*) exit 3 ;;
esac
"""


@pytest.fixture
def environment(tmp_path):
    """Variables of an environment whose `tpu-embedding` is the fake."""
    binaries = tmp_path / "venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "tpu-embedding"):
        (binaries / name).write_text(FAKE)
        (binaries / name).chmod(0o755)
    for extra in ("core", "train", "tpu"):
        (tmp_path / "venv" / f"installed-{extra}").touch()
    variables = {"VENV": os.path.relpath(tmp_path / "venv", ROOT)}
    return os.environ | variables | {"CALLS": str(tmp_path / "calls")}


def test_runs_the_doctor_then_a_training_of_each_backend(tmp_path, environment):
    out = tmp_path / "first hour"
    command = ["bash", "scripts/first_hour.sh", "--output-dir", out]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert result.returncode == 1
    doctor, *trainings = (tmp_path / "calls").read_text().splitlines()
    assert doctor == f"doctor --timings --output-dir {out}"
    for line, backend in zip(trainings, ("xla", "sparse_core"), strict=True):
        words = f"--output-dir {out}/training_{backend} --set backend={backend}"
        assert line == f"train synthetic {words} --set num_steps=2000"


def test_an_old_python_is_replaced_with_uv(tmp_path):
    """As on a Cloud TPU VM, where only Python 3.10 and pip are found."""
    fake_uv = "mkdir -p .uv/bin; printf '#!/bin/sh\\necho uv \"$@\"\\n' >.uv/bin/uv"
    (tmp_path / ".python-version").write_text("3.12\n")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "python3").write_text(f"""#!/bin/sh
case "$1" in
-c) exit 1 ;;  # too old
-m) {fake_uv}; chmod +x .uv/bin/uv ;;
esac
""")
    for name in ("python3", "python3.12", "python"):
        (tmp_path / name).write_text((tmp_path / "python3").read_text())
        (tmp_path / name).chmod(0o755)
    setup = (
        f'source "{ROOT}/scripts/setup.sh"; install() {{ :; }}; setup_environment ""'
    )
    path = f"{tmp_path}:/usr/bin:/bin"
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", setup],
        cwd=tmp_path,
        env={"PATH": path},
        capture_output=True,
        text=True,
    )
    assert "uv venv --quiet --seed --python 3.12 .venv" in result.stdout, result.stderr
