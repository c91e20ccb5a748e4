"""Starts runs of the command from one warm process, each in a fork of its own.

Reads a command line per line of stdin, as JSON. Prints `pid N`, the output of the run,
and `status N` when its process has ended. JAX starts in the forks only, so a run is the
same as in a process of its own, but for the time of the imports.
"""

import json
import os
import sys

# Imported before the first fork, which then need not.
import matplotlib.figure  # noqa: F401
import orbax.checkpoint  # noqa: F401

from tpu_embedding.tools.cli.command import run_command


def main():
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
            status = run_command(json.loads(line))
            sys.stdout.flush()
            os._exit(status)
        print(f"pid {child}", flush=True)
        _, status = os.waitpid(child, 0)
        print(f"status {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
