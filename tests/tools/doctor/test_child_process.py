"""The watchdog: a child that hangs or crashes is reported and killed."""

import os
import pathlib
import signal
import sys

import pytest

from tpu_embedding.tools.doctor.child_process import ChildLost, ChildProcess

FAKE = pathlib.Path(__file__).parent / "fake_child.py"


def ask(*deeds, seconds, name="read"):
    """Returns the answer of a new child to one question."""
    command = [sys.executable, str(FAKE), *deeds]
    with ChildProcess(command, os.environ) as child:
        return child.ask({"case": {"name": name, "scope": "rows"}}, seconds)


def test_answers_come_in_order():
    with ChildProcess([sys.executable, str(FAKE), "b:wrong"], os.environ) as child:
        answers = [
            child.ask({"case": {"name": name, "scope": "rows"}}, 60) for name in "abc"
        ]
    assert [answer["case"] for answer in answers] == ["a", "b", "c"]
    assert answers[1]["problem"] == "row 7 is zero"


LOST = {
    "hang": "hangs: no result in 2 s; killed",
    "hang_with_child": "hangs: no result in 2 s; killed",
    "abort": "crashed by SIGABRT: F0000 Check failed: the chip has halted",
    "segfault": "crashed by SIGSEGV",
    "exit": "ended with exit status 3: RuntimeError: no TPU left",
}


@pytest.mark.parametrize("deed", LOST)
def test_lost_children(deed):
    # A child that dies is noticed at once; a loaded machine starts it in some seconds.
    seconds = 2 if deed.startswith("hang") else 60
    with pytest.raises(ChildLost) as lost:
        ask(f"read:{deed}", seconds=seconds)
    # Python prints the stack of a fatal signal if the tests ask for it.
    assert str(lost.value).startswith(LOST[deed])


def test_a_child_that_cannot_start():
    with pytest.raises(ChildLost, match="ended with exit status 3: RuntimeError"):
        ask("start:exit", seconds=60)


def test_the_whole_group_is_killed(tmp_path):
    """A process that the child started ends with it."""
    file = tmp_path / "number"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "print(1, flush=True)\n"
        "input(), input()"
    )
    with ChildProcess([sys.executable, "-c", code], os.environ) as child:
        assert child.ask(None, 60) == 1
        grandchild = int(file.read_text())
        os.kill(grandchild, 0)
    for _ in range(100):
        try:
            state = pathlib.Path(f"/proc/{grandchild}/stat").read_text().split()[2]
        except FileNotFoundError:
            return
        if state == "Z":  # Nobody waits for it here.
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError("the grandchild lives")


def test_a_child_that_ends_slowly_has_not_hung():
    """An interpreter may take seconds to end after it has closed its output."""
    code = "import os, threading; os.close(1); threading.Event().wait(3); os._exit(4)"
    command = [sys.executable, "-c", code]
    with ChildProcess(command, os.environ) as child:
        with pytest.raises(ChildLost, match="ended with exit status 4"):
            child.ask(None, 60)
