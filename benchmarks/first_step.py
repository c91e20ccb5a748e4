"""Times a start of a training, from the process to its first step and evaluation.

    python benchmarks/first_step.py [--rounds N] [--json FILE]
    python benchmarks/record.py FILE

Programs: the command `tpu-embedding train synthetic --devices 8`, and a model with 26
features of 10,000 rows, in `many_features.py`. Each first start has an empty cache of
compiled programs, and the second start finds that of the first. This process notes when
a program tells of a phase, and counts the compilations in the log of JAX.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from measuring import write_document

from tpu_embedding.tools.jobs.pulses import PIPE_VARIABLE

MARKS: Final = {
    "imports": "process",
    "checks": "started",
    "first_step": "step 1",
    "evaluation": "evaluation",
}
"""Name of a phase to the beginning of the line at its end."""

LOGGED: Final = {
    "lower": r"Finished jaxpr to MLIR module conversion .* in ([\d.e-]+) sec",
    "compile": r"Finished XLA compilation of .* in ([\d.e-]+) sec",
}
"""Kind of work to the line of JAX's log that has its seconds."""

COMMAND: Final = (
    *("-m", "tpu_embedding.tools.cli", "train", "synthetic", "--devices", "8"),
    *("--set", "num_steps=2", "--set", "evaluate_every=1"),
)
PROGRAMS: Final = ("command", "model")
STARTS: Final = ("first", "second")


def time_start(program: str, cache: pathlib.Path) -> dict[str, float]:
    """Starts a program; returns seconds by phase and work, and the compilations.

    Args:
      program: one of `PROGRAMS`.
      cache: directory of the compiled programs, empty for a first start.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_LOG_COMPILES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    reader, writer = os.pipe()
    arguments = [str(pathlib.Path(__file__).with_name("many_features.py"))]
    with tempfile.TemporaryDirectory() as output:
        if program == "command":
            environment[PIPE_VARIABLE] = str(writer)
            arguments = [*COMMAND, "--output-dir", output + "/run"]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            pass_fds=[writer],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        os.close(writer)
        times: dict[str, float] = {}
        threads = [
            threading.Thread(target=_note_times, args=(lines, begin, times))
            for lines in (process.stdout, os.fdopen(reader))
        ]
        for thread in threads:
            thread.start()
        assert process.stderr is not None
        log = process.stderr.read()
        for thread in threads:
            thread.join()
    if process.wait() or len(times) < len(MARKS):
        raise RuntimeError(f"{program} failed after {list(times)}:\n{log}")
    work = {name: re.findall(line, log) for name, line in LOGGED.items()}
    found = {name: sum(map(float, seconds)) for name, seconds in work.items()}
    phases = dict(zip(MARKS, _durations(times), strict=True))
    return (
        phases
        | found
        | {"programs": len(work["compile"]), "until_step": times["first_step"]}
    )


def _note_times(lines: Any, begin: float, times: dict[str, float]) -> None:
    with lines:
        for line in lines:
            for name, words in MARKS.items():
                if line.startswith(words):
                    times.setdefault(name, time.perf_counter() - begin)


def _durations(times: dict[str, float]) -> Iterable[float]:
    ends = [times[name] for name in MARKS]
    return (end - start for start, end in zip([0.0, *ends], ends, strict=False))


def main() -> None:
    """Measures in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times the start of a training.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    runs: dict[tuple[str, str], list[dict[str, float]]] = {
        (program, start): [] for program in PROGRAMS for start in STARTS
    }
    for _ in range(arguments.rounds):
        for program in PROGRAMS:
            with tempfile.TemporaryDirectory() as cache:
                for start in STARTS:
                    found = time_start(program, pathlib.Path(cache))
                    runs[program, start].append(found)
                    times = ", ".join(f"{k} {v:.2f}" for k, v in found.items())
                    print(f"{program}, {start} start: {times}", flush=True)
    results = [_result(*names, found) for names, found in runs.items()]
    for row in results:
        first = next(r for r in results if r["program"] == row["program"])
        row["ratio"] = row["until_step_ms"] / first["until_step_ms"]
    write_document(
        arguments.json,
        "first_step",
        shapes={"rounds": arguments.rounds},
        results=results,
    )


def _result(program: str, start: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"program": program, "start": start}
    row["programs"] = statistics.median(run["programs"] for run in runs)
    for name in (*MARKS, *LOGGED, "until_step"):
        times = [1e3 * run[name] for run in runs]
        low, middle, high = (
            statistics.quantiles(times, n=4, method="inclusive")
            if len(times) > 1
            else 3 * times
        )
        row |= {f"{name}_ms": middle, f"{name}_quartiles_ms": (low, high)}
    return row


if __name__ == "__main__":
    main()
