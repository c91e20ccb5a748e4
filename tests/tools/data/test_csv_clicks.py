"""CSV files: kinds of columns, ids, numbers and labels, and errors."""

import collections
import dataclasses
import gzip
import re
import tracemalloc

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tpu_embedding.strings.string_ids import (
    load_vocabularies,
    save_vocabularies,
)
from tpu_embedding.tools.data import csv_text
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_schema import SHARED
from tpu_embedding.tools.train import CsvSource
from tpu_embedding.types import PADDING_ROW_ID

TEXT = """user, country,tags,price,age,row id,click
17,DE,a|b,1.5,30,r1,1
4,,,,31,r2,0
17,"DE, east",b,-2e1,,r3,0

4,FR,a||b,NA,30,r4,1
17,DE,b|c ,1.5,30,r5,true
4,FR,c,0,31,r6,0
"""
SOURCE = CsvSource(label="click", split="last", held_out=0.3)


def open_text(directory, text=TEXT, source=SOURCE, name="clicks.csv"):
    path = directory / name
    path.write_text(text)
    return source.open(path, batch_size=4, seed=0)


def in_file_order(data):
    """Returns the training samples as one batch, in the order of the file."""
    return data._reader.read(np.arange(data.num_train_samples))


def strings_of(data, name, ids):
    known = ("", "[UNK]", *data.vocabularies[name].tokens)
    return ["" if id_ == PADDING_ROW_ID else known[id_] for id_ in ids]


def test_columns_are_recognised(tmp_path):
    data = open_text(tmp_path)
    assert [line.split() for line in data.description.splitlines()[3:10]] == [
        ["user", "category", "2", "4", *"2 distinct integers".split()],
        ["country", "category", "3", "3", "texts"],
        ["tags", "list", "3", "4", "cells", "have", "'|'"],
        ["price", "number", "3", "-", "numbers"],
        ["age", "category", "2", "3", *"2 distinct integers".split()],
        ["row", "id", "ignored", "6", "-", *"no value occurs 2 times".split()],
        ["click", "label", "-", "-", "data.label"],
    ]
    first, second = data.description.splitlines()[:2]
    assert first == "clicks.csv: 6 rows, 1 of them held out"
    assert second == "predicts click = '1' (50.0% of the rows)"
    assert set(data.vocabulary_sizes) == {"user", "country", "tags", "age"}


def test_the_schema_encodes_the_rows_alike(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        f"{a % 9};{a / 7:.3f};2024-0{1 + a % 9}-1{a % 7} 0{a % 5}:00;x{b % 4}|x{b};{i}"
        for i, (a, b) in zip(
            [0, 1] * 100, rng.integers(0, 10**6, (200, 2)), strict=True
        )
    ]
    text = "\n".join(["user;price;day;tags;click", *rows]).replace(".", ",")
    batch = in_file_order(data := open_text(tmp_path, text))
    columns = zip(*(x.split(";") for x in text.split("\n")), strict=True)
    columns = {name: texts[: len(batch.labels)] for name, *texts in columns}
    features, dense = data.schema.encode(columns, data.vocabularies)
    assert set(data.vocabulary_sizes) == set(features) == set(batch.features)
    assert "day (hour)" in features and "price (bucket)" in features
    assert set(data.number_scales) == set(dense) == {"price", "day (days)"}
    jax.tree.map(np.testing.assert_array_equal, dense, dict(batch.dense))
    jax.tree.map(np.testing.assert_array_equal, features, dict(batch.features))


def test_many_columns_are_one_feature(tmp_path):
    names = [f"c{i}" for i in range(70)]
    rows = [
        ",".join([*(f"v{(i * j) % 7 or ''}" for j in range(70)), "a|b", str(i % 2)])
        for i in range(40)
    ]
    rows[3] = rows[3].replace("v,", ",")
    text = "\n".join([",".join([*names, "tags", "click"]), *rows])
    data = open_text(tmp_path, text)
    batch = in_file_order(data)
    assert set(batch.features) == {"tags", SHARED} == set(data.vocabulary_sizes)
    num_rows = len(batch.labels)
    assert batch.features[SHARED].shape == (num_rows, 70)
    assert data.sequence_lengths == {SHARED: 70}
    sizes = [data.vocabularies[name].vocabulary_size for name in names]
    assert data.vocabulary_sizes[SHARED] == sum(sizes)
    cells = dict(
        zip(names, zip(*(x.split(",") for x in rows), strict=True), strict=False)
    )
    for i, name in enumerate(names):
        ids = batch.features[SHARED][:, i]
        ids = np.where(ids == PADDING_ROW_ID, ids, ids - sum(sizes[:i]))
        wanted = data.vocabularies[name].ids(list(cells[name][:num_rows]))
        np.testing.assert_array_equal(ids, wanted)
    cells["tags"] = ("a|b",) * 40
    features, _ = data.schema.encode(cells, data.vocabularies)
    np.testing.assert_array_equal(features[SHARED][:num_rows], batch.features[SHARED])


KINDS = {
    "decimal point": ("number", ["1.5", "-.5", "+2."]),
    "exponent": ("number", ["1e-05", "0.5", "2E+3"]),
    "exponent alone": ("number", ["1e3", "2e5"]),
    "some without a point": ("number", ["3", "4.0", "NA", "?"]),
    "currency": ("number", ["$3", "$1,000.50"]),
    "decimal comma": ("number", ["3,5", "1.000,50"]),
    "infinity": ("number", ["1.5", "inf"]),
    "many integers": ("number", [str(i * i) for i in range(40)]),
    "ages": ("number", [str(17 + i * i % 71) for i in range(1000)]),
    "integers": ("category", ["3", "-4", "+5"]),
    "identifiers": ("category", [str(i * i % 409) for i in range(4000)]),
    "leading zeros": ("category", [f"{i:05}" for i in range(400, 500)]),
    "row numbers": ("ignored", [str(i) for i in range(30)]),
    "underscore": ("category", ["10_24", "1_0.5"]),
    "other digits": ("category", ["١.٥", "२.५"]),
    "versions": ("category", ["1.2.3", "1.3.4"]),
    "true and false": ("category", ["True", "False"]),
    "true among numbers": ("category", ["True", "1.5"]),
    "dates": ("date", ["2024-01-05", "2024-01-06", ""]),
    "times": ("date", ["2024-01-05T00:00:01Z", "2024-01-06 12:00"]),
    "American dates": ("date", ["1/2/2024", "12/31/2024"]),
    "European dates": ("date", ["1/2/2024", "31/12/2024"]),
    "integer dates": ("date", [f"202401{i}" for i in range(10, 31)]),
    "Unix times": ("date", [str(879372216 + 9999 * i) for i in range(40)]),
    "milliseconds": ("date", [str(1700000000000 + 10**7 * i) for i in range(40)]),
    "times of day": (
        "date",
        [f"{i * 7 // 60 % 24}{i * 7 % 60:02}" for i in range(200)],
    ),
    "decimal times of day": (
        "date",
        [f"{i * 7 // 60 % 24 * 100 + i * 7 % 60}.0" for i in range(200)] + ["", "2400"],
    ),
    "integers to 2,400": ("number", [str(i * 7 % 2400) for i in range(200)]),
    "dates and others": ("category", ["2024-01-05", "soon"]),
    "nothing": ("category", ["", "NA"]),
    "lists": ("list", ["1.5|2", "3.0"]),
}


@pytest.mark.parametrize(("kind", "cells"), KINDS.values(), ids=KINDS)
def test_the_kind_of_cells(kind, cells):
    assert SOURCE.columns_of({"price": cells})["price"].kind == kind


def test_names_and_other_columns_help_to_recognise():
    squares = [str(100_000 + i * i) for i in range(40)]
    cells = {"store_id": squares, "ItemID": squares, "sales": squares}
    cells |= {"a": ["1,234"], "time": ["1700000000", "1700000001"]}
    columns = SOURCE.columns_of(cells)
    kinds = ["category", "category", "number", "number", "date"]
    assert [column.kind for column in columns.values()] == kinds
    assert columns["a"].thousands == ","
    columns = SOURCE.columns_of({"a": ["1,234"], "b": ["1,2"]})
    assert columns["a"].decimal == ","


WARNINGS = {
    "rare strings": (lambda i: f"u{i if i % 3 else 0}", "67% of the values of 'x'"),
    "the label": (lambda i: "ny"[i % 2], "'x' alone predicts.*AUC 1.000"),
    "the label in numbers": (lambda i: f"{i % 2 - i / 1e4}", r"'x \(bucket\)' alone"),
}


@pytest.mark.parametrize(("cell", "warning"), WARNINGS.values(), ids=WARNINGS)
def test_warnings(tmp_path, cell, warning):
    rows = [f"{cell(i)},{'abc'[i % 3]},{i % 2}" for i in range(300)]
    data = open_text(tmp_path, "\n".join(["x,y,click", *rows]))
    (line,) = [x for x in data.description.split("\n") if "warning" in x]
    assert re.search(warning, line)


def test_words_of_numbers_in_columns_that_are_named(tmp_path):
    text = "a,b,click\nu,True,1\nu,false,0\nu,1e3,True\nu,2.50,FALSE\n"
    source = CsvSource(label="click", numbers=("b",), split="last", held_out=0.3)
    batch = in_file_order(open_text(tmp_path, text, source))
    assert batch.dense["b"].tolist() == [1, 0, 1000]
    assert batch.labels.tolist() == [1, 0, 1]


def test_white_space_counts_neither_in_training_nor_when_served(tmp_path):
    rows = [
        ("u0 ", "a | b"),
        ("u0", "a|b "),
        (" u1", " |a"),
        ("u1\t", "b"),
        ("  ", "c"),
    ]
    text = "".join(f'"{u}",{tags},{i % 2}\n' for i, (u, tags) in enumerate(rows * 2))
    source = CsvSource(label="click", lists=("tags",), min_count=1)
    data = open_text(tmp_path, f"user,tags,click\n{text}", source)
    assert sorted(data.vocabularies["user"].tokens) == ["u0", "u1"]
    assert sorted(data.vocabularies["tags"].tokens) == ["a", "b", "c"]
    save_vocabularies(tmp_path, data.vocabularies)  # As a run and an export do.
    served = load_vocabularies(tmp_path)
    batch, kept = in_file_order(data), np.flatnonzero(~source.is_held_out(10, 0))
    users = served["user"].ids([rows[i % 5][0] for i in kept])
    np.testing.assert_array_equal(users, batch.features["user"])
    tags = served["tags"].ids(
        te.RaggedIds.from_lists([rows[i % 5][1].split("|") for i in kept])
    )
    np.testing.assert_array_equal(tags.values, batch.features["tags"].values)


def many_rows(path, num_rows):
    """Writes a file of all kinds of columns."""
    rng = np.random.default_rng(0)
    columns = {
        "label": rng.integers(0, 2, num_rows),
        "user": rng.zipf(1.3, num_rows) % 5000,
        "row": rng.permutation(num_rows) + 10**8,
        "tags": [f"t{a}|t{b}" for a, b in rng.integers(0, 60, (num_rows, 2))],
        "price": [f"{x:.4f}" for x in rng.random(num_rows) * 1000],
    }
    lines = [
        ",".join(columns),
        *map(",".join, zip(*(map(str, c) for c in columns.values()), strict=True)),
    ]
    path.write_text("\n".join(lines))
    return columns


@pytest.mark.full
def test_a_cell_takes_24_bytes_at_most(tmp_path):
    num_rows = 120_000
    many_rows(tmp_path / "clicks.csv", num_rows)
    tracemalloc.start()
    data = CsvSource(label="label").open(tmp_path / "clicks.csv", batch_size=4, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A block of rows is whole in memory, and each string of a vocabulary is.
    fixed = 10_000 * 5 * 130 + 200 * sum(data.vocabulary_sizes.values())
    assert peak < 24 * 5 * num_rows + fixed


def test_rows_of_several_blocks(tmp_path, monkeypatch):
    columns = many_rows(tmp_path / "clicks.csv", 1000)
    named = dict(numbers=("row",), categories=("user",))
    source = CsvSource(label="label", split="last", min_count=1, **named)
    one = source.open(tmp_path / "clicks.csv", batch_size=4, seed=0)
    for size in (7, 999, 1000):
        monkeypatch.setattr(csv_text, "BLOCK_ROWS", size)
        several = source.open(tmp_path / "clicks.csv", batch_size=4, seed=0)
        assert several.description == one.description
        for name, vocabulary in one.vocabularies.items():
            assert several.vocabularies[name].tokens == vocabulary.tokens
        jax.tree.map(
            np.testing.assert_array_equal, in_file_order(several), in_file_order(one)
        )
    batch, rows = in_file_order(one), slice(0, 899)
    counted = collections.Counter(map(str, columns["user"][:900]))
    assert list(one.vocabularies["user"].tokens) == [
        x for x, _ in counted.most_common()
    ]
    users = strings_of(one, "user", batch.features["user"])
    assert users[rows] == list(map(str, columns["user"][rows]))
    assert batch.dense["row"][rows].tolist() == columns["row"][rows].tolist()
    tags = strings_of(one, "tags", batch.features["tags"].values)
    assert tags[:1798] == "|".join(columns["tags"][rows]).split("|")


LATE_CELLS = {
    "text": (lambda i: f"{i * i}" if i != 90 else "", "number"),
    "text among categories": (lambda i: f"{i % 3}" if i != 90 else "u", "category"),
    "text among numbers": (lambda i: f"{i % 45}" if i != 90 else "u", "category"),
    "decimal": (lambda i: f"{i * i}" if i != 90 else "1.5", "number"),
    "decimal comma": (lambda i: f"{i * i}" if i != 90 else "1,5", "number"),
    "list": (lambda i: f"u{i % 3}" if i != 90 else "u1|u2", "list"),
    "European date": (lambda i: f"{1 + i // 8}/2/2024", "date"),
    "codes": (lambda i: f"{i // 3}", "number"),
    "rows": (lambda i: f"{i}", "ignored"),
    "rows at first": (lambda i: f"{i % 97}", "number"),
    "empty at first": (lambda i: f"{i / 7}" if i > 50 else "", "number"),
}


@pytest.mark.parametrize(("cell", "kind"), LATE_CELLS.values(), ids=LATE_CELLS)
def test_kinds_do_not_depend_on_the_order_of_rows(tmp_path, monkeypatch, cell, kind):
    monkeypatch.setattr(csv_text, "BLOCK_ROWS", 20)
    rows = [f'"{cell(i)}",{"ab"[i % 2]},{i % 2}' for i in range(100)]
    orders = [rows, rows[50:] + rows[:50]] if kind != "ignored" else [rows]
    for ordered in orders:
        data = open_text(tmp_path, "\n".join(["x,y,click", *ordered]))
        assert data.schema.columns[0].kind == kind


def test_dates_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_text, "BLOCK_ROWS", 20)
    rows = [f"{1 + i // 8}/2/2024,{5 * i % 60},{i % 2}" for i in range(100)]
    source = dataclasses.replace(SOURCE, dates=("day", "minute"))
    text = "\n".join(["day,minute,click", *rows])
    data = open_text(tmp_path, text, source)
    formats = [column.date_format for column in data.schema.columns]
    assert formats == ["%d/%m/%Y", "HHMM"]
    with pytest.raises(DataError, match="line 92, column 'day'.*date.*'soon'"):
        open_text(tmp_path, text.replace("12/2/2024,30", "soon,30"), source)


def test_rows_become_ids_and_numbers(tmp_path):
    batch = in_file_order(data := open_text(tmp_path))
    users = strings_of(data, "user", batch.features["user"])
    assert users == ["17", "4", "17", "4", "17"]
    ages = strings_of(data, "age", batch.features["age"])
    assert ages == ["30", "[UNK]", "", "30", "30"]
    tags = batch.features["tags"]
    assert tags.row_splits.tolist() == [0, 2, 2, 3, 6, 8]
    named = strings_of(data, "tags", tags.values)
    assert named == ["a", "b", "b", "a", "", "b", "b", "[UNK]"]
    np.testing.assert_array_equal(batch.dense["price"], [1.5, np.nan, -20, np.nan, 1.5])
    assert batch.labels.tolist() == [1, 0, 0, 1, 1]
    logs = np.array([np.log(2.5), -np.log(21), np.log(2.5)])
    prices = np.array([1.5, -20, 1.5])
    scales = (logs.mean(), logs.std(), prices.mean(), prices.std())
    assert data.number_scales["price"] == pytest.approx(scales)
    (held_out,) = data.evaluation_batches()
    assert held_out.weights.tolist() == [1, 0, 0, 0]
    assert strings_of(data, "tags", held_out.features["tags"].values[:1]) == ["[UNK]"]


def test_kinds_by_choice(tmp_path):
    source = CsvSource(
        label="age",
        positive_from=30.5,
        numbers=("user",),
        categories=("price", "tags"),
        ignored=("row id", "click", "country"),
        min_count=1,
        separator=";",
    )
    text = TEXT.replace(",,r3", ",20,r3")
    data = open_text(tmp_path, text, source)
    assert set(data.vocabulary_sizes) == {"price", "tags"}
    assert set(data.number_scales) == {"user"}
    rows = data._reader, data._evaluation_reader
    labels = np.concatenate(
        [x.read(np.arange(x.block_bounds[-1])).labels for x in rows]
    )
    assert sorted(labels) == [0, 0, 0, 0, 1, 1]


def test_other_forms_of_the_file(tmp_path):
    wanted = in_file_order(open_text(tmp_path))
    tabs = TEXT.replace('"DE, east"', "east").replace(",", "\t")
    header, rows = TEXT.split("\n", 1)
    columns = ("user", "country", "tags", "price", "age", "row id", "click")
    named = CsvSource(label="click", split="last", held_out=0.3, column_names=columns)
    (tmp_path / "clicks.csv.gz").write_bytes(
        gzip.compress(b"\xef\xbb\xbf" + TEXT.encode())
    )
    blanks = "\n" + TEXT.replace(",NA,", ",NA ,")
    for data in (
        open_text(tmp_path, blanks, name="clicks.CSV"),
        open_text(tmp_path, tabs, name="clicks.tsv"),
        open_text(tmp_path, rows, named),
        SOURCE.open(tmp_path / "clicks.csv.gz", batch_size=4, seed=0),
    ):
        batch = in_file_order(data)
        np.testing.assert_array_equal(batch.features["user"], wanted.features["user"])
        np.testing.assert_array_equal(batch.dense["price"], wanted.dense["price"])


def test_a_column_without_a_name(tmp_path):
    data = open_text(tmp_path, TEXT.replace("user, ", ", "))
    assert list(data.vocabulary_sizes)[0] == "column 1"


def test_held_out_rows_are_random_and_repeatable(tmp_path):
    rows = "\n".join(f"{i % 9},{i % 2},{i}.5" for i in range(1000))
    text = f"user,label,number\n{rows}"
    source = CsvSource(label="label")
    data, again = (open_text(tmp_path, text, source) for _ in range(2))
    numbers = data._evaluation_reader.read(np.arange(50)).dense["number"]
    assert 70 < data.num_evaluation_samples < 130
    assert numbers.max() - numbers.min() > 200
    kept = again._evaluation_reader.read(np.arange(50)).dense["number"]
    np.testing.assert_array_equal(kept, numbers)
    trained = in_file_order(data).dense["number"]
    assert not set(trained) & set(numbers)
    assert data.train_batch(3).labels.tolist() == again.train_batch(3).labels.tolist()


WRONG = {
    "empty file": ("", {}, "must have rows"),
    "no rows": (TEXT.split("\n")[0], {}, "must have two different values"),
    "no label column": (TEXT, dict(label="y"), "no column 'y' for a label.*--label"),
    "no such column": (TEXT, dict(numbers=("cost",)), "no column 'cost' for a number"),
    "label is a rating": (
        TEXT.replace("r5,true", "r5,4"),
        dict(task="binary", classes=("0", "1"), positive="1"),
        "line 7, column 'click': a label must be one of .'0', '1'.*got '4'",
    ),
    "rating is a word": (
        TEXT.replace("r4,1", "r4,good"),
        dict(positive_from=1),
        "line 6, column 'click': a label must be a number.*got 'good'",
    ),
    "underscore in a number": (
        TEXT.replace("-2e1", "10_24"),
        dict(numbers=("price",)),
        "line 4, column 'price': a value must be a number.*got '10_24'",
    ),
    "cell above the limit": (
        TEXT.replace("b,-2e1", "x" * 131_073 + ",-2e1"),
        {},
        "clicks.csv, line 4: a field must have at most 131,072 characters",
    ),
    "open quote above the limit": (
        TEXT.replace("b,-2e1", '"b,-2e1') + "4,,,,31,r2,0\n" * 20_000,
        {},
        "clicks.csv, line 4: a field that begins with a quote",
    ),
    "ragged row": (TEXT.replace(",r2,0", ",r2"), {}, r"line 3.*7 fields.*got 6: .'4'"),
    "text among numbers": (
        TEXT,
        dict(numbers=("user", "country")),
        "line 2, column 'country': a value must be a number that fits.*got 'DE'.*"
        "data.categories=country",
    ),
    "number beyond float32": (
        TEXT.replace("-2e1", "-2e39"),
        dict(numbers=("price",)),
        "line 4, column 'price': a value must be a number that fits.*got '-2e39'",
    ),
    "open quote": (
        TEXT.replace("b,-2e1", '"b,-2e1'),
        {},
        "clicks.csv, line 4: a field that begins with a quote.*unexpected end of data",
    ),
    "quote that a later one closes": (
        TEXT.replace("4,,,,31", '4,"a,,,31').replace("4,FR,a||b", '4,FR,"a"'),
        {},
        "line 3: a field that begins with a quote.*expected after",
    ),
    "equal names": (TEXT.replace("age", "user"), {}, "must have different names"),
    "nothing repeats": (
        TEXT,
        dict(min_count=9),
        "category that occurs 9 times",
    ),
    "no UTF-8": (
        TEXT.replace("FR", "\udce9"),
        dict(encoding="utf-8"),
        "could not be read as a CSV file.*data.encoding",
    ),
}


@pytest.mark.parametrize(("text", "changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files(tmp_path, text, changes, message):
    (tmp_path / "clicks.csv").write_bytes(text.encode(errors="surrogateescape"))
    source = dataclasses.replace(SOURCE, **changes)
    with pytest.raises(DataError, match=message):
        source.open(tmp_path / "clicks.csv", batch_size=4, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(held_out=1.0), "held_out must be between 0 and 1, got 1.0"),
        (dict(separator=""), "separator must be at least one"),
        (dict(delimiter=""), "delimiter must be a text"),
        (dict(delimiter='"'), "delimiter must be a text without quotes"),
        (dict(encoding="utf-9"), "encoding must be the name of an encoding"),
        (dict(task="ranking"), "task must be"),
        (dict(numbers=("a",), lists=("a",)), "must name each column only once"),
        (dict(min_count=0), "min_count must be at least 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        CsvSource(label="click", **settings)


def test_missing_files_and_compilation(tmp_path):
    with pytest.raises(DataError, match="does not exist on this machine"):
        SOURCE.open(tmp_path / "other.csv", batch_size=4, seed=0)
    with pytest.raises(DataError, match="ParquetSource"):
        SOURCE.outline(batch_size=4, seed=0)
