import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.tools.launch import fake_cloud
from tpu_embedding.tools.launch import make_script


class Cloud:
    """A folder with the fake programs, and their memory."""

    def __init__(self, folder):
        folder.mkdir()
        self.folder, self._memory = folder, folder / "memory.json"
        self._memory.write_text(json.dumps(fake_cloud.MEMORY))
        source = pathlib.Path(fake_cloud.__file__).read_text()
        for name in fake_cloud.NAMES:
            # Options of the interpreter that let it start fast.
            (folder / name).write_text(f"#!{sys.executable} -ISE\n{source}")
            (folder / name).chmod(0o755)

    def change(self, **changes):
        memory = json.loads(self._memory.read_text())
        self._memory.write_text(json.dumps(memory | changes))

    @property
    def resources(self):
        return set(json.loads(self._memory.read_text())["resources"])

    def take_calls(self):
        """Returns the calls since the last time."""
        calls = json.loads(self._memory.read_text())["calls"]
        self.change(calls=[])
        return calls

    def run(self, launch, *words, program="train"):
        """Runs the script of a launch."""
        return self.bash(make_script(launch, program), *words)

    def bash(self, text, *words):
        script = self.folder / "script.sh"
        script.write_text(text)
        return subprocess.run(
            ["bash", script, *words],
            env=os.environ | {"PATH": f"{self.folder}{os.pathsep}{os.environ['PATH']}"},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path / "cloud")
