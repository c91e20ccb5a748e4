"""Times the serving of lookups by an export, beside TorchScript if it is installed.

    python benchmarks/serving_latency.py [--setting one_hot bags] [--dtype float32 int8]
        [--batch 1 256 4096] [--rows N] [--calls N] [--json FILE]
    python benchmarks/record.py FILE

A call takes int64 ids as NumPy arrays, and ends when the activations are NumPy arrays.
So checks of ids, and copies to and from the library, count. The sides are the StableHLO
program, read by `te.export.load`, and a scripted module of one EmbeddingBag per
feature, in float32 only. Both run in this process, call by call in turns.
"""

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from flax import nnx
from list_options import AllValues
from measuring import report_results
from settings import Setting, initial_table
from sides.embedding_layer import table_features

import tpu_embedding as te
from tpu_embedding.export.table_files import RowFormat

SHAPES: Final[dict[str, dict[str, int]]] = {
    "one_hot": {"tables": 26, "dim": 32, "valence": 1},
    "bags": {"tables": 8, "dim": 128, "valence": 20},
    "tiny": {"tables": 2, "dim": 8, "valence": 4},
}
"""Shapes of the lookups; `tiny` is to try the command."""

Ids = dict[str, np.ndarray]


def stablehlo(setting: Setting, dtype: RowFormat) -> Callable[[Ids], list[np.ndarray]]:
    """Exports a layer; returns a call on the program."""
    features = table_features(setting)
    layer = te.TPUEmbedding(features, rngs=nnx.Rngs(0))
    example = draw_ids(setting, 3)
    with tempfile.TemporaryDirectory() as directory:
        te.export.save(layer, f"{directory}/export", example, dtype=dtype)
        served = te.export.load(f"{directory}/export")
    return lambda ids: [np.asarray(rows) for rows in served(ids).values()]


def torchscript(setting: Setting) -> Callable[[Ids], list[np.ndarray]]:
    """Scripts one bag of rows per feature; returns a call on all of them."""
    import torch  # pyright: ignore[reportMissingImports]

    tables = [
        torch.from_numpy(initial_table(setting, i)) for i in range(setting.tables)
    ]
    bags = [torch.nn.EmbeddingBag.from_pretrained(rows, mode="sum") for rows in tables]
    scripted = [torch.jit.freeze(torch.jit.script(bag.eval())) for bag in bags]
    shape = (-1, setting.valence)

    def call(ids: Ids) -> list[np.ndarray]:
        with torch.inference_mode():
            given = [torch.from_numpy(each.reshape(shape)) for each in ids.values()]
            return [b(x).numpy() for b, x in zip(scripted, given, strict=True)]

    return call


def draw_ids(setting: Setting, batch: int) -> Ids:
    """Returns a request of int64 ids, `[batch]` or `[batch, valence]` by feature."""
    random = np.random.default_rng(0)
    shape = (batch, setting.valence)[: 1 + (setting.valence > 1)]
    return {
        name: random.integers(setting.rows, size=shape)
        for name in table_features(setting)
    }


def time_calls(
    calls: dict[str, Callable[[Ids], list[np.ndarray]]], ids: Ids, count: int
) -> dict[str, list[float]]:
    """Returns the milliseconds of each call of each side; all give equal results."""
    first, *others = (call(ids) for call in calls.values())
    for other in others:
        np.testing.assert_allclose(np.stack(other), np.stack(first), atol=1e-5)
    times: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(count):
        for side, call in calls.items():
            start = time.perf_counter()
            call(ids)
            times[side].append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Measures all cases."""
    arguments = _parse()
    results: list[dict[str, Any]] = []
    for name in arguments.setting:
        setting = Setting(name=name, rows=arguments.rows, batch=1, **SHAPES[name])
        for dtype in arguments.dtype:
            calls = {"stablehlo": stablehlo(setting, dtype)}
            try:
                calls |= {"torch": torchscript(setting)} if dtype == "float32" else {}
            except ImportError:
                print("left out: torch: not installed")
            for batch in arguments.batch:
                times = time_calls(calls, draw_ids(setting, batch), arguments.calls)
                ours = statistics.median(times["stablehlo"])
                for side, found in times.items():
                    p50, p99 = np.percentile(found, [50, 99]).tolist()
                    row = {"setting": name, "dtype": dtype, "batch": batch}
                    row |= {"side": side, "p50_ms": p50, "p99_ms": p99}
                    results.append(row | {"ratio": ours / p50})
    report_results(
        arguments.json,
        "serving_latency",
        shapes={"rows": arguments.rows, "calls": arguments.calls},
        results=results,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Times the serving of lookups.")

    def add(option: str, default: list[Any], **kinds: Any) -> None:
        parser.add_argument(
            option, nargs="+", action=AllValues, default=default, **kinds
        )

    add("--setting", ["one_hot", "bags"], choices=SHAPES)
    add("--dtype", ["float32", "int8"], choices=["float32", "int8"])
    add("--batch", [1, 256, 4096], type=int)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--calls", type=int, default=200, help="calls of each side")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
