"""Times the run config `dlrm` end to end, beside the same model in PyTorch.

    python benchmarks/dlrm_speed.py [--python torch=/path/to/python] [--rounds N]
        [--steps K] [--json FILE]
    python benchmarks/record.py FILE

From batches in NumPy to updated parameters: preparation, transfer, forward and backward
pass, and both optimizers. Both sides start from the same parameters, and their first
logits are compared. They take turns of some steps. PyTorch updates tables by sparse
Adagrad, as it has no row-wise Adagrad. Without PyTorch, this package runs alone.
"""

import argparse
import contextlib
import pathlib
import sys
import tempfile
from typing import Final

import numpy as np
from interleaved import SideFailedError, SideProcess, Times, missing_modules
from measuring import write_document
from settings import DlrmSetting

from tpu_embedding.tools import train
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES

CONFIG: Final = "dlrm"
MODULES: Final = {"ours": "dlrm_layer", "torch": "dlrm_torch"}
TOLERANCE: Final = 1e-4
"""Of first logits of order 1, after a few matrix products in float32."""


def main() -> None:
    """Measures in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times the training of DLRM.")
    parser.add_argument("--python", metavar="torch=PATH", help="interpreter of PyTorch")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=60, help="steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    python = (arguments.python or sys.executable).removeprefix("torch=")
    pythons = {"ours": sys.executable, "torch": python}
    if missing := missing_modules(python, ("torch", "numpy")):
        print(f"left out: torch: {' and '.join(missing)} not installed")
        del pythons["torch"]
    config = train.load_config(CONFIG)
    with tempfile.TemporaryDirectory() as directory:
        comparison = _Comparison(config, pathlib.Path(directory), arguments.steps)
        times = comparison.run(pythons, arguments.rounds)
    results = []
    for name, found in times.items():
        row = {"side": name, **found.fields("step")}
        row["samples_per_second"] = 1e3 * config.batch_size / found.median_ms
        row["ratio"] = found.median_ms / times["ours"].median_ms
        results.append(row)
        print(
            f"{name:6} {found.median_ms:8.2f} ms {row['samples_per_second']:12,.0f}/s"
        )
    write_document(
        arguments.json,
        "dlrm_speed",
        shapes={"config": CONFIG, "batch": config.batch_size},
        results=results,
        versions=comparison.versions,
    )


class _Comparison:
    """The sides of one run; its files lie in a directory."""

    def __init__(
        self, config: train.RunConfig, directory: pathlib.Path, num_steps: int
    ):
        self.versions: dict[str, str] = {}
        self._directory = directory
        self._num_steps = num_steps
        self._setting = DlrmSetting(
            config=CONFIG,
            table_learning_rate=config.table_learning_rate,
            dense_learning_rate=config.dense_learning_rate,
            num_steps=config.num_steps,
            parameters_file=str(directory / "parameters.npz"),
        )
        self._config = config

    def run(self, pythons: dict[str, str], num_rounds: int) -> dict[str, Times]:
        """Times each side, A B A B, on the same batches."""
        self._write_batches(num_rounds * self._num_steps + 1)
        times = {name: Times() for name in pythons}
        with contextlib.ExitStack() as stack:
            sides = {}
            for name, python in pythons.items():
                sides[name] = side = self._start(name, python)
                stack.callback(side.close)
            self._compare_logits(list(sides))
            for number in range(num_rounds):
                first = 1 + number * self._num_steps
                for name, side in sides.items():
                    reply = side.ask(
                        "time_together",
                        method="train",
                        first=first,
                        count=self._num_steps,
                    )
                    times[name].add(reply)
                    step = 1e3 * reply["seconds"][0]
                    print(f"  round {number + 1}: {name} {step:.2f} ms", flush=True)
        return times

    def _write_batches(self, count: int) -> None:
        data = self._config.data.open(
            None, batch_size=self._config.batch_size, seed=self._config.seed
        )
        batches = [data.train_batch(step) for step in range(count)]
        dense = [batch.dense for batch in batches]
        assert all(isinstance(array, np.ndarray) for array in dense)
        np.savez(
            self._directory / "batches.npz",
            ids=np.stack(
                [np.stack([b.features[n] for n in CATEGORY_NAMES]) for b in batches]
            ),
            dense=np.asarray(dense, np.float32),
            labels=np.stack([np.float32(b.labels) for b in batches]),
        )

    def _start(self, name: str, python: str) -> SideProcess:
        print(f"  starting {name}", flush=True)
        batches = self._directory / "batches.npz"
        side = SideProcess(MODULES[name], self._setting, batches, python=python)
        try:
            reply = side.ask("check", file=str(self._directory / f"{name}.npy"))
        except SideFailedError:
            side.close()
            raise
        self.versions |= reply["versions"]
        return side

    def _compare_logits(self, names: list[str]) -> None:
        """Refuses sides that compute another model."""
        logits = [np.load(self._directory / f"{name}.npy")[0] for name in names]
        for name, found in zip(names, logits, strict=True):
            difference = float(np.abs(found - logits[0]).max())
            if not difference <= TOLERANCE:
                raise SystemExit(f"{name}: first logits differ by {difference:.2g}.")


if __name__ == "__main__":
    main()
