"""Writes one click log in the formats that `input_speed.py` reads.

All formats hold the same samples: a few thousand lines in Criteo's format, over and
over. So the files cost little time to write, whatever their size.
"""

import pathlib
import zipfile
from typing import Final

import numpy as np

from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES, NUM_DENSE
from tpu_embedding.tools.data.synthetic_criteo import write_criteo_sample

VOCABULARY_SIZE: Final = 100_000
TILE_ROWS: Final = 65_536
ROW_GROUP_ROWS: Final = 65_536

TAIL: Final = CATEGORY_NAMES[-4:]
"""Features that the Parquet file holds in one column of lists."""

DENSE_COLUMNS: Final = tuple(f"dense_{i:02d}" for i in range(NUM_DENSE))
"""Columns of dense inputs in the Parquet file."""

FILES: Final = {
    "text": "day_0",
    "arrays": "day_0_sparse_multi_hot.npz",
    "parquet": "day_0.parquet",
}


def write_files(directory: pathlib.Path, num_bytes: int) -> int:
    """Writes all formats; returns the number of samples.

    Args:
      directory: existing directory.
      num_bytes: size of the text, rounded up to whole tiles.
    """
    tile_path = directory / "tile"
    write_criteo_sample(tile_path, TILE_ROWS)
    text = tile_path.read_bytes()
    num_tiles = -(-num_bytes // len(text))
    with (directory / FILES["text"]).open("wb") as file:
        for _ in range(num_tiles):
            file.write(text)
    features, dense, labels = _parse(tile_path)
    tile_path.unlink()
    _write_arrays(directory, num_tiles, features, dense, labels)
    _write_parquet(directory, num_tiles, features, dense, labels)
    return num_tiles * TILE_ROWS


def _parse(path: pathlib.Path) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    data = Criteo(
        path,
        batch_size=TILE_ROWS,
        vocabulary_sizes=VOCABULARY_SIZE,
        evaluation_path=path,
    )
    (batch,) = data.evaluation_batches()
    features = {name: np.asarray(ids) for name, ids in batch.features.items()}
    assert isinstance(batch.dense, np.ndarray)
    return features, batch.dense, batch.labels.astype(np.int32)


def _write_arrays(
    directory: pathlib.Path,
    num_tiles: int,
    features: dict[str, np.ndarray],
    dense: np.ndarray,
    labels: np.ndarray,
) -> None:
    arrays = {"dense": dense, "labels": labels[:, None]}
    for name, tile in arrays.items():
        with (directory / f"day_0_{name}.npy").open("wb") as file:
            _write_array(file, tile, num_tiles)
    with zipfile.ZipFile(directory / FILES["arrays"], "w") as archive:
        for number, ids in enumerate(features.values()):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                _write_array(file, ids[:, None], num_tiles)


def _write_array(file, tile: np.ndarray, num_tiles: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(tile.dtype),
        "fortran_order": False,
        "shape": (num_tiles * len(tile), *tile.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(file, header)
    data = np.ascontiguousarray(tile).tobytes()
    for _ in range(num_tiles):
        file.write(data)


def _write_parquet(
    directory: pathlib.Path,
    num_tiles: int,
    features: dict[str, np.ndarray],
    dense: np.ndarray,
    labels: np.ndarray,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array(ids) for name, ids in features.items()}
    tail = np.stack([features[name] for name in TAIL], axis=1)
    offsets = np.arange(len(tail) + 1, dtype=np.int32) * len(TAIL)
    lists = pa.ListArray.from_arrays(offsets, tail.ravel())
    columns = {n: column for n, column in columns.items() if n not in TAIL}
    columns |= dict(zip(DENSE_COLUMNS, map(pa.array, dense.T), strict=True))
    table = pa.table(columns | {"tail": lists, "label": pa.array(labels)})
    with pq.ParquetWriter(directory / FILES["parquet"], table.schema) as writer:
        for _ in range(num_tiles):
            writer.write_table(table, ROW_GROUP_ROWS)
