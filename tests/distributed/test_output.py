"""Output that cannot be written is dropped, and does not change the status."""

import os
import subprocess
import sys

import pytest

from tpu_embedding.distributed import output
from tpu_embedding.distributed.output import print_line


@pytest.fixture
def unread():
    """A text file that is a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        yield file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, writer)  # The file still holds the line.
        os.close(nowhere)


def test_lines_that_nobody_reads_are_dropped(unread):
    print_line("lost", unread)
    with pytest.raises(BrokenPipeError):
        unread.flush()  # The line could not be written, and the call did not say so.


def test_the_exit_status_stays_that_of_the_run():
    """Python would replace it by 120."""
    code = (
        "import os, runpy, sys\n"
        f"output = runpy.run_path({output.__file__!r})\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        "output['print_line']('lost')\n"
        "output['drop_unwritten']()\n"
        "sys.exit(75)\n"
    )
    ended = subprocess.run([sys.executable, "-I", "-c", code], timeout=60)
    assert ended.returncode == 75
