"""Times steps on a CPU with tables in huge pages, beside tables in pages of 4 KB.

    python benchmarks/huge_pages.py [--setting S1 S2 S3] [--rounds N] [--json FILE]
    python benchmarks/record.py FILE

Random rows lie on different pages, so a lookup waits for the addresses of pages as well
as for the rows. Both sides are this package; one process has a variable of glibc that
asks Linux for huge pages. They take turns.
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
from step_check import start_checked, write_batches

METHODS: Final = ("train", "forward")
TUNABLE: Final = "GLIBC_TUNABLES"
PAGES: Final = {"4 KB": "glibc.malloc.hugetlb=0", "huge": "glibc.malloc.hugetlb=1"}


def run_setting(setting: Setting, turns: Turns) -> list[dict[str, Any]]:
    """Times both sides in turns; returns a result per side."""
    sides = {}
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        batches = write_batches(setting, turns.num_batches(len(METHODS)), folder)
        try:
            for pages, tunable in PAGES.items():
                environment = os.environ | {TUNABLE: tunable}
                sides[pages], _ = start_checked(
                    SIDES[OURS], setting, batches, environment=environment
                )
            times = time_in_turns(sides, METHODS, turns)
        finally:
            for side in sides.values():
                side.close()
    first = next(iter(PAGES))
    results = []
    for pages, by_method in times.items():
        row: dict[str, Any] = {"setting": setting.name, "pages": pages}
        for method, found in by_method.items():
            row |= found.fields(method)
            row[f"{method}_ratio"] = found.median_ms / times[first][method].median_ms
        results.append(row)
    return results


def main() -> None:
    """Measures in turns; prints ratios and writes JSON."""
    parser = argparse.ArgumentParser(description="Times steps with huge pages.")
    parser.add_argument(
        "--setting",
        nargs="+",
        action=AllValues,
        choices=SETTINGS,
        default=["S1", "S2", "S3"],
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    if sys.platform != "linux":
        parser.error("huge pages by a variable of glibc need Linux")
    turns = Turns(rounds=arguments.rounds, steps=arguments.steps, seconds=3.0)
    results = []
    for name in arguments.setting:
        results += run_setting(SETTINGS[name], turns)
        last = results[-1]
        ratios = ", ".join(f"{x} {last[f'{x}_ratio']:.2f}" for x in METHODS)
        print(f"{name}: huge pages over 4 KB: {ratios}", flush=True)
    write_document(
        arguments.json,
        "huge_pages",
        shapes={name: SETTINGS[name].shapes() for name in arguments.setting},
        results=results,
    )


if __name__ == "__main__":
    main()
