"""The kernel's counts of kills for lack of memory, on trees of files for `/`."""

import re
import signal

import pytest

from tpu_embedding.tools.jobs.failures import WorkerState
from tpu_embedding.tools.jobs.memory_kills import hint_of_kill, memory_kills

VMSTAT = {"proc/vmstat": "pgfault 3\noom_kill 7\n"}
TREES = {
    "version 2": (
        {
            "proc/self/cgroup": "0::/user/run\n",
            "sys/fs/cgroup/user/run/memory.events": "oom 9\noom_kill 2\n",
        },
        {"/sys/fs/cgroup/user/run/memory.events": 2},
    ),
    "container of version 2": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.events": "oom_kill 1\noom_group_kill 5\n",
        },
        {"/sys/fs/cgroup/memory.events": 1},
    ),
    "container of version 1": (
        {
            "proc/self/cgroup": "5:cpu:/a\n4:memory:/a\n0::/\n",
            "sys/fs/cgroup/memory/memory.oom_control": "under_oom 0\noom_kill 4\n",
        },
        {"/sys/fs/cgroup/memory/memory.oom_control": 4},
    ),
    "no group": ({}, {}),
}


@pytest.mark.parametrize(("files", "counts"), TREES.values(), ids=TREES)
def test_counts_are_those_of_the_group_or_else_of_the_host(tmp_path, files, counts):
    for name, text in (files | VMSTAT).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory_kills(tmp_path)
    assert found == (counts or {"/proc/vmstat": 7})
    assert memory_kills(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ({"/a": 0, "/b": 3}, {"/a": 0, "/b": 3}, "another process sent it, such as"),
        ({"/a": 0, "/b": 3}, {"/a": 0, "/b": 4}, "memory ran out: .*/b rose from 3 to"),
        ({}, {"/a": 1}, "or the kernel for lack of memory: `dmesg`"),
    ],
)
def test_memory_is_named_where_a_count_points_to_it(before, after, hint):
    found = hint_of_kill(before, after)
    assert re.search(hint, found)
    assert ("most likely" in found) == (before != {} and before != after)
    ending = WorkerState(name="process 0", return_code=-signal.SIGKILL, kill_hint=found)
    assert ending.describe().endswith(found)
    assert found not in WorkerState(name="x", return_code=1, kill_hint=found).describe()
