"""Times the reader of Parquet files beside bare pyarrow, and its memory.

    python benchmarks/input_speed.py [--gb N] [--directory DIR] [--json FILE]
    python benchmarks/record.py FILE

A Parquet file of random clicks has 26 columns of ids, 13 of numbers, and a label. Both
sides read windows of batches in turns: this package shuffled by row groups, and pyarrow
in file order. For a batch of 8,192 samples:

* This package checks every value, and makes a `Batch`: 26 int32 arrays of row ids,
  float32 `[batch, 13]`, labels and weights.
* pyarrow decodes all columns, and makes NumPy arrays of them.

The memory is the peak of the process above that before it opened the file. It is taken
after this package has read half an epoch, before the other reader.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from measuring import peak_bytes, report_results, reset_peak, run_fresh

from tpu_embedding.tools.data.criteo import DENSE_NAMES
from tpu_embedding.tools.data.synthetic_clicks import CATEGORY_NAMES
from tpu_embedding.tools.train import ParquetFeature, ParquetSource

BATCH_SIZE: Final = 8192
ROW_GROUP_ROWS: Final = 65_536
WINDOW: Final = 32 * BATCH_SIZE
"""Samples that one side reads before it is the next one's turn: four row groups."""
VOCABULARY_SIZE: Final = 100_000
BYTES_PER_ROW: Final = 4 * 40


def write_file(path: pathlib.Path, num_bytes: int) -> int:
    """Writes a file of about `num_bytes` decoded bytes; returns its samples."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator, size = np.random.default_rng(0), ROW_GROUP_ROWS
    columns: dict[str, np.ndarray] = {
        name: generator.integers(VOCABULARY_SIZE, size=size, dtype=np.int32)
        for name in CATEGORY_NAMES
    }
    columns |= {name: generator.random(size, np.float32) for name in DENSE_NAMES}
    table = pa.table(columns | {"label": generator.integers(2, size=size)})
    num_groups = -(-num_bytes // (BYTES_PER_ROW * size))
    with pq.ParquetWriter(path, table.schema) as writer:
        for _ in range(num_groups):
            writer.write_table(table, size)
    return num_groups * size


def compare(path: pathlib.Path, num_windows: int) -> dict[str, Any]:
    """Reads windows by both sides in turns; returns rates and memory."""
    before = reset_peak()
    ours = _read_shuffled(path)
    next(ours)
    peak = peak_bytes() - before
    sides = {"ours": ours, "peer": _read_by_pyarrow(path)}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    # The first window of a side fills caches.
    for number in range(num_windows + 1):
        for side, reader in sides.items():
            start, num_rows = time.perf_counter(), 0
            while num_rows < WINDOW:
                num_rows += next(reader)
            if number:
                rates[side].append(num_rows / (time.perf_counter() - start))
    found = {side: statistics.median(each) for side, each in rates.items()}
    return {
        "format": "parquet",
        "peer": "pyarrow",
        "samples_per_second": found["ours"],
        "peer_samples_per_second": found["peer"],
        "ratio": found["ours"] / found["peer"],
        "peak_bytes": peak,
    }


def _read_shuffled(path: pathlib.Path) -> Iterator[int]:
    """Reads half an epoch before the first count of samples, then a batch for each."""
    source = ParquetSource(
        features=tuple(
            ParquetFeature(name=name, vocabulary_size=VOCABULARY_SIZE)
            for name in CATEGORY_NAMES
        ),
        label="label",
        dense=DENSE_NAMES,
        num_evaluation_samples=1000,
    )
    data = source.open(path, batch_size=BATCH_SIZE, seed=0)
    half = data.num_train_samples // BATCH_SIZE // 2
    for step in itertools.count():
        data.train_batch(step)
        if step >= half:
            yield BATCH_SIZE


def _read_by_pyarrow(path: pathlib.Path) -> Iterator[int]:
    import pyarrow.parquet as pq

    while True:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_SIZE):
                arrays = [column.to_numpy() for column in batch.columns]
                yield len(arrays[0])


def main() -> None:
    """Writes a file, and measures both readers."""
    parser = argparse.ArgumentParser(description="Times the reader of Parquet files.")
    parser.add_argument("--gb", type=float, default=2.0, help="size when decoded")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--directory", type=pathlib.Path, help="on the disk to measure")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as parent:
        path = pathlib.Path(parent) / "clicks.parquet"
        num_samples = write_file(path, int(1e9 * arguments.gb))
        results = [run_fresh(compare, path, arguments.windows)]
    report_results(
        arguments.json,
        "input_speed",
        shapes={"gb": arguments.gb, "samples": num_samples, "batch": BATCH_SIZE},
        results=results,
    )


if __name__ == "__main__":
    main()
