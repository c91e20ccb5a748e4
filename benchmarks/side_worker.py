"""Runs one side of a comparison, in a process of its own, on commands from a pipe.

`interleaved.py` starts it. Commands and replies are lines of JSON, on standard input
and output. Whatever a library prints goes to standard error.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from typing import Any

import numpy as np
from settings import Setting


class Worker:
    """Answers the commands for one side.

    Args:
      module: module of `sides` that has the `Side`.
      setting: its fields.
      batches_file: `.npy` of an array; the first axis is that of batches.
    """

    def __init__(self, module: str, setting: dict[str, Any], batches_file: str):
        side_type = importlib.import_module(f"sides.{module}").Side
        self._side = side_type(Setting(**setting))
        self._batches = np.load(batches_file, mmap_mode="r")

    def check(self, file: str) -> dict[str, Any]:
        """Writes the activations of batch 0, before and after one step on it."""
        (batch,) = self._load(0, 1)
        before = self._side.activations(batch)
        self._side.train(batch)
        np.save(file, np.stack([before, self._side.activations(batch)]))
        return {"versions": self._side.versions}

    def time_each(
        self, method: str, first: int, count: int, limit: float
    ) -> dict[str, Any]:
        """Times each step on `count` batches, from batch `first`, up to a time limit.

        Behind the last batch of the file comes the first one again.

        One more step before them is not timed. It brings caches, and threads that
        sleep, back to work.
        """
        run = getattr(self._side, method)
        warm_up, *batches = self._load(first, count + 1)
        run(warm_up)
        seconds: list[float] = []
        for batch in batches:
            start = time.perf_counter()
            run(batch)
            seconds.append(time.perf_counter() - start)
            if sum(seconds) > limit:
                break
        return self._reply(seconds)

    def _load(self, first: int, count: int) -> list[Any]:
        places = range(first, first + count)
        return [self._side.load(self._host_batch(i)) for i in places]

    def _host_batch(self, place: int) -> np.ndarray:
        return np.array(self._batches[place % len(self._batches)])

    def _reply(self, seconds: list[float]) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"seconds": seconds, "peak_bytes": 1024 * peak}


def main() -> None:
    """Reads commands until the pipe is closed."""
    parser = argparse.ArgumentParser(description="Runs one side of a comparison.")
    parser.add_argument("module", help="module of benchmarks/sides")
    module = parser.parse_args().module
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = None
    for line in sys.stdin:
        command = json.loads(line)
        method = command.pop("do")
        if method == "start":
            worker = Worker(module, **command)
            reply = {}
        else:
            reply = getattr(worker, method)(**command)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
