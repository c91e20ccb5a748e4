"""Times the embedding part of a train step, beside every peer that is installed.

    python benchmarks/peers.py [--setting S1 S2 S3] [--peer fbgemm torch ...]
        [--python NAME=/path/to/python ...] [--rounds N] --json FILE
    python benchmarks/record.py FILE

A side is this package or a peer: FBGEMM, PyTorch, TensorFlow, JAX with dense
gradients. Each runs in a process of its own, beside one of this package, and the two
take turns, so load on the machine meets both. Compare ratios: those are taken within a
pair.

Every step has a new batch of Zipf-distributed ids, the same for all sides. It is on the
device, in the library's own form, before the clock starts. A step is a lookup, the
gradient of given cotangents, and row-wise Adagrad, or Adagrad for peers without it. The
forward pass is a lookup alone. Before that, the first step of every side is compared
with NumPy.

`--python fbgemm=/path/to/python` names the interpreter of a peer; the others need to be
installed beside this package. Peers that are not are left out, and the output says so.
"""

import argparse
import collections
import os
import pathlib
import sys
import tempfile
from typing import Any, Final

from interleaved import (
    SideFailedError,
    SideProcess,
    Times,
    Turns,
    missing_modules,
    time_in_turns,
)
from list_options import AllValues
from measuring import report_results
from settings import SETTINGS, Setting
from sides import OURS, SIDES
from step_check import start_checked, write_batches

METHODS: Final = ("train", "forward")
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Variables of all sides; see docs/guides/speed.md."""


def main() -> None:
    """Measures all settings."""
    arguments = _parse()
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    peers, left_out = _installed(arguments.peer, pythons)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    turns = Turns(
        rounds=arguments.rounds, steps=arguments.steps, seconds=arguments.seconds
    )
    results: list[dict[str, Any]] = []
    for name in arguments.setting:
        comparison = Comparison(SETTINGS[name], pythons, turns)
        results += comparison.run(peers)
    versions = [row.pop("versions", {}) for row in results]
    report_results(
        arguments.json,
        "peers",
        shapes={"rounds": turns.rounds, "steps": turns.steps},
        results=results,
        versions=dict(collections.ChainMap(*versions)),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times steps beside other libraries.")
    parser.add_argument(
        "--setting",
        nargs="+",
        action=AllValues,
        choices=SETTINGS,
        default=["S1", "S2", "S3"],
    )
    known = [name for name in SIDES if name != OURS]
    parser.add_argument(
        "--peer", nargs="*", action=AllValues, choices=known, default=known
    )
    parser.add_argument(
        "--python",
        nargs="+",
        action=AllValues,
        default=[],
        metavar="NAME=PATH",
        help="interpreters",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="end of a turn for slow sides"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    for pair in arguments.python:
        if pair.split("=", 1)[0] not in SIDES or "=" not in pair:
            parser.error(f"--python needs NAME=PATH with a NAME of {known}: {pair!r}")
    return arguments


class Comparison:
    """One setting, timed on this package and its peers.

    Args:
      setting: shapes.
      pythons: peer to its interpreter; others run in this one.
      turns: length of the run.
    """

    def __init__(self, setting: Setting, pythons: dict[str, str], turns: Turns):
        self._setting = setting
        self._pythons = pythons
        self._turns = turns
        self._checked: dict[str, dict[str, Any]] = {}

    def run(self, peers: list[str]) -> list[dict[str, Any]]:
        """Times all peers; returns a result for each side, or why there is none.

        Args:
          peers: names of the installed ones.
        """
        print(f"{self._setting.name}: {self._setting.shapes()}", flush=True)
        results: list[dict[str, Any]] = []
        own = {method: Times() for method in METHODS}
        with tempfile.TemporaryDirectory() as directory:
            self._batches = write_batches(
                self._setting,
                self._turns.num_batches(len(METHODS)),
                pathlib.Path(directory),
            )
            ours = self._start(OURS)
            try:
                if not peers:
                    own = time_in_turns({OURS: ours}, METHODS, self._turns)[OURS]
                for peer in peers:
                    try:
                        times = self._time_pair(ours, peer)
                    except SideFailedError as error:
                        print(f"  left out: {peer}: {error}", flush=True)
                        reason = str(error).splitlines()[0]
                        results.append(self._row(peer) | {"left_out": reason})
                        continue
                    for method in METHODS:
                        own[method].extend(times[OURS][method])
                    results.append(self._result(peer, times[peer], times[OURS]))
            finally:
                ours.close()
        if not own["train"].seconds:
            return results
        return [self._result(OURS, own, None), *results]

    def _time_pair(self, ours: SideProcess, peer: str) -> dict[str, dict[str, Times]]:
        """Starts a peer beside this package, and times both in turns."""
        side = self._start(peer)
        try:
            return time_in_turns({OURS: ours, peer: side}, METHODS, self._turns)
        finally:
            side.close()

    def _start(self, name: str) -> SideProcess:
        print(f"  starting {name}", flush=True)
        side, self._checked[name] = start_checked(
            SIDES[name],
            self._setting,
            self._batches,
            python=self._pythons.get(name, sys.executable),
            environment=os.environ | HUGE_PAGES,
        )
        return side

    def _row(self, name: str) -> dict[str, Any]:
        """Returns the fields that every result has."""
        return {
            "setting": self._setting.name,
            "peer": name,
            "optimizer": SIDES[name].optimizer,
            "shape": self._setting.shapes(),
        }

    def _result(
        self, name: str, times: dict[str, Times], beside: dict[str, Times] | None
    ) -> dict[str, Any]:
        """Returns the result of a side; `beside` has ours, timed in the same group."""
        result = self._row(name)
        for method, found in times.items():
            result |= found.fields(method)
            if beside is not None:
                ours = beside[method].median_ms
                result[f"{method}_ours_ms"] = ours
                result[f"{method}_ratio"] = ours / found.median_ms
        peak = max(found.peak_bytes for found in times.values())
        return result | {"peak_bytes": peak} | self._checked[name]


def _installed(
    peers: list[str], pythons: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the peers that can run, and the reasons why others cannot."""
    found, left_out = [], {}
    for name in peers:
        info = SIDES[name]
        missing = missing_modules(pythons.get(name, sys.executable), info.requires)
        if missing:
            left_out[name] = (
                f"{' and '.join(missing)} not installed; pip install {info.packages}, "
                f"and name that interpreter with --python {name}=PATH"
            )
        else:
            found.append(name)
    return found, left_out


if __name__ == "__main__":
    main()
