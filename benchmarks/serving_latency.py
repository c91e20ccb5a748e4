"""Times the serving of lookups: the exports of this package, beside TorchScript.

    python benchmarks/serving_latency.py [--setting one_hot bags] [--dtype float32 int8]
        [--batch 1 16 256 4096] [--python tensorflow=/path torch=/path] [--json FILE]
    python benchmarks/record.py FILE

A call takes int64 ids as NumPy arrays, and ends when the activations are NumPy arrays.
So checks of ids, and copies to and from the library, count. The sides are the StableHLO
program, read by `te.export.load`; the SavedModel under TensorFlow; and a scripted
module of one EmbeddingBag per feature. They have the same rows, also in int8. Each has
a process of its own with all cores, and they take turns.

The first call of each side is compared with NumPy. Sides whose libraries are not
installed are left out, and the output says so. `--python` names their interpreters;
TensorFlow's needs this package, too, which writes the SavedModel.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Final

from interleaved import (
    SideFailedError,
    SideProcess,
    Turns,
    missing_modules,
    time_in_turns,
)
from list_options import AllValues
from measuring import write_document
from settings import SERVED_SHAPES, ServingSetting
from sides import SERVERS
from step_check import start_server, write_batches

MAX_TURN_IDS: Final = 2**24
"""Ids of a turn, which lie in memory."""
FIRST: Final = next(iter(SERVERS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latency:
    """Times all sides at all batch sizes.

    Attributes:
      pythons: side to its interpreter.
      batches: batch sizes.
      rounds: turns of each side.
      calls: timed calls of each side, at most.
      seconds: time after which a turn ends early.
    """

    pythons: dict[str, str]
    batches: list[int]
    rounds: int
    calls: int
    seconds: float

    def run(self, setting: ServingSetting) -> list[dict[str, Any]]:
        """Writes the exports of a setting, and times them at each batch size."""
        sides = [name for name in self.pythons if self._export(name, setting)]
        results = []
        for batch in self.batches:
            results += self._time(sides, dataclasses.replace(setting, batch=batch))
        return results

    def _export(self, name: str, setting: ServingSetting) -> bool:
        """Returns False if the side cannot have its export."""
        if SERVERS[name].export is None:
            return True
        script = str(pathlib.Path(__file__).with_name("serving_export.py"))
        fields = json.dumps(dataclasses.asdict(setting))
        command = [self.pythons[name], script, fields, SERVERS[name].export]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"left out: {name}: its export failed:\n{done.stderr[-1500:]}")
        return done.returncode == 0

    def _time(self, names: list[str], setting: ServingSetting) -> list[dict[str, Any]]:
        ids_of_call = setting.tables * setting.batch * setting.valence
        most = max(2, MAX_TURN_IDS // ids_of_call)
        steps = min(self.calls // self.rounds, most - 1)
        turns = Turns(rounds=self.rounds, steps=steps, seconds=self.seconds)
        file = write_batches(
            setting, min(most, turns.num_batches(1)), pathlib.Path(setting.directory)
        )
        case = {"setting": setting.name, "dtype": setting.dtype, "batch": setting.batch}
        print(*case.values(), flush=True)
        with self._started(names, setting, file) as (sides, checked):
            times = time_in_turns(sides, ("forward",), turns)
        results = []
        for name in sides:
            found = times[name]["forward"]
            row = case | {"side": name, "calls": len(found.seconds), **checked[name]}
            row |= {f"p{p}_ms": found.percentile_ms(p) for p in (50, 99)}
            results.append(row | {"shape": setting.shapes()})
            del results[-1]["shape"]["directory"]
        for row in results:
            row["ratio"] = results[0]["p50_ms"] / row["p50_ms"]
        return results

    @contextlib.contextmanager
    def _started(
        self, names: list[str], setting: ServingSetting, file: pathlib.Path
    ) -> Iterator[tuple[dict[str, SideProcess], dict[str, dict[str, Any]]]]:
        """Starts the sides that can run; yields them and their checks."""
        sides, checked = {}, {}
        try:
            for name in names:
                try:
                    sides[name], checked[name] = start_server(
                        SERVERS[name], setting, file, self.pythons[name]
                    )
                except SideFailedError as error:
                    print(f"left out: {name}: {error}", flush=True)
            yield sides, checked
        finally:
            for side in sides.values():
                side.close()


def main() -> None:
    """Measures in turns; prints a table and writes JSON."""
    arguments = _parse()
    latency = Latency(
        pythons=_installed(dict(pair.split("=", 1) for pair in arguments.python)),
        batches=arguments.batch,
        rounds=arguments.rounds,
        calls=arguments.calls,
        seconds=arguments.seconds,
    )
    results = []
    for name in arguments.setting:
        for dtype in arguments.dtype:
            with tempfile.TemporaryDirectory() as directory:
                setting = ServingSetting(
                    name=name,
                    rows=arguments.rows,
                    batch=1,
                    dtype=dtype,
                    directory=directory,
                    **SERVED_SHAPES[name],
                )
                results += latency.run(setting)
    for row in results:
        print(
            f"{row['setting']:8} {row['dtype']:8} {row['batch']:6} {row['side']:11}"
            f"{row['p50_ms']:9.3f} ms {row['p99_ms']:9.3f} ms {row['calls']:6} calls"
            f" {row['ratio']:6.2f}"
        )
    versions = [row.pop("versions") for row in results]
    write_document(
        arguments.json,
        "serving_latency",
        shapes={"rows": arguments.rows, "rounds": arguments.rounds},
        results=results,
        versions=dict(collections.ChainMap(*versions)),
    )


def _installed(pythons: dict[str, str]) -> dict[str, str]:
    """Returns the interpreters of the sides that can run; prints the other sides."""
    found = {}
    for name, info in SERVERS.items():
        python = pythons.get(name, sys.executable)
        if missing := missing_modules(python, info.requires):
            print(f"left out: {name}: {', '.join(missing)} not installed in {python}")
        else:
            found[name] = python
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the serving of lookups.")

    def add(option: str, default: Any, text: str, **kinds: Any) -> None:
        parser.add_argument(
            option, nargs="+", action=AllValues, default=default, help=text, **kinds
        )

    add("--setting", ["one_hot", "bags"], "shapes", choices=SERVED_SHAPES)
    add("--dtype", ["float32", "int8"], "rows", choices=["float32", "int8"])
    add("--batch", [1, 16, 256, 4096], "samples of a call", type=int)
    add("--python", [], "interpreters", metavar="NAME=PATH")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--calls", type=int, default=2000, help="calls, at most")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="end of a turn for slow sides"
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    for pair in arguments.python:
        if pair.split("=", 1)[0] not in SERVERS or "=" not in pair:
            parser.error(
                f"--python needs NAME=PATH with a NAME of {list(SERVERS)}: {pair!r}"
            )
    return arguments


if __name__ == "__main__":
    main()
