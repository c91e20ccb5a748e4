"""Shows which operations of a train step on CPU take time.

    python benchmarks/step_profile.py [--setting S1 S2 S3] [--json FILE]
    python benchmarks/record.py FILE

The step and the settings are those of `peers.py`. JAX's profiler records each operation
on each core, so the times of a step add up to the time that all cores were busy.
"""

import argparse
import collections
import pathlib
import re
import tempfile
import warnings
from typing import Any, Final

import jax
import numpy as np
from list_options import AllValues
from measuring import write_document
from settings import SETTINGS, Setting
from sides.embedding_layer import Side
from step_check import write_batches

STEPS: Final = 8
NUM_SHOWN: Final = 6

_STAGES: Final = {
    "_read_rows": "lookup",
    "compute_gradients": "gradients",
    "apply_gradients": "update",
}
"""Function of the functional core to its part of the step."""

_INSTRUCTION: Final = re.compile(r'^\s*(?:ROOT )?%(\S+) = .*op_name="([^"]*)"', re.M)


def profile(setting: Setting) -> list[dict[str, Any]]:
    """Returns the longest operations, and the sum of the others, of a setting.

    Returns:
      One dictionary per operation: its part of the step, its name in JAX, and the
      milliseconds of a step that cores spent on it.
    """
    side = Side(setting)
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        file = write_batches(setting, 3 + STEPS, folder)
        batches = [side.load(ids) for ids in np.load(file)]
        for batch in batches[:3]:
            side.train(batch)
        with jax.profiler.trace(folder / "trace"):
            for batch in batches[3:]:
                side.train(batch)
        times = _times_by_instruction(folder)
    names = dict(_INSTRUCTION.findall(side.compile_train(batches[0]).as_text()))
    by_operation: dict[tuple[str, str], float] = collections.defaultdict(float)
    for instruction, milliseconds in times.items():
        by_operation[_operation(names.get(instruction, ""))] += milliseconds
    longest = sorted(by_operation.items(), key=lambda item: -item[1])
    shown = longest[:NUM_SHOWN]
    rest = sum(time for _, time in longest[NUM_SHOWN:])
    return [
        {"setting": setting.name, "part": part, "operation": operation, "ms": time}
        for (part, operation), time in [*shown, (("", "others"), rest)]
    ]


def _times_by_instruction(folder: pathlib.Path) -> dict[str, float]:
    """Returns the core-milliseconds per step of each HLO instruction."""
    (file,) = folder.glob("trace/**/*.xplane.pb")
    times: dict[str, float] = collections.defaultdict(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of the reader's types.
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for event in (event for line in plane.lines for event in line.events):
                # The body of a loop has events of its own.
                is_loop = event.name.startswith(("while", "call"))
                if "hlo_op" in dict(event.stats) and not is_loop:
                    times[event.name] += event.duration_ns / 1e6 / STEPS
    return times


def _operation(op_name: str) -> tuple[str, str]:
    """Returns the part of the step and the operation of a name that JAX gave."""
    parts = op_name.split("/")
    stage = next((s for f, s in _STAGES.items() if f"jit({f})" in parts), "")
    return stage, parts[-1] or "without a name"


def main() -> None:
    """Profiles, prints a table, and writes JSON on request."""
    parser = argparse.ArgumentParser(description="Profiles train steps on CPU.")
    parser.add_argument(
        "--setting", nargs="+", action=AllValues, default=["S1", "S2", "S3"]
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for name in arguments.setting:
        found = profile(SETTINGS[name])
        total = sum(row["ms"] for row in found)
        for row in found:
            title = f"{row['part']} {row['operation']}".strip()
            share = 100 * row["ms"] / total
            print(f"{name}  {title:<32} {row['ms']:7.2f} ms  {share:3.0f} %")
        results += found
    shapes = {name: SETTINGS[name].shapes() for name in arguments.setting}
    write_document(arguments.json, "step_profile", shapes=shapes, results=results)


if __name__ == "__main__":
    main()
