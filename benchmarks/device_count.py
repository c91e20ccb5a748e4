"""Times a train step on 1, 2, 4 and 8 emulated devices, at constant total work.

    python benchmarks/device_count.py [--setting S1] [--devices 1 2 4 8] [--json FILE]
    python benchmarks/record.py FILE

The devices share the cores of one machine. So no step gets faster with more devices;
the figures show what routing and exchanges add. Each number of devices has a process of
its own, and they take turns.
"""

import argparse
import contextlib
import os
import pathlib
import tempfile

from interleaved import Turns, time_in_turns
from list_options import AllValues
from measuring import report_results
from settings import SETTINGS
from sides import OURS, SIDES
from step_check import start_checked, write_batches

METHODS = ("train", "forward")


def main() -> None:
    """Measures in turns."""
    parser = argparse.ArgumentParser(description="Times steps by number of devices.")
    parser.add_argument("--setting", choices=SETTINGS, default="S1")
    parser.add_argument(
        "--devices", nargs="+", action=AllValues, type=int, default=[1, 2, 4, 8]
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    turns = Turns(rounds=arguments.rounds, steps=arguments.steps, seconds=5.0)
    sides = {}
    with contextlib.ExitStack() as stack:
        directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        batches = write_batches(setting, turns.num_batches(len(METHODS)), directory)
        for devices in arguments.devices:
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": str(devices),
            }
            name = f"{devices} devices"
            print(f"  starting {name}", flush=True)
            sides[name], _ = start_checked(
                SIDES[OURS], setting, batches, environment=environment
            )
            stack.callback(sides[name].close)
        times = time_in_turns(sides, METHODS, turns)
    results = []
    fewest = next(iter(times.values()))
    for devices, found in zip(arguments.devices, times.values(), strict=True):
        row = {"setting": setting.name, "devices": devices}
        for method in METHODS:
            row |= found[method].fields(method)
            ratio = found[method].median_ms / fewest[method].median_ms
            row[f"{method}_ratio"] = ratio
        results.append(row)
    report_results(
        arguments.json,
        "device_count",
        shapes={setting.name: setting.shapes()},
        results=results,
    )


if __name__ == "__main__":
    main()
