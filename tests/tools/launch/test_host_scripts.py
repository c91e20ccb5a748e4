"""The scripts that run on hosts and in pods, with fakes of the programs they call."""

import os
import pathlib
import select
import subprocess
import sys

import pytest

from tpu_embedding.tools.launch import programs

SCRIPTS = pathlib.Path(programs.__file__).parent / "scripts"
SECONDS = 60  # far more than any of these needs

TRAINER = """#!{python} -ISE
import os, signal, sys
def stop(*_):
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print(os.environ["TPU_EMBEDDING_VERDICTS"], *sys.argv[1:], flush=True)
print([name for name in os.environ if name.startswith("MEGASCALE")], flush=True)
pipe = os.open({pipe!r}, os.O_WRONLY)
os.write(pipe, b"runs")
signal.pause()
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(name, *arguments, **environment):
    result = subprocess.run(
        ["bash", SCRIPTS / name, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def home(tmp_path):
    """A home directory whose tpu-embedding runs until SIGTERM."""
    os.mkfifo(tmp_path / "pipe")
    write_program(
        tmp_path / "tpu_embedding" / "bin" / "tpu-embedding",
        TRAINER.format(python=sys.executable, pipe=str(tmp_path / "pipe")),
    )
    yield tmp_path
    run("stop_host.sh", "train", HOME=str(tmp_path))


def read(pipe):
    """Returns what the program writes; b"" once it has ended."""
    ready, _, _ = select.select([pipe], [], [], SECONDS)
    assert ready
    return os.read(pipe, 100)


def test_a_run_outlives_its_session_starts_once_and_is_stopped(home):
    environment = dict(HOME=str(home), MEGASCALE_SLICE_ID="1")
    pipe = os.open(home / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    started = run("run_host.sh", "/verdicts", "train", "a b", **environment)
    assert "started process" in started
    assert read(pipe) == b"runs"
    process = int((home / "tpu_embedding_train.pid").read_text())
    assert os.getsid(process) == process  # so that no end of a session reaches it
    again = run("run_host.sh", "/verdicts", "train", "a b", **environment)
    assert f"runs already, as process {process}" in again
    assert "asked process" in run("stop_host.sh", "train", **environment)
    assert read(pipe) == b""
    os.close(pipe)
    log = (home / "tpu_embedding_train.log").read_text().splitlines()
    assert log == ["/verdicts train a b", "[]", "saved"]


def test_what_does_not_run_is_not_stopped(tmp_path):
    stopped = run("stop_host.sh", "train", HOME=str(tmp_path))
    assert "train does not run" in stopped


LOGGED = """#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
if [[ "$1" == tee ]]; then cat; fi
"""


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Lets programs log their calls; returns a function that takes the log."""
    log = tmp_path / "log"
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def take(*names):
        for name in names:
            write_program(tmp_path / "bin" / name, LOGGED)
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    return take


@pytest.mark.parametrize(
    ("attempt", "has_run", "resumes"),
    [("0", True, False), ("1", False, False), ("1", True, True)],
)
def test_a_restarted_pod_resumes_what_there_is(
    attempt, has_run, resumes, tmp_path, logged
):
    logged("python", "tpu-embedding")
    if has_run:
        (tmp_path / "metrics.jsonl").touch()
    arguments = ("a.whl[tpu]", str(tmp_path), "train", "dlrm", "--set", "x=a b")
    run("pod.sh", *arguments, RESTART_ATTEMPT=attempt)
    install, train = logged()
    assert install.endswith("pip install --quiet --root-user-action=ignore a.whl[tpu]")
    expected = "tpu-embedding train dlrm --set x=a b"
    assert train == (f"{expected} --resume" if resumes else expected)


def test_the_doctor_is_never_resumed(tmp_path, logged):
    logged("python", "tpu-embedding")
    (tmp_path / "metrics.jsonl").touch()
    run("pod.sh", "a.whl", str(tmp_path), "doctor", RESTART_ATTEMPT="1")
    assert logged()[-1] == "tpu-embedding doctor"


PYTHON = """#!/bin/bash
echo "python3 $*" >>"$LOG"
mkdir -p "$3/bin"
for name in pip uv; do cp "$(dirname "$0")/uv" "$3/bin/$name"; done
"""
UV = """#!/bin/bash
echo "$(basename "$0") $*" >>"$LOG"
if [[ "$1" == venv ]]; then
    mkdir -p "$4/bin"
    for name in python tpu-embedding; do cp "$0" "$4/bin/$name"; done
fi
"""


def test_a_host_is_set_up_once(tmp_path, logged):
    write_program(tmp_path / "bin" / "python3", PYTHON)
    write_program(tmp_path / "bin" / "uv", UV)
    logged("sudo", "gcsfuse", "mountpoint")
    write_program(tmp_path / "bin" / "mountpoint", "#!/bin/bash\nexit 1\n")
    run("setup_host.sh", "my-bucket", "a.whl[tpu]", USER="me")
    first = logged()
    home = f"{tmp_path}/home"
    assert first == [
        "sudo mkdir -p /mnt/bucket",
        "sudo chown me /mnt/bucket",
        "gcsfuse --implicit-dirs my-bucket /mnt/bucket",
        f"python3 -m venv {home}/tpu_embedding_uv",
        "pip install --quiet uv",
        f"uv venv --python 3.12 {home}/tpu_embedding",
        f"uv pip install --quiet --python {home}/tpu_embedding/bin/python a.whl[tpu]",
        "tpu-embedding --version",
    ]
    logged("mountpoint")
    run("setup_host.sh", "my-bucket", "b.whl", USER="me")
    # What is mounted and made stays; the package is installed anew.
    assert logged() == [
        "sudo mkdir -p /mnt/bucket",
        "mountpoint --quiet /mnt/bucket",
        first[6].replace("a.whl[tpu]", "b.whl"),
        "tpu-embedding --version",
    ]


def test_a_host_without_cloud_storage_fuse_gets_it(tmp_path, logged):
    write_program(tmp_path / "bin" / "python3", PYTHON)
    write_program(tmp_path / "bin" / "uv", UV)
    logged("sudo", "mountpoint", "curl", "lsb_release")
    run("setup_host.sh", "my-bucket", "a.whl")
    calls = logged()
    assert "sudo apt-get install --yes --quiet gcsfuse python3-venv" in calls
    assert any(call.startswith("sudo tee /etc/apt/sources.list.d") for call in calls)
