"""Runs the benchmarks of everything that a user waits for, and records the figures.

    python benchmarks/all.py [--quick] [--only NAME ...] [--python NAME=PATH ...]
        [--output DIR] [--record]

Benchmarks run one after another, each beside its peer in one run. The whole list takes
about an hour on a quiet machine. `--quick` is a rehearsal with small sizes, whose
figures are never recorded. `--python torch=PATH` names the interpreter of a peer.
`--record` merges the figures into results.json, and renders all tables. A benchmark
that fails does not stop the others; the exit status is then 1.
"""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Final

from list_options import AllValues

DIRECTORY: Final = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One benchmark of the list.

    Attributes:
      options: of the run that is recorded.
      quick: of the rehearsal.
      minutes: that the run takes, about.
      peers: names that its option `--python` takes; empty: it has none.
    """

    options: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    minutes: int
    peers: tuple[str, ...] = ()


_QUICK_STEPS: Final = ("--setting", "T0", "--rounds", "1", "--steps", "2")
BENCHMARKS: Final = {
    "peers": Entry(
        quick=_QUICK_STEPS, minutes=12, peers=("fbgemm", "torch", "tensorflow")
    ),
    "dlrm_speed": Entry(
        quick=("--rounds", "1", "--steps", "2"), minutes=3, peers=("torch",)
    ),
    "serving_latency": Entry(
        options=("--rounds", "2", "--batch", "1", "256", "4096"),
        quick=("--rounds", "1", "--rows", "1000", "--batch", "1", "16"),
        minutes=3,
        peers=("tensorflow", "torch"),
    ),
    "checkpoint_speed": Entry(
        options=("--gb", "1", "--devices", "8"),
        quick=("--gb", "0.05", "--rounds", "1"),
        minutes=6,
    ),
    "input_speed": Entry(
        options=("--gb", "0.3"), quick=("--gb", "0.03", "--windows", "2"), minutes=10
    ),
    "first_step": Entry(quick=("--rounds", "1"), minutes=4),
    "device_count": Entry(quick=("--setting", "T0", "--devices", "1", "2"), minutes=3),
    "host_memory": Entry(quick=_QUICK_STEPS, minutes=8),
    "table_size": Entry(quick=("--devices", "1", "--steps", "2"), minutes=4),
    "compile_time": Entry(quick=("--rounds", "1"), minutes=3),
    "prepare_speed": Entry(quick=("--seconds", "0"), minutes=1),
}
"""Name of a script to its options."""


def main() -> int:
    """Runs the list; returns 1 if a benchmark failed."""
    arguments = _parse()
    pythons = dict(pair.split("=", 1) for pair in arguments.python)
    output = arguments.output or pathlib.Path(tempfile.mkdtemp(prefix="benchmarks-"))
    output.mkdir(parents=True, exist_ok=True)
    entries = {name: BENCHMARKS[name] for name in arguments.only or BENCHMARKS}
    files, failed = [], []
    for number, (name, entry) in enumerate(entries.items(), 1):
        expected = "" if arguments.quick else f", about {entry.minutes} min"
        print(f"== {number}/{len(entries)} {name}{expected}", flush=True)
        file = output / f"{name}.json"
        start = time.monotonic()
        run = subprocess.run(_command(name, entry, file, pythons, arguments.quick))
        minutes = (time.monotonic() - start) / 60
        if run.returncode == 0:
            files.append(str(file))
            print(f"== {name}: {minutes:.1f} min", flush=True)
        else:
            failed.append(name)
            print(f"== {name} FAILED, status {run.returncode}", flush=True)
    print(f"{len(files)} of {len(entries)} have figures, in {output}")
    if arguments.record and files:
        subprocess.run([sys.executable, DIRECTORY / "record.py", *files], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the benchmarks of waiting.")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument(
        "--only", nargs="+", action=AllValues, choices=BENCHMARKS, metavar="NAME"
    )
    parser.add_argument(
        "--python",
        nargs="+",
        action=AllValues,
        default=[],
        metavar="NAME=PATH",
        help="interpreters of peers",
    )
    parser.add_argument("--output", type=pathlib.Path, help="directory for the figures")
    parser.add_argument(
        "--record", action="store_true", help="merge the figures into results.json"
    )
    arguments = parser.parse_args()
    if arguments.record and arguments.quick:
        parser.error("--record needs figures of full size; leave --quick out")
    if any("=" not in pair for pair in arguments.python):
        parser.error(f"--python needs NAME=PATH, got {arguments.python}")
    return arguments


def _command(
    name: str,
    entry: Entry,
    file: pathlib.Path,
    pythons: dict[str, str],
    quick: bool,
) -> list[str]:
    options = list(entry.quick if quick else entry.options)
    found = [f"{peer}={pythons[peer]}" for peer in entry.peers if peer in pythons]
    if found:
        options += ["--python", *found]
    script = str(DIRECTORY / f"{name}.py")
    return [sys.executable, script, *options, "--json", str(file)]


if __name__ == "__main__":
    sys.exit(main())
