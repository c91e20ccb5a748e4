"""Counts the processes that the kernel has killed because memory ran out.

SIGKILL does not say who sent it. The kernel counts its own kills, so a count that has
risen points to memory.
"""

import pathlib
from collections.abc import Iterable, Iterator, Mapping


def memory_kills(root: pathlib.Path = pathlib.Path("/")) -> dict[str, int]:
    """Returns the kernel's counts by their file.

    Those of the control group also hold its kills when the whole host lacks memory.
    Only without them, the host is asked, whose count other programs raise, too.

    Args:
      root: directory that stands for `/`.
    """
    return _counts(root, _group_files(root)) or _counts(root, ["proc/vmstat"])


def _counts(root: pathlib.Path, files: Iterable[str]) -> dict[str, int]:
    counts = {}
    for file in files:
        try:
            lines = (root / file).read_text().splitlines()
        except OSError:
            continue
        numbers = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if numbers:
            counts[f"/{file}"] = int(numbers[0])
    return counts


def hint_of_kill(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Returns what the counts say about a SIGKILL.

    Args:
      before: counts from before the process started.
      after: counts from after its end.

    Example:
      >>> hint_of_kill({"/proc/vmstat": 2}, {"/proc/vmstat": 3})
      'most likely memory ran out: oom_kill in /proc/vmstat rose from 2 to 3'
    """
    known = [file for file in before if file in after]
    for file in known:
        if after[file] > before[file]:
            return (
                f"most likely memory ran out: oom_kill in {file} rose from "
                f"{before[file]} to {after[file]}"
            )
    if known:
        return (
            "another process sent it, such as a scheduler or `kill -9`; the kernel has "
            "killed none for lack of memory since"
        )
    return "another process sent it, or the kernel for lack of memory: `dmesg` says so"


def _group_files(root: pathlib.Path) -> Iterator[str]:
    """Yields files that may hold a group's count, without the first slash."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        # "0::/path" in version 2, "4:memory:/path" in version 1. In a container, the
        # path may begin outside of what is mounted.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for place in dict.fromkeys((path, "")):
            if not controllers:
                yield f"sys/fs/cgroup{place.rstrip('/')}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"sys/fs/cgroup/memory{place.rstrip('/')}/memory.oom_control"
