"""Streams a click log larger than memory need be, and times it beside other readers.

    python benchmarks/input_speed.py [--gb N] [--directory DIR] [--json FILE]
    python benchmarks/record.py FILE

One log of synthetic clicks is written as text, NumPy arrays and Parquet. For each
format, a process of its own reads one epoch, shuffled by blocks. Its memory is the peak
above that before the files were opened: once after a fifth of the epoch, and once at
its end. Flat memory shows as two equal figures.

Then another process reads windows of batches in turns, by this package and by another
reader of the format: pandas for text, NumPy's own mapped arrays, and pyarrow
for Parquet. Those readers go through the files in order. They parse all columns, and
convert nothing to row ids or to batches.
"""

import argparse
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from input_files import (
    FILES,
    TAIL,
    TILE_ROWS,
    VOCABULARY_SIZE,
    write_files,
)
from list_options import AllValues
from measuring import run_fresh, write_document

from tpu_embedding.tools.data.array_files import open_npy, open_npz
from tpu_embedding.tools.data.block_dataset import BlockDataset
from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES, NUM_DENSE
from tpu_embedding.tools.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.tools.train import ParquetFeature, ParquetSource

BATCH_SIZE: Final = 8192
WINDOW: Final = 8
"""Batches that one side reads before it is the other's turn."""

HELD_OUT: Final = 1000
PEERS: Final = {
    "text": "pandas",
    "arrays": "numpy",
    "parquet": "pyarrow",
}


def stream(name: str, directory: pathlib.Path) -> dict[str, Any]:
    """Reads an epoch; returns its rate and the memory that it took."""
    before = _peak_bytes()
    start = time.perf_counter()
    data = open_data(name, directory)
    opened = time.perf_counter()
    num_steps = data.num_train_samples // BATCH_SIZE
    early_bytes = 0
    for step in range(num_steps):
        data.train_batch(step)
        if step == num_steps // 5:
            early_bytes = _peak_bytes() - before
    seconds = time.perf_counter() - opened
    return {
        "samples": num_steps * BATCH_SIZE,
        "open_seconds": opened - start,
        "epoch_seconds": seconds,
        "early_peak_bytes": early_bytes,
        "peak_bytes": _peak_bytes() - before,
    }


def compare(name: str, directory: pathlib.Path, num_windows: int) -> dict[str, Any]:
    """Reads windows of batches by both sides in turns; returns median rates."""
    data = open_data(name, directory)
    peer = _PEER_READERS[name](directory)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for window in range(num_windows):
        steps = range(window * WINDOW, (window + 1) * WINDOW)
        start = time.perf_counter()
        for step in steps:
            data.train_batch(step)
        middle = time.perf_counter()
        num_rows = 0
        while num_rows < WINDOW * BATCH_SIZE:
            num_rows += next(peer)
        end = time.perf_counter()
        seconds["ours"].append((middle - start) / (WINDOW * BATCH_SIZE))
        seconds["peer"].append((end - middle) / num_rows)
    # The first window of a side fills caches.
    rates = {side: 1 / statistics.median(each[1:]) for side, each in seconds.items()}
    return {
        "samples_per_second": rates["ours"],
        "peer": PEERS[name],
        "peer_samples_per_second": rates["peer"],
        "ratio": rates["ours"] / rates["peer"],
        "windows": num_windows - 1,
    }


def open_data(name: str, directory: pathlib.Path) -> BlockDataset:
    """Opens the files of a format by this package."""
    path = directory / FILES[name]
    sizes = dict.fromkeys(CATEGORY_NAMES, VOCABULARY_SIZE)
    if name == "parquet":
        columns = [n for n in CATEGORY_NAMES if n not in TAIL]
        source = ParquetSource(
            features=(
                *(ParquetFeature(name=n, vocabulary_size=sizes[n]) for n in columns),
                ParquetFeature(
                    name="tail",
                    vocabulary_size=VOCABULARY_SIZE,
                    expected_valence=len(TAIL),
                ),
            ),
            label="label",
            dense=tuple(f"dense_{i:02d}" for i in range(NUM_DENSE)),
            num_evaluation_samples=HELD_OUT,
        )
        return source.open(path, batch_size=BATCH_SIZE, seed=0)
    if name == "arrays":
        return MultiHotClicks(
            directory,
            batch_size=BATCH_SIZE,
            vocabulary_sizes=sizes,
            valences=dict.fromkeys(CATEGORY_NAMES, 1),
            num_evaluation_samples=HELD_OUT,
        )
    return Criteo(
        path,
        batch_size=BATCH_SIZE,
        vocabulary_sizes=VOCABULARY_SIZE,
        num_evaluation_samples=HELD_OUT,
    )


def _read_by_pandas(path: pathlib.Path) -> Iterator[int]:
    import pandas  # pyright: ignore[reportMissingImports]

    while True:
        for chunk in pandas.read_csv(path, sep="\t", header=None, chunksize=BATCH_SIZE):
            yield len(chunk)


def _read_by_numpy(directory: pathlib.Path) -> Iterator[int]:
    arrays = [
        np.memmap(array.file.path, array.dtype, "r", array.offset, array.shape)
        for array in (
            open_npy(directory / "day_0_dense.npy"),
            open_npy(directory / "day_0_labels.npy"),
            *open_npz(directory / FILES["arrays"]).values(),
        )
    ]
    while True:
        for start in range(0, len(arrays[0]), BATCH_SIZE):
            rows = [np.array(array[start : start + BATCH_SIZE]) for array in arrays]
            yield len(rows[0])


def _read_by_pyarrow(directory: pathlib.Path) -> Iterator[int]:
    import pyarrow.parquet as pq

    while True:
        with pq.ParquetFile(directory / FILES["parquet"]) as file:
            for batch in file.iter_batches(BATCH_SIZE):
                yield batch.num_rows


_PEER_READERS: Final[dict[str, Callable[[pathlib.Path], Iterator[int]]]] = {
    "text": lambda directory: _read_by_pandas(directory / FILES["text"]),
    "arrays": _read_by_numpy,
    "parquet": _read_by_pyarrow,
}


def _peak_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def _file_bytes(name: str, directory: pathlib.Path) -> int:
    paths = [directory / FILES[name]]
    if name == "arrays":
        paths += directory.glob("*.npy")
    return sum(path.stat().st_size for path in paths)


def main() -> None:
    """Measures all formats; prints a table and writes JSON."""
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
            row = {"format": name, "file_bytes": _file_bytes(name, directory)}
            row |= run_fresh(stream, name, directory)
            row |= run_fresh(compare, name, directory, arguments.windows)
            results.append(row)
            print(
                f"{name:8} {row['file_bytes'] / 1e9:5.2f} GB, peak memory "
                f"{row['early_peak_bytes'] / 1e6:.0f} MB after a fifth, "
                f"{row['peak_bytes'] / 1e6:.0f} MB at the end; "
                f"{row['samples_per_second']:,.0f} samples/s, {row['ratio']:.2f} of "
                f"{row['peer']}",
                flush=True,
            )
    write_document(
        arguments.json,
        "input_speed",
        shapes={
            "gb": arguments.gb,
            "samples": num_samples,
            "batch": BATCH_SIZE,
            "tile": TILE_ROWS,
        },
        results=results,
    )


if __name__ == "__main__":
    main()
