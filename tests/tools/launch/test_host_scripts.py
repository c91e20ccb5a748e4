"""The scripts that run on hosts and in pods, with fakes of the programs they call."""

import os
import select
import subprocess
import sys

import pytest

from tests.tools.launch.launches import make_launch
from tests.tools.launch.test_scripts import calls_of, container, host_script
from tpu_embedding import kernel_verdicts

SECONDS = 60  # far more than any of these needs
QUEUED = make_launch(backend="queued_resource", lifetime="until_deleted")
GKE = make_launch()

TRAINER = """#!{python} -ISE
import os, signal, sys
def stop(*_):
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, stop)
print(os.environ["TPU_EMBEDDING_VERDICTS"], sys.argv[1:], flush=True)
print([name for name in os.environ if name.startswith("MEGASCALE")], flush=True)
pipe = os.open({pipe!r}, os.O_WRONLY)
os.write(pipe, b"runs")
signal.pause()
"""


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(text, *arguments, **environment):
    result = subprocess.run(
        ["bash", "-c", text, "script.sh", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def on_host(tmp_path, word, **environment):
    """Runs a part of host_train.sh, with a folder in place of the bucket."""
    text = host_script(QUEUED).replace("/mnt/bucket", str(tmp_path / "bucket"))
    return run(text, word, **environment)


def stop_all(home):
    """Runs on a host what `delete` runs there."""
    words = [word for call in calls_of(QUEUED) for word in call[:-1]]
    command = next(word for word in words if word.endswith("stop; done"))
    return run(f'cd "$HOME"; {command.removeprefix("--command=")}', HOME=str(home))


@pytest.fixture
def home(tmp_path):
    """A home directory whose tpu-embedding runs until SIGTERM."""
    os.mkfifo(tmp_path / "pipe")
    write_program(
        tmp_path / "tpu_embedding" / "bin" / "tpu-embedding",
        TRAINER.format(python=sys.executable, pipe=str(tmp_path / "pipe")),
    )
    yield tmp_path
    if (tmp_path / "tpu_embedding_train.pid").exists():
        on_host(tmp_path, "stop", HOME=str(tmp_path))


def read(pipe):
    """Returns what the program writes; b"" once it has ended."""
    ready, _, _ = select.select([pipe], [], [], SECONDS)
    assert ready
    return os.read(pipe, 100)


@pytest.mark.parametrize("programs", [["train"], ["train", "doctor"]])
def test_delete_ends_the_training_whatever_ran_last(programs, home):
    for program in programs:
        (home / f"host_{program}.sh").write_text(host_script(QUEUED, program))
    pipe = os.open(home / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    on_host(home, "start", HOME=str(home))
    assert read(pipe) == b"runs"
    stop_all(home)
    assert read(pipe) == b""
    os.close(pipe)
    assert (home / "tpu_embedding_train.log").read_text().endswith("saved\n")
    stop_all(home)  # nothing runs


@pytest.mark.parametrize("has_run", [False, True])
def test_a_run_outlives_its_session_starts_once_and_is_stopped(has_run, home):
    environment = dict(HOME=str(home), MEGASCALE_SLICE_ID="1")
    results = home / "bucket" / "dlrm" / "results"
    if has_run:
        results.mkdir(parents=True)
        (results / "metrics.jsonl").touch()
    pipe = os.open(home / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert "started process" in on_host(home, "start", **environment)
    assert read(pipe) == b"runs"
    process = int((home / "tpu_embedding_train.pid").read_text())
    assert os.getsid(process) == process  # so that no end of a session reaches it
    again = on_host(home, "start", **environment)
    assert f"runs already, as process {process}" in again
    on_host(home, "stop", **environment)
    assert read(pipe) == b""
    os.close(pipe)
    first, *log = (home / "tpu_embedding_train.log").read_text().splitlines()
    assert log == ["[]", "saved"]
    assert first.startswith(f"{home}/bucket/dlrm/verdicts ['train', 'dlrm', '--output")
    assert ("'--resume'" in first) == has_run


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
    ("program", "has_run", "resumes"),
    [("train", False, False), ("train", True, True), ("doctor", True, False)],
)
def test_a_pod_resumes_what_there_is(program, has_run, resumes, tmp_path, logged):
    logged("python", "tpu-embedding")
    results = tmp_path / "dlrm" / "results"
    results.mkdir(parents=True)
    if has_run:
        (results / "metrics.jsonl").touch()
    command = container(GKE)["command"]
    assert command[:2] == ["bash", "-c"]
    text = command[2].replace("/mnt/bucket", str(tmp_path))
    run(text, "a.whl[tpu]", program, "dlrm", "--set", "x=a b")
    install, start = logged()
    assert install.endswith("pip install --quiet --root-user-action=ignore a.whl[tpu]")
    expected = f"tpu-embedding {program} dlrm --set x=a b"
    assert start == (f"{expected} --resume" if resumes else expected)


def test_hosts_keep_verdicts_where_the_command_reads_them():
    name = kernel_verdicts.DIRECTORY_VARIABLE
    assert f'export {name}="$verdicts"' in host_script(QUEUED)
    assert name in [variable["name"] for variable in container(GKE)["env"]]


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
    run(host_script(QUEUED), "install", USER="me")
    first = logged()
    home = f"{tmp_path}/home"
    wheel = "/mnt/bucket/dlrm/launch/tpu_embedding-0.1.0-py3-none-any.whl[tpu,train]"
    assert first == [
        "sudo mkdir -p /mnt/bucket",
        "sudo chown me /mnt/bucket",
        "gcsfuse --implicit-dirs my-bucket /mnt/bucket",
        f"python3 -m venv {home}/tpu_embedding_uv",
        "pip install --quiet uv",
        f"uv venv --python 3.12 {home}/tpu_embedding",
        f"uv pip install --quiet --python {home}/tpu_embedding/bin/python {wheel}",
        "tpu-embedding --version",
    ]
    logged("mountpoint")
    run(host_script(QUEUED), "install", USER="me")
    # What is mounted and made stays; the package is installed anew.
    assert logged() == [
        "sudo mkdir -p /mnt/bucket",
        "mountpoint --quiet /mnt/bucket",
        first[6],
        "tpu-embedding --version",
    ]


def test_a_host_without_cloud_storage_fuse_gets_it(tmp_path, logged):
    write_program(tmp_path / "bin" / "python3", PYTHON)
    write_program(tmp_path / "bin" / "uv", UV)
    logged("sudo", "mountpoint", "curl", "lsb_release")
    run(host_script(QUEUED), "install")
    calls = logged()
    install = "apt-get install --yes --quiet gcsfuse python3-venv"
    assert f"sudo DEBIAN_FRONTEND=noninteractive {install}" in calls
    assert any(call.startswith("sudo tee /etc/apt/sources.list.d") for call in calls)
