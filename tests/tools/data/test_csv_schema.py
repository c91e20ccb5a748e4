"""Schemas of CSV files: numbers, dates, inputs of any rows, and damaged documents."""

import json

import numpy as np
import pytest

from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_numbers import numbers_of, seconds_of
from tpu_embedding.tools.data.csv_schema import Column, CsvSchema
from tpu_embedding.types import PADDING_ROW_ID

NAN, INF = np.nan, np.inf

NUMBERS = {
    "plain": (".", "", ["1", "-.5", "+2.", "1e-05", "2E+3"], [1, -0.5, 2, 1e-5, 2000]),
    "missing": (".", "", ["", "?", "NA", "-", "nan", "\\N"], [NAN] * 6),
    "infinite": (".", "", ["inf", "-Infinity", "+inf"], [INF, -INF, INF]),
    "currency": (".", "", ["$5", "-$5", "€ -5", "5 €", "12%"], [5, -5, -5, 5, 12]),
    "thousands": (".", ",", ["1,234.5", "12", "-$1,234,567"], [1234.5, 12, -1234567]),
    "decimal comma": (",", ".", ["1.234,5", "0,5", "7"], [1234.5, 0.5, 7]),
    "blanks": (".", " ", ["1 234.5", "12\u00a0345", "9"], [1234.5, 12345, 9]),
    "apostrophes": (".", "'", ["1'234.5", "9"], [1234.5, 9]),
    "words": (".", "", ["True", "false"], [1, 0]),
}


@pytest.mark.parametrize(
    ("decimal", "thousands", "cells", "wanted"), NUMBERS.values(), ids=NUMBERS
)
def test_numbers(decimal, thousands, cells, wanted):
    numbers, wrong = numbers_of(cells, decimal, thousands)
    assert wrong is None
    np.testing.assert_array_equal(numbers, wanted)


@pytest.mark.parametrize(
    "cell",
    ["1,23", "12,34", "0,123", ",123", "10_24", "١.٥", "1e39", "x", "1.2.3", "%", "+"],
)
def test_texts_that_are_not_numbers(cell):
    assert numbers_of(["1", cell, "y"], ".", ",")[1] == 1


DATES = {
    "day": ("ISO 8601", "2024-02-29", 1709164800),
    "time": ("ISO 8601", "2024-02-29 01:00:01.5", 1709164800 + 3601.5),
    "offset": ("ISO 8601", "2024-02-29T01:00:00-08:00", 1709164800 + 3600),
    "point": ("%d.%m.%Y", "29.2.2024", 1709164800),
    "American": ("%m/%d/%Y %I:%M %p", "2/29/2024 1:00 PM", 1709164800 + 13 * 3600),
    "month": ("%d-%b-%y", "29-Feb-24", 1709164800),
    "seconds": ("Unix seconds", "1709164800", 1709164800),
    "milliseconds": ("Unix milliseconds", "1709164800500", 1709164800.5),
    "time of day": ("HHMM", "1730.0", 17.5 * 3600),
    "midnight": ("HHMM", "5", 300),
    "missing": ("ISO 8601", "NaT", NAN),
}


@pytest.mark.parametrize(("text_format", "cell", "seconds"), DATES.values(), ids=DATES)
def test_dates(text_format, cell, seconds):
    values, wrong = seconds_of([cell], text_format)
    assert wrong is None
    np.testing.assert_array_equal(values, [seconds])


@pytest.mark.parametrize("cell", ["2024-02-30", "20240229", "2024-W01-1", "2024", "x"])
def test_texts_that_are_not_dates(cell):
    assert seconds_of(["2024-02-28", cell], "ISO 8601")[1] == 1


SCHEMA = CsvSchema(
    (
        Column(name="user", kind="category", because="texts"),
        Column(name="tags", kind="list"),
        Column(name="price", kind="number", thousands=",", edges=(0.0, 10.5)),
        Column(
            name="day",
            kind="date",
            date_format="ISO 8601",
            newest=1709164800.0,
            parts=("weekday", "hour"),
        ),
        Column(name="row", kind="ignored"),
    )
)
VOCABULARIES = {
    name: Vocabulary(tokens, mask_token="", strip_whitespace=True)
    for name, tokens in {"user": ["u", "v"], "tags": ["a", "b"]}.items()
}
CELLS = {
    "user": ["v", " u ", "new", ""],
    "tags": ["a|b", "", "b| new", "|"],
    "price": ["$1,000", "-3", "inf", "?"],
    "day": ["2024-02-28", "2024-03-01 23:00", "", "2024-02-29"],
    "other": ["1", "2", "3", "4"],
}


def test_rows_become_inputs():
    schema = CsvSchema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert schema == SCHEMA
    features, dense = schema.encode(CELLS, VOCABULARIES)
    none = PADDING_ROW_ID
    tags = features.pop("tags")
    assert tags.row_splits.tolist() == [0, 2, 2, 4, 6]
    assert tags.values.tolist() == [2, 3, 3, 1, none, none]
    assert {name: ids.tolist() for name, ids in features.items()} == {
        "user": [3, 2, 1, none],
        "price (bucket)": [2, 0, 2, none],
        "day (weekday)": [2, 4, none, 3],  # Wednesday, Friday, Thursday.
        "day (hour)": [0, 23, none, 0],
    }
    assert all(ids.dtype == np.int32 for ids in features.values())
    np.testing.assert_array_equal(dense["price"], [1000, -3, NAN, NAN])
    np.testing.assert_allclose(dense["day (days)"], [1, -1 - 23 / 24, NAN, 0])
    sizes = schema.feature_sizes(VOCABULARIES)
    assert sizes == {
        "user": 4,
        "tags": 4,
        "price (bucket)": 3,
        "day (weekday)": 7,
        "day (hour)": 24,
    }
    assert schema.number_names == tuple(dense)


def test_a_row_without_a_list():
    cells = {name: texts[1:2] for name, texts in CELLS.items()}
    features, dense = SCHEMA.encode(cells, VOCABULARIES)
    assert len(features["user"]) == len(dense["price"]) == 1
    assert features["tags"].row_splits.tolist() == [0, 0]


def test_rows_that_lack_columns_or_have_other_cells():
    cells = {name: CELLS[name] for name in ("user", "day")}
    with pytest.raises(DataError, match=r"columns \['tags', 'price'\]"):
        SCHEMA.encode(cells, VOCABULARIES)
    with pytest.raises(DataError, match="Row 1.*'price'.*number.*'x'"):
        SCHEMA.encode(CELLS | {"price": ["1", "x", "", ""]}, VOCABULARIES)
    with pytest.raises(DataError, match="Row 3.*'day'.*date.*'1/2/24'"):
        SCHEMA.encode(CELLS | {"day": ["", "", "", "1/2/24"]}, VOCABULARIES)


DAMAGED = {
    "no dict": (None, "'columns'"),
    "no list": ({"columns": {}}, "'columns'"),
    "a text": ({"columns": ["x"]}, "Column must be"),
    "no kind": ({"columns": [{"name": "x"}]}, "Column must be"),
    "unknown": ({"columns": [{"name": "x", "kind": "list", "y": 1}]}, "'y'"),
}
FIELDS = {
    "kind": ["label", ["number"]],
    "name": [1, None],
    "because": [1],
    "separator": ["", 1],
    "decimal": ["x", 1],
    "thousands": [".", "x"],
    "date_format": ["%s", ""],
    "newest": [NAN, 1, True, "1"],
    "parts": [["year"], "hour", [[]]],
    "edges": [[1.0, 1.0], [1], [NAN], [True], ["x"], [float(i) for i in range(9999)]],
}


@pytest.mark.parametrize(("document", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_documents(document, message):
    with pytest.raises(ValueError, match=message):
        CsvSchema.from_json(document)


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name in FIELDS for value in FIELDS[name]]
)
def test_damaged_fields(field, value):
    column = {"name": "x", "kind": "date", "date_format": "ISO 8601"} | {field: value}
    with pytest.raises(ValueError, match=rf"Column\.({field}|thousands) must be"):
        CsvSchema.from_json({"columns": [column]})


def test_equal_names():
    columns = [Column(name="x", kind="number"), Column(name="x (bucket)", kind="list")]
    with pytest.raises(ValueError, match=r"'x \(bucket\)' twice"):
        CsvSchema(tuple(columns))
