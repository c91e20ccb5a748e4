"""Streams a click log larger than memory need be, and times it beside other readers.

    python benchmarks/input_speed.py [--gb N] [--directory DIR] [--json FILE]
    python benchmarks/record.py FILE

One log of synthetic clicks is written as text, NumPy arrays and Parquet. For each
format, a process of its own reads one epoch, shuffled by blocks. Its memory is the peak
above that before the files were opened: once after a fifth of the epoch, and once at
its end. Flat memory shows as two equal figures.

Then another process reads windows of batches in turns: by this package shuffled, by
this package in file order, and by other readers of the format in file order. For a
batch of 8,192 samples, the sides do this work:

* This package checks every value, and makes a `Batch`: 26 int32 arrays of row ids,
  float32 `[batch, 13]`, labels and weights. It hashes categories of text to row ids.
* pandas and pyarrow.csv parse all columns of the text, by their defaults. Categories
  stay text. pyarrow.csv yields blocks of 1 MB.
* NumPy copies a slice of each mapped array.
* pyarrow decodes all columns of the Parquet file, and makes NumPy arrays of them: ids,
  labels, values and offsets of the lists, and float32 `[batch, 13]`.

CPU seconds are those of all threads.
"""

import argparse
import itertools
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from input_files import (
    DENSE_COLUMNS,
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
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.tools.train import ParquetFeature, ParquetSource

BATCH_SIZE: Final = 8192
WINDOW: Final = 32
"""Batches that one side reads before it is the next one's turn.

They hold four row groups, so that no window is spared the decoding.
"""

HELD_OUT: Final = 1000


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


def compare(
    name: str, directory: pathlib.Path, num_samples: int, num_windows: int
) -> list[dict[str, Any]]:
    """Reads windows of batches by all sides in turns; returns a row for each peer."""
    sides = {
        "shuffled": _read_shuffled(name, directory),
        "file_order": _read_in_file_order(name, directory, num_samples - BATCH_SIZE),
    }
    sides |= {peer: read(directory) for peer, read in _PEER_READERS[name].items()}
    windows: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(num_windows):
        for side, reader in sides.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            num_rows = 0
            while num_rows < WINDOW * BATCH_SIZE:
                num_rows += next(reader)
            seconds = time.perf_counter() - start
            cpu_seconds = time.process_time() - cpu_start
            windows[side].append((num_rows / seconds, cpu_seconds / num_rows))
    # The first window of a side fills caches.
    found = {side: _summary(each[1:]) for side, each in windows.items()}
    rows = []
    for peer in _PEER_READERS[name]:
        row = {"peer": peer, "windows": num_windows - 1, **found["shuffled"]}
        row |= {f"file_order_{k}": v for k, v in found["file_order"].items()}
        row |= {f"peer_{k}": v for k, v in found[peer].items()}
        for order in ("", "file_order_"):
            rate = row[f"{order}samples_per_second"]
            row[f"{order}ratio"] = rate / row["peer_samples_per_second"]
        rows.append(row)
    return rows


def _summary(windows: list[tuple[float, float]]) -> dict[str, Any]:
    """Returns median and quartiles of the rate, and the median CPU time."""
    rates = [rate for rate, _ in windows]
    low, median, high = np.percentile(rates, [25, 50, 75]).tolist()
    return {
        "samples_per_second": median,
        "samples_per_second_quartiles": [low, high],
        "cpu_seconds_per_million": 1e6 * statistics.median(cpu for _, cpu in windows),
    }


def open_data(
    name: str, directory: pathlib.Path, num_held_out: int = HELD_OUT
) -> BlockDataset:
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
            dense=DENSE_COLUMNS,
            num_evaluation_samples=num_held_out,
        )
        return source.open(path, batch_size=BATCH_SIZE, seed=0)
    if name == "arrays":
        return MultiHotClicks(
            directory,
            batch_size=BATCH_SIZE,
            vocabulary_sizes=sizes,
            valences=dict.fromkeys(CATEGORY_NAMES, 1),
            num_evaluation_samples=num_held_out,
        )
    return Criteo(
        path,
        batch_size=BATCH_SIZE,
        vocabulary_sizes=VOCABULARY_SIZE,
        num_evaluation_samples=num_held_out,
    )


def _read_shuffled(name: str, directory: pathlib.Path) -> Iterator[int]:
    data = open_data(name, directory)
    for step in itertools.count():
        data.train_batch(step)
        yield BATCH_SIZE


def _read_in_file_order(
    name: str, directory: pathlib.Path, num_samples: int
) -> Iterator[int]:
    data = open_data(name, directory, num_samples)
    while True:
        for _ in data.evaluation_batches():
            yield BATCH_SIZE


def _read_by_pandas(directory: pathlib.Path) -> Iterator[int]:
    import pandas  # pyright: ignore[reportMissingImports]

    path = directory / FILES["text"]
    while True:
        for chunk in pandas.read_csv(path, sep="\t", header=None, chunksize=BATCH_SIZE):
            yield len(chunk)


def _read_by_pyarrow_csv(directory: pathlib.Path) -> Iterator[int]:
    import pyarrow.csv as csv

    while True:
        with csv.open_csv(
            directory / FILES["text"],
            read_options=csv.ReadOptions(autogenerate_column_names=True),
            parse_options=csv.ParseOptions(delimiter="\t"),
        ) as reader:
            for batch in reader:
                yield batch.num_rows


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
                lists = batch.column("tail")
                columns = dict(zip(batch.column_names, batch.columns, strict=True))
                columns |= {"tail": lists.flatten(), "tail_offsets": lists.offsets}
                arrays = {name: each.to_numpy() for name, each in columns.items()}
                np.stack([arrays.pop(name) for name in DENSE_COLUMNS], axis=1)
                yield batch.num_rows


_PEER_READERS: Final[dict[str, dict[str, Callable[[pathlib.Path], Iterator[int]]]]] = {
    "text": {"pandas": _read_by_pandas, "pyarrow.csv": _read_by_pyarrow_csv},
    "arrays": {"numpy": _read_by_numpy},
    "parquet": {"pyarrow": _read_by_pyarrow},
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


def _lines(row: dict[str, Any]) -> Iterator[str]:
    for prefix, side in (("", "shuffled"), ("file_order_", "in file order")):
        yield f"  {side:13} {_rate(row, prefix)}; {row[prefix + 'ratio']:.2f} of peer"
    yield f"  {row['peer']:13} {_rate(row, 'peer_')}"


def _rate(row: dict[str, Any], prefix: str) -> str:
    low, high = row[f"{prefix}samples_per_second_quartiles"]
    return (
        f"{row[f'{prefix}samples_per_second']:11,.0f} samples/s "
        f"({low:,.0f} to {high:,.0f}), "
        f"{row[f'{prefix}cpu_seconds_per_million']:.2f} CPU s per million"
    )


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
            compared = run_fresh(
                compare, name, directory, num_samples, arguments.windows
            )
            results += [row | each for each in compared]
            print(
                f"{name:8} {row['file_bytes'] / 1e9:5.2f} GB, peak memory "
                f"{row['early_peak_bytes'] / 1e6:.0f} MB after a fifth, "
                f"{row['peak_bytes'] / 1e6:.0f} MB at the end"
            )
            for each in compared:
                print(*_lines(each), sep="\n", flush=True)
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
