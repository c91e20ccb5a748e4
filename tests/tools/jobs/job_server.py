"""Starts jobs of the training command from one warm process, each process a fork.

Reads a list of command lines per line of stdin, as JSON, with a file for the output of
each. Prints the numbers of the processes, and then their statuses when all have ended.
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
        children = [start(*job) for job in json.loads(line)]
        print(json.dumps(children), flush=True)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(i, 0)[1]) for i in children]
        print(json.dumps(statuses), flush=True)


def start(arguments, output):
    child = os.fork()
    if child:
        return child
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    sys.exit(run_command(arguments))  # With all that JAX does at exit.


if __name__ == "__main__":
    main()
