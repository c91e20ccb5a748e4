"""A process that keeps freed memory asks Linux for no new pages."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from tpu_embedding.host_memory import keep_freed_memory
print(keep_freed_memory() if {keep} else None)
def touch():
    np.zeros(2**26, np.uint8)[::4096] = 1
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> tuple[str, int]:
    command = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    took, count = run.stdout.split()
    return took, int(count)


@pytest.mark.full
def test_pages_of_freed_memory_are_used_again():
    took, count = faults(keep=True)
    if took == "False":
        pytest.skip("only GNU's C library has these settings")
    # 4 arrays of 64 MB: 64 pages of 2 MB or 65,536 of 4 KB, unless pages are kept.
    assert count < 16
    assert faults(keep=False)[1] >= 64
