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


class Worker:
    """Answers the commands for one side.

    Args:
      module: module of `sides` that has the `Side`.
      setting: type and fields of the setting.
      batches_file: `.npy` of an array, or `.npz` of a dictionary of them; the first
        axis is that of batches.
    """

    def __init__(self, module: str, setting: dict[str, Any], batches_file: str):
        setting_type = getattr(importlib.import_module("settings"), setting.pop("type"))
        side_type = importlib.import_module(f"sides.{module}").Side
        self._side = side_type(setting_type(**setting))
        batches = np.load(batches_file, mmap_mode="r")
        # A file of several arrays cannot be mapped.
        self._batches = batches if isinstance(batches, np.ndarray) else dict(batches)

    def check(self, file: str) -> dict[str, Any]:
        """Writes the activations of batch 0, before and after one step on it."""
        (batch,) = self._load(0, 1)
        before = self._side.activations(batch)
        self._side.train(batch)
        np.save(file, np.stack([before, self._side.activations(batch)]))
        return {"versions": self._side.versions}

    def look_up(self, file: str) -> dict[str, Any]:
        """Writes the activations of batch 0, for a side that does not train."""
        (batch,) = self._load(0, 1)
        np.save(file, self._side.activations(batch))
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

    def time_together(self, method: str, first: int, count: int) -> dict[str, Any]:
        """Times one call on all batches from the host; returns the mean of a step."""
        run = getattr(self._side, method)
        batches = [self._host_batch(i) for i in range(first, first + count)]
        run(batches[0])
        start = time.perf_counter()
        run(*batches)
        return self._reply([(time.perf_counter() - start) / count])

    def _load(self, first: int, count: int) -> list[Any]:
        places = range(first, first + count)
        return [self._side.load(self._host_batch(i)) for i in places]

    def _host_batch(self, place: int) -> Any:
        if isinstance(self._batches, np.ndarray):
            return np.array(self._batches[place % len(self._batches)])
        return {
            name: array[place % len(array)] for name, array in self._batches.items()
        }

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
