"""Tables of an export: safetensors files, row formats, and rows in blocks."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.states import make_layer
from tests.rejections import rejects
from tpu_embedding.export.table_files import (
    decode,
    encode,
    read_tensors,
    write_rows,
    write_tensors,
)


def fbgemm_rows(rows):
    """Returns what FBGEMM's FloatToFused8BitRowwiseQuantized makes of float32 rows."""
    stored = []
    for row in rows:
        bias, width = row.min(), row.max() - row.min()
        scale = width / np.float32(255)
        codes = np.rint((row - bias) * (np.float32(255) / (width + np.float32(1e-8))))
        ends = np.array([scale, bias], "<f4").tobytes()
        stored.append(np.frombuffer(codes.astype(np.uint8).tobytes() + ends, np.uint8))
    return np.stack(stored)


def test_int8_rows_are_those_of_fbgemm():
    rows = np.random.default_rng(0).standard_normal((50, 12)).astype(np.float32)
    found, expected = encode(rows, "int8", "rows"), fbgemm_rows(rows)
    assert found.shape == (50, 12 + 8)
    # A product with a rounded reciprocal rounds a few codes to the neighbour.
    codes = found[:, :12].astype(int) - expected[:, :12]
    assert np.abs(codes).max() <= 1 and (codes != 0).mean() < 0.01
    np.testing.assert_array_equal(found[:, 12:], expected[:, 12:])
    step = (rows.max(axis=1) - rows.min(axis=1)) / 255
    assert (np.abs(decode(found) - rows) <= 0.501 * step[:, None]).all()


def test_int8_rows_of_one_value_and_not_finite():
    big = np.float32(3e38)
    rows = np.array([[0.25] * 3, [0.0] * 3, [big, -big, 0.0]], np.float32)
    np.testing.assert_array_equal(decode(encode(rows[:2], "int8", "rows")), rows[:2])
    with rejects(te.export.ExportError, field="table 't'", value=[-big, big]):
        encode(rows, "int8", "table 't'")


STORED = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "int8": np.uint8}


@pytest.mark.parametrize("dtype", STORED)
def test_tables_of_a_stored_type_keep_their_bits(tmp_path, dtype):
    layer = make_layer({"a": (100, 6), "b/c": (7, 6)}, dtype=dtype)
    te.export.save_tables(layer, tmp_path / "tables", dtype=dtype)
    for name, file in (("a", "tables/a"), ("b/c", "tables/b%2Fc")):
        stored = read_tensors(tmp_path / "tables" / f"{file}.safetensors")[name]
        assert stored.dtype == STORED[dtype]
        np.testing.assert_array_equal(decode(stored), layer.embedding_tables()[name])
    if dtype == "float32":
        te.export.save_tables(layer, tmp_path / "int8", dtype="int8")
        file = tmp_path / "int8" / "tables" / "a.safetensors"
        error = decode(read_tensors(file)["a"]) - layer.embedding_tables()["a"]
        assert 0 < np.abs(error).max() < 1e-2
    with rejects(te.export.ExportError, value=None, fix=f"{tmp_path / 'tables'}"):
        te.export.load(tmp_path / "tables")


ROW_IDS = {
    "all": np.arange(40),
    "one": np.array([39]),
    "near": np.array([1, 3, 7, 8, 12]),
    "far": np.array([0, 10, 39]),
    "unsorted": np.array([20, 3, 39, 21, 0]),
    "none": np.arange(0),
}


@pytest.mark.parametrize("row_ids", ROW_IDS.values(), ids=ROW_IDS)
def test_rows_are_written_at_their_places(row_ids, tmp_path):
    dtype = ml_dtypes.bfloat16
    tensors = {
        name: np.random.default_rng(0).integers(0, 99, (40, 3)).astype(dtype)
        for name in ("before", "written")
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    rows = np.full((len(row_ids), 3), 100, dtype)
    write_rows(tmp_path / "x.safetensors", "written", row_ids, rows)
    tensors["written"][row_ids] = rows
    for name, found in read_tensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(found, tensors[name], strict=True)


def test_a_name_that_the_format_reserves(tmp_path):
    layer = make_layer({"__metadata__": (5, 2)})
    with rejects(te.export.ExportError, field="TableConfig.name", value="__metadata__"):
        te.export.save_tables(layer, tmp_path / "tables")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_host_holds_blocks_and_no_table(tmp_path):
    layer = make_layer({"large": (2_000_000, 32)})
    tracemalloc.start()
    te.export.save_tables(layer, tmp_path / "tables", dtype="int8")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 256 MB of rows. A block has 16 MB; some copies of it are made to round it.
    assert peak < 140e6
