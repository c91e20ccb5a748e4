import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tools.launch.fake_cloud import Cloud
from tpu_embedding.tools.launch import runner


@pytest.fixture
def cloud(monkeypatch):
    """A fake cloud in this process, for speed: a call is no process of its own."""
    cloud = Cloud()

    def execute(command, *, capture):
        del capture
        return subprocess.CompletedProcess(
            command.argv, *cloud.call(list(command.argv), command.stdin)
        )

    monkeypatch.setattr(runner, "_execute", execute)
    return cloud


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder with the fake programs, which comes first on PATH."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "memory.json").write_text(json.dumps(vars(Cloud())))
    source = pathlib.Path(__file__).with_name("fake_cloud.py").read_text()
    for name in ("gcloud", "kubectl", "tpu-embedding"):
        # Options of the interpreter that let it start fast.
        (folder / name).write_text(f"#!{sys.executable} -ISE\n{source}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder
