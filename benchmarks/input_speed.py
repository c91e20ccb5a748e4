"""Times the readers of click logs beside other readers, and their memory.

    python benchmarks/input_speed.py [--gb N] [--format text parquet]
        [--directory DIR] [--json FILE]
    python benchmarks/record.py FILE

One log of synthetic clicks is written as text in Criteo's format, and as Parquet. A
process of its own for each format reads windows of batches in turns: by this package,
shuffled by blocks, and by other readers in file order. For a batch of 8,192 samples:

* This package checks every value, and makes a `Batch`: 26 int32 arrays of row ids,
  float32 `[batch, 13]`, labels and weights. It hashes categories of text to row ids.
* pandas parses all columns of the text, by its defaults. Categories stay text.
* pyarrow decodes all columns of the Parquet file, and makes NumPy arrays of them.

The memory is the peak of the process above that before it opened the files. It is taken
after this package has read half an epoch, before the other readers.
"""

import argparse
import itertools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from list_options import AllValues
from measuring import peak_bytes, report_results, reset_peak, run_fresh

from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES, NUM_DENSE
from tpu_embedding.tools.data.synthetic_criteo import write_criteo_sample
from tpu_embedding.tools.train import ParquetFeature, ParquetSource

BATCH_SIZE: Final = 8192
TILE_ROWS: Final = 65_536
"""Samples of a log, which its files hold over and over: they cost little to write."""
WINDOW: Final = 32 * BATCH_SIZE
"""Samples that one side reads before it is the next one's turn: four row groups."""
VOCABULARY_SIZE: Final = 100_000
DENSE_COLUMNS: Final = tuple(f"dense_{i:02d}" for i in range(NUM_DENSE))
FILES: Final = {"text": "day_0", "parquet": "day_0.parquet"}


def write_files(directory: pathlib.Path, num_bytes: int) -> int:
    """Writes both formats; returns the number of samples.

    Args:
      directory: existing directory.
      num_bytes: size of the text, rounded up to whole tiles.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tile = directory / "tile"
    write_criteo_sample(tile, TILE_ROWS)
    text = tile.read_bytes()
    num_tiles = -(-num_bytes // len(text))
    with (directory / FILES["text"]).open("wb") as file:
        for _ in range(num_tiles):
            file.write(text)
    data = Criteo(
        tile,
        batch_size=TILE_ROWS,
        vocabulary_sizes=VOCABULARY_SIZE,
        evaluation_path=tile,
    )
    (batch,) = data.evaluation_batches()
    dense = dict(zip(DENSE_COLUMNS, np.asarray(batch.dense).T, strict=True))
    columns = {name: np.asarray(ids) for name, ids in batch.features.items()} | dense
    table = pa.table(columns | {"label": batch.labels.astype(np.int32)})
    with pq.ParquetWriter(directory / FILES["parquet"], table.schema) as writer:
        for _ in range(num_tiles):
            writer.write_table(table, TILE_ROWS)
    return num_tiles * TILE_ROWS


def compare(name: str, directory: pathlib.Path, num_windows: int) -> list[Any]:
    """Reads windows by all sides in turns; returns a row for each peer."""
    before = reset_peak()
    ours = _read_shuffled(name, directory / FILES[name])
    next(ours)
    peak = peak_bytes() - before
    peers = _PEER_READERS[name]
    sides = {"ours": ours}
    sides |= {peer: read(directory / FILES[name]) for peer, read in peers.items()}
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
    return [
        {
            "format": name,
            "peer": peer,
            "samples_per_second": found["ours"],
            "peer_samples_per_second": found[peer],
            "ratio": found["ours"] / found[peer],
            "peak_bytes": peak,
        }
        for peer in peers
    ]


def _read_shuffled(name: str, path: pathlib.Path) -> Iterator[int]:
    """Reads half an epoch before the first count of samples, then a batch for each."""
    if name == "parquet":
        features = tuple(
            ParquetFeature(name=name, vocabulary_size=VOCABULARY_SIZE)
            for name in CATEGORY_NAMES
        )
        source = ParquetSource(
            features=features,
            label="label",
            dense=DENSE_COLUMNS,
            num_evaluation_samples=1000,
        )
        data = source.open(path, batch_size=BATCH_SIZE, seed=0)
    else:
        data = Criteo(
            path,
            batch_size=BATCH_SIZE,
            vocabulary_sizes=VOCABULARY_SIZE,
            num_evaluation_samples=1000,
        )
    half = data.num_train_samples // BATCH_SIZE // 2
    for step in itertools.count():
        data.train_batch(step)
        if step >= half:
            yield BATCH_SIZE


def _read_by_pandas(path: pathlib.Path) -> Iterator[int]:
    import pandas  # pyright: ignore[reportMissingImports]

    while True:
        for chunk in pandas.read_csv(path, sep="\t", header=None, chunksize=BATCH_SIZE):
            yield len(chunk)


def _read_by_pyarrow(path: pathlib.Path) -> Iterator[int]:
    import pyarrow.parquet as pq

    while True:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_SIZE):
                arrays = [column.to_numpy() for column in batch.columns]
                yield len(arrays[0])


_PEER_READERS: Final[dict[str, dict[str, Callable[[pathlib.Path], Iterator[int]]]]] = {
    "text": {"pandas": _read_by_pandas},
    "parquet": {"pyarrow": _read_by_pyarrow},
}


def main() -> None:
    """Measures both formats."""
    parser = argparse.ArgumentParser(description="Times the readers of files.")
    parser.add_argument("--gb", type=float, default=5.0, help="size of the text")
    parser.add_argument(
        "--format", nargs="+", action=AllValues, choices=FILES, default=list(FILES)
    )
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--directory", type=pathlib.Path, help="on the disk to measure")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as parent:
        directory = pathlib.Path(parent)
        num_samples = write_files(directory, int(1e9 * arguments.gb))
        for name in arguments.format:
            results += run_fresh(compare, name, directory, arguments.windows)
    report_results(
        arguments.json,
        "input_speed",
        shapes={"gb": arguments.gb, "samples": num_samples, "batch": BATCH_SIZE},
        results=results,
    )


if __name__ == "__main__":
    main()
