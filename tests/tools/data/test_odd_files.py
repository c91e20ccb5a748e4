"""Odd and malformed CSV files: the right rows, or an error with its place and fix."""

import gzip

import numpy as np
import pytest

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_text import read_blocks
from tpu_embedding.tools.train import CsvSource

HEAD, ROWS = "user,city,y\n", "u1,Köln,yes\nu2,Rom,no\nu1,Rom,yes\nu2,Köln,no\n"
TEXT = HEAD + ROWS
ASCII = TEXT.replace("ö", "oe")
NAMES = dict(column_names=("user", "city", "y"))


def joined(delimiter):
    return TEXT.replace(",", delimiter).encode()


RIGHT = {
    "plain": (TEXT.encode(), {}),
    "no last line break": (TEXT.strip().encode(), {}),
    "Windows' line breaks": (TEXT.replace("\n", "\r\n").encode(), {}),
    "old line breaks": (TEXT.replace("\n", "\r").encode(), {}),
    "blank lines": (TEXT.replace("\n", "\n\n").encode(), {}),
    "byte order mark": (TEXT.encode("utf-8-sig"), {}),
    "cp1252": (TEXT.encode("cp1252"), {}),
    "Latin-1 by name": (TEXT.encode("latin-1"), dict(encoding="latin-1")),
    "UTF-16": (TEXT.encode("utf-16"), {}),
    "UTF-16 without a mark": (TEXT.encode("utf-16-le"), {}),
    "big-endian UTF-16": (TEXT.encode("utf-16-be"), {}),
    "tabs": (joined("\t"), {}),
    "semicolons": (joined(";"), {}),
    "pipes": (joined("|"), {}),
    "double colons": (joined("::"), {}),
    "three characters": (joined("%#%"), dict(delimiter="%#%")),
    "blanks": (joined("  "), {}),
    "aligned blanks": (joined(" \t "), {}),
    "blanks by name": (joined(" "), dict(delimiter=" ")),
    "quotes": (TEXT.replace("Rom", '"Rom"').encode(), {}),
    "no header": (ROWS.encode(), NAMES),
    "double colons without a header": (ROWS.replace(",", "::").encode(), NAMES),
    "gzip": (gzip.compress(TEXT.encode()), {}),
    "blanks around cells": (TEXT.replace(",", " , ").encode(), {}),
    "a label is missing": (TEXT.encode() + b"u9,Rom,\n", {}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_rows(tmp_path, case):
    content, settings = RIGHT[case]
    path = tmp_path / ("f.data.gz" if case == "gzip" else "f.data")
    path.write_bytes(content)
    assert cells_of(path, **settings) == [
        ("u1", "Köln", 1), ("u2", "Rom", 0), ("u1", "Rom", 1), ("u2", "Köln", 0)
    ]  # fmt: skip


def cells_of(path, **settings):
    """Returns user, city and label of the rows of a file."""
    source = CsvSource(label="y", split="last", min_count=1, held_out=0.25, **settings)
    data = source.open(path, batch_size=2, seed=0)
    (held_out, *_) = data.evaluation_batches()
    trained = data._reader.read(np.arange(data.num_train_samples))
    rows = []
    for batch in (trained, held_out):
        names = []
        for name in ("user", "city"):
            tokens = ("", "[UNK]", *data.vocabularies[name].tokens)
            names.append([tokens[i] for i in np.asarray(batch.features[name])])
        rows += list(zip(*names, batch.labels.tolist(), strict=True))
    # A held-out string that training lacks is unknown.
    return [(u, c, y) for u, c, y in rows[: data.num_train_samples + 1]]


QUOTED = {
    "a line break": ('"Ko\nln"', "Ko\nln"),
    "Windows' line break": ('"Ko\r\nln"', "Ko\r\nln"),
    "a quote": ('"a ""b"" c"', 'a "b" c'),
    "a comma": ('"a,b"', "a,b"),
    "a text of digits": ('"007"', "007"),
}


@pytest.mark.parametrize("case", QUOTED)
def test_quoted_cells(tmp_path, case):
    written, wanted = QUOTED[case]
    (tmp_path / "f.txt").write_bytes(ASCII.replace("Koeln", written).encode())
    cities = [city for _, city, _ in cells_of(tmp_path / "f.txt")]
    assert cities == [wanted, "Rom", "Rom", wanted]


def test_a_quoted_delimiter_of_two_characters(tmp_path):
    text = ASCII.replace("Koeln", '"a,b"').replace('"a,b"', "X").replace(",", "::")
    (tmp_path / "f.dat").write_text(text.replace("X", '"a::b"'))
    assert cells_of(tmp_path / "f.dat")[0] == ("u1", "a::b", 1)


@pytest.mark.parametrize(
    ("city", "other"),
    [
        ('"Rom', 'Rom"'),
        ('"Rom', '""Rom"'),
        ('"Rom, Via A, 1\nLazio"', "Bonn"),  # It cannot be told apart.
    ],
)
def test_rows_that_an_open_quote_joins_are_told(tmp_path, city, other):
    path = tmp_path / "f.csv"
    path.write_text(f"user,city,y\nu1,{city},yes\nu3,Bonn,no\nu4,{other},no\n")
    with pytest.warns(UserWarning, match="f.csv, line 2: a quoted cell.*close"):
        list(read_blocks(path, ",", ()))


def test_other_cells_of_several_lines_are_not_told(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text('user,city,y\nu,"Rom\nLazio",1\nu,"Rom, Via A, 1\nEU",0\n')
    (block,) = read_blocks(path, ",", ())
    assert block.cells["city"] == ["Rom\nLazio", "Rom, Via A, 1\nEU"]


WRONG = {
    "empty": (b"", {}, "must have rows"),
    "blank": (b"\n \n", {}, "must have rows"),
    "header only": (HEAD.encode(), {}, "'y'.*two different values.*rows"),
    "a zip archive": (b"PK\x03\x04" + b"\0" * 30, {}, "Excel.*save the sheet as CSV"),
    "gzip without its name": (gzip.compress(b"a"), {}, "gzip.*end with .gz"),
    "Parquet": (b"PAR1\0\0", {}, "Parquet file.*ParquetSource"),
    "a short row": (ASCII.replace("u2,Rom,no", "u2,no"), {}, "line 3.*3 fields.*got 2"),
    "a long row": (
        ASCII.replace("Rom,no", "R,o,no"),
        {},
        "line 3.*got 4.*Quote fields",
    ),
    "a short row after two lines": (
        ASCII.replace("Koeln,y", '"K\nn",y').replace("u1,Rom", "u1"),
        {},
        "line 5.*got 2",
    ),
    "other names": (ASCII, dict(column_names=("a", "y")), "line 1.*2 fields.*names"),
    "an open quote": (ASCII.replace("u1,Rom", 'u1,"Rom'), {}, "line 4.*close it"),
    "a quote that reopens": (
        ASCII.replace("Koeln", '"K').replace("u2,Rom", 'u2,Rom"'),
        {},
        "line 5: a field that begins with a quote.*close it",
    ),
    "text after a quote": (ASCII.replace("u2,Rom", 'u2,"R"om'), {}, "line 3.*double"),
    "equal names": (b"y,y\n1,2\n", {}, "different names, got 'y' twice. Rename"),
    "no label column": (b"a,b\n1,2\n", {}, "no column 'y'.*--label"),
    "wrong delimiter": (ASCII, dict(delimiter="::"), "no column 'y'"),
    "wrong encoding": (TEXT.encode("cp1252"), dict(encoding="utf-8"), "data.encoding"),
    "one label": (ASCII.replace("no", "yes"), {}, "'y'.*two different.*name another"),
    "no label": (b"a,y\n1,\n2,\n", {}, "'y'.*two different values"),
    "a text among numbers": (
        ASCII.replace("yes", "1.5") + "u,v,x\n",
        dict(task="regression"),
        "line 3, column 'y'.*number.*got 'no'; correct it",
    ),
    "one row": (b"a,y\n1,1\n", {}, "'y'.*two different values"),
    "nothing repeats": (b"a,y\n1,1\n2,0\n3,1\n4,0\n", dict(min_count=2), "min_count"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_error(tmp_path, case):
    content, settings, message = WRONG[case]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "f.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        CsvSource(label="y", split="last", held_out=0.3, **settings).open(
            tmp_path / "f.csv", batch_size=2, seed=0
        )
    assert "\n" not in str(error.value).replace("\\n", "")


def test_a_detected_encoding_is_told(tmp_path):
    (tmp_path / "f.csv").write_bytes(TEXT.encode("cp1252"))
    source = CsvSource(label="y", min_count=1, held_out=0.4)
    data = source.open(tmp_path / "f.csv", batch_size=2, seed=0)
    assert "read as cp1252; data.encoding" in data.description
