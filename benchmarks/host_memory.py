"""Times steps on a CPU with freed memory kept, and with tables in huge pages.

    python benchmarks/host_memory.py [--setting S1 S2 S3] [--devices 1 2] [--json FILE]
    python benchmarks/record.py FILE

All sides are this package. The first gives freed memory back to Linux, as the C library
does by default. The second calls `te.host_memory.keep_freed_memory()`. The third has a
variable of glibc, too, that asks Linux for huge pages: random rows lie on different
pages, so a lookup waits for the addresses of pages as well as for the rows. The sides
take turns.
"""

import argparse
import os
import pathlib
import sys
import tempfile
from typing import Any, Final

from interleaved import Turns, time_in_turns
from list_options import AllValues
from measuring import write_document
from settings import SETTINGS, Setting
from sides import OURS, SIDES
from sides.embedding_layer import FREED_MEMORY
from step_check import start_checked, write_batches

METHODS: Final = ("train", "forward")
HUGE_PAGES: Final = "glibc.malloc.hugetlb=1"
MEMORY: Final = {
    "given back": {FREED_MEMORY: "given back", "GLIBC_TUNABLES": ""},
    "kept": {FREED_MEMORY: "kept", "GLIBC_TUNABLES": ""},
    "kept, huge pages": {FREED_MEMORY: "kept", "GLIBC_TUNABLES": HUGE_PAGES},
}


def run_setting(setting: Setting, devices: int, turns: Turns) -> list[dict[str, Any]]:
    """Times all sides in turns on emulated devices; returns a result per side."""
    sides = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        batches = write_batches(setting, turns.num_batches(len(METHODS)), folder)
        number = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        try:
            for memory, variables in MEMORY.items():
                environment = os.environ | number | variables
                sides[memory], _ = start_checked(
                    SIDES[OURS], setting, batches, environment=environment
                )
            times = time_in_turns(sides, METHODS, turns)
        finally:
            for side in sides.values():
                side.close()
    first = next(iter(MEMORY))
    results = []
    for memory, by_method in times.items():
        row: dict[str, Any] = {"setting": setting.name, "devices": devices}
        row["memory"] = memory
        for method, found in by_method.items():
            row |= found.fields(method)
            row[f"{method}_ratio"] = found.median_ms / times[first][method].median_ms
        results.append(row)
        ratios = ", ".join(f"{x} {row[f'{x}_ratio']:.2f}" for x in METHODS)
        print(f"{setting.name}, {devices} devices, {memory}: {ratios}", flush=True)
    return results


def main() -> None:
    """Measures in turns; prints ratios and writes JSON."""
    parser = argparse.ArgumentParser(description="Times steps by the memory of a CPU.")
    parser.add_argument(
        "--setting",
        nargs="+",
        action=AllValues,
        choices=SETTINGS,
        default=["S1", "S2", "S3"],
    )
    parser.add_argument(
        "--devices", nargs="+", action=AllValues, type=int, default=[1, 2]
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        parser.error("settings of glibc's memory need Linux")
    turns = Turns(rounds=arguments.rounds, steps=arguments.steps, seconds=3.0)
    results = []
    for name in arguments.setting:
        for devices in arguments.devices:
            results += run_setting(SETTINGS[name], devices, turns)
    write_document(
        arguments.json,
        "host_memory",
        shapes={name: SETTINGS[name].shapes() for name in arguments.setting},
        results=results,
    )


if __name__ == "__main__":
    main()
