"""Tests the reader of Yambda's files against their rows, and damaged files."""

import re
import sys

import numpy as np
import pytest

from tests.tools.data.yambda.test_event_samples import (
    golden,
    golden_actions,
    golden_log,
)
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.pyarrow_modules import MissingPyarrowError
from tpu_embedding.tools.data.yambda.event_log import EVENT_TYPES
from tpu_embedding.tools.data.yambda.yambda_files import (
    ALBUM_FILE,
    ARTIST_FILE,
    YambdaFiles,
    read_events,
    read_item_map,
    read_yambda,
)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = (
    "uid",
    "timestamp",
    "item_id",
    "is_organic",
    "event_type",
    "played_ratio_pct",
    "track_length_seconds",
)


def golden_table(rows=slice(None)):
    """Returns rows of the golden log, with nulls in the place of NaN."""
    table = {name: pa.array(golden()[f"log.{name}"][rows]) for name in COLUMNS}
    for name in ("played_ratio_pct", "track_length_seconds"):
        values = golden()[f"log.{name}"][rows]
        table[name] = pa.array(values, mask=np.isnan(values))
    return pa.table(table)


def with_column(table, name, values):
    return table.set_column(table.schema.names.index(name), name, values)


def write(path, table, rows_per_group=64):
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def write_maps(directory):
    for path, name in ((ARTIST_FILE, "artist"), (ALBUM_FILE, "album")):
        items, values = golden()[f"map.{name}_item"], golden()[f"map.{name}_id"]
        table = pa.table({f"{name}_id": values, "item_id": items})
        write(directory / path, table, rows_per_group=20)


def assert_equal_logs(log, expected):
    for name in (
        "users",
        "user_bounds",
        "times",
        "items",
        "actions",
        "is_organic",
        "item_artists",
        "item_albums",
    ):
        got, wanted = getattr(log, name), getattr(expected, name)
        assert got.dtype == wanted.dtype, name
        np.testing.assert_array_equal(got, wanted, name)


def test_a_log_in_the_published_folders(tmp_path):
    directory = tmp_path / "flat" / "50m"
    directory.mkdir(parents=True)
    write_maps(tmp_path)
    write(directory / "multi_event.parquet", golden_table())
    (directory / "likes.parquet").write_text("not read")
    files = YambdaFiles.find(directory)
    log = read_yambda(files)
    assert_equal_logs(log, golden_log())
    assert log.name == str(directory / "multi_event.parquet")
    assert len(log.digest) == 8 and log.digest == read_yambda(files).digest
    write(directory / "multi_event.parquet", golden_table(slice(0, 399)))
    assert read_yambda(files).digest != log.digest


def test_files_and_row_groups_are_read_in_order(tmp_path):
    write_maps(tmp_path)
    for number, (start, stop) in enumerate(((0, 150), (150, 150), (150, 400))):
        table = golden_table(slice(start, stop))
        write(tmp_path / f"multi_event-{number}.parquet", table, 7)
    columns = read_events(YambdaFiles.find(tmp_path).events)
    for values, expected in (
        (columns.users, golden()["log.uid"]),
        (columns.times, golden()["log.timestamp"]),
        (columns.items, golden()["log.item_id"]),
        (columns.actions, golden_actions()),
        (columns.is_organic, golden()["log.is_organic"]),
    ):
        np.testing.assert_array_equal(values, expected)


WORDS = [EVENT_TYPES[number] for number in (0, 1, 2, 3, 4, 0)]
TYPES = {
    "text": pa.array(WORDS),
    "large_text": pa.array(WORDS, pa.large_string()),
    "dictionary": pa.array(WORDS).dictionary_encode(),
    "numbers": pa.array([0, 1, 2, 3, 4, 0], pa.int16()),
}


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES.keys())
def test_types_of_events_are_words_or_numbers(tmp_path, types):
    table = with_column(golden_table(slice(0, 6)), "event_type", types)
    ratios = [50, 100, 100, None, None, 49]
    for values in (pa.array(ratios, pa.uint16()), pa.array(ratios, pa.float64())):
        table = with_column(table, "played_ratio_pct", values)
        path = write(tmp_path / "a.parquet", table, 4)
        assert read_events([path]).actions.tolist() == [1, 2, 0, 0, 0, 4]


@pytest.mark.parametrize("ratio", [None, float("nan"), 0.0, 49.9])
def test_a_listen_without_a_played_ratio_is_a_skip(tmp_path, ratio):
    table = with_column(golden_table(slice(0, 1)), "event_type", pa.array([0]))
    table = with_column(table, "played_ratio_pct", pa.array([ratio], pa.float32()))
    is_organic = pa.array([True])
    path = write(tmp_path / "a.parquet", with_column(table, "is_organic", is_organic))
    columns = read_events([path])
    assert columns.actions.tolist() == [4] and columns.is_organic.tolist() == [1]


BAD_VALUES = {
    "no_user": ("uid", None, "a value must not be null; fill it, or drop the row"),
    "negative_user": ("uid", -1, r"a value must lie in \[0, 2147483646\], got -1"),
    "large_item": ("item_id", 2**28, r".*268435455\], got 268435456; correct"),
    "late": ("timestamp", 2**31, r".*2147483646\], got 2147483648"),
    "organic": ("is_organic", 2, r"a value must lie in \[0, 1\], got 2"),
    "number": ("event_type", 5, r"a value must lie in \[0, 4\], got 5"),
    "word": (
        "event_type",
        "share",
        "a type must be one of listen, like, dislike, unlike, undislike, got 'share'",
    ),
    "no_word": ("event_type", None, "a value must not be null"),
}


@pytest.mark.parametrize(
    ("column", "value", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys()
)
def test_wrong_values_name_their_row(tmp_path, column, value, message):
    table = golden_table(slice(0, 20))
    values = table.column(column).to_pylist()
    if column == "event_type" and value != 5:
        values = ["listen"] * 20
    values[9] = value
    path = write(
        tmp_path / "a.parquet", with_column(table, column, pa.array(values)), 8
    )
    with pytest.raises(
        DataError,
        match=rf"{path}, row 9 \(row group 1\), column '{column}': {message}",
    ):
        read_events([path])


BAD_COLUMNS = {
    "uid": (pa.float32(), "it must hold integers, got float; pass Yambda's flat"),
    "timestamp": (pa.timestamp("s"), "it must hold integers, got timestamp"),
    "item_id": (pa.list_(pa.int32()), "it must hold integers, got list"),
    "event_type": (pa.float32(), "it must hold integers or text, got float"),
    "is_organic": (pa.string(), "it must hold integers or booleans, got string"),
    "played_ratio_pct": (pa.bool_(), "it must hold integers or floating.*got bool"),
}


@pytest.mark.parametrize(
    ("column", "kind", "message"),
    [(name, *case) for name, case in BAD_COLUMNS.items()],
    ids=BAD_COLUMNS.keys(),
)
def test_wrong_columns_are_refused(tmp_path, column, kind, message):
    table = golden_table(slice(0, 5))
    other = with_column(table, column, pa.nulls(5, kind))
    path = write(tmp_path / "a.parquet", other)
    with pytest.raises(DataError, match=rf"{path}, column '{column}': {message}"):
        read_events([path])
    write(path, table.drop_columns([column]))
    with pytest.raises(DataError, match=rf"{path} has no column '{column}'; it has "):
        read_events([path])


def test_damaged_files_are_named(tmp_path):
    path = write(tmp_path / "multi_event.parquet", golden_table())
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:100], b"", b"uid,item\n1,2\n" * 10):
        path.write_bytes(data)
        with pytest.raises(DataError, match=f"{path} is damaged or no Parquet file"):
            read_events([path])
    path.write_bytes(whole)
    offset = pq.read_metadata(path).row_group(2).column(2).data_page_offset
    path.write_bytes(whole[: offset + 30] + b"\xff" * 9 + whole[offset + 39 :])
    with pytest.raises(
        DataError, match=f"{path}, row group 2 from row 128 on, is damaged"
    ):
        read_events([path])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"must hold a file 'multi_event\*\.parquet'"):
        YambdaFiles.find(tmp_path)
    path = write(tmp_path / "multi_event.parquet", golden_table())
    with pytest.raises(DataError, match=f"must hold '{ARTIST_FILE}', or one of the 2"):
        YambdaFiles.find(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'b'} is not a file")):
        read_events([path, tmp_path / "b"])


def test_the_missing_library_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "multi_event.parquet", golden_table())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPyarrowError, match=r"tpu-embedding\[parquet\]"):
        read_events([path])


def test_maps_of_items(tmp_path):
    table = pa.table({"item_id": [4, 0, 4], "artist_id": [7, 8, 9]})
    path = write(tmp_path / "map.parquet", table, 2)
    # The last row of an item counts.
    assert read_item_map(path, "artist_id").tolist() == [8, 0, 0, 0, 9]
    write(path, table.slice(0, 0))
    assert read_item_map(path, "artist_id").tolist() == []
    with pytest.raises(DataError, match=f"{path} has no column 'album_id'; it has it"):
        read_item_map(path, "album_id")
    write(path, with_column(table, "item_id", pa.array([4, 0, -4])))
    with pytest.raises(DataError, match=f"{path}, row 2 .*'item_id'.* got -4"):
        read_item_map(path, "artist_id")
