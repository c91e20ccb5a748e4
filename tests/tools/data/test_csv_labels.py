"""Labels of CSV files: tasks, positive values, classes, and wrong labels."""

import dataclasses
import pathlib

import numpy as np
import pytest

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_labels import LabelColumn, describe_labels
from tpu_embedding.tools.data.csv_text import CsvBlock
from tpu_embedding.tools.train import CsvSource

NAN = float("nan")


def column_of(cells, path=pathlib.Path("f.csv")):
    column = LabelColumn(path, "y")
    for start in range(0, len(cells), 5):  # Several blocks.
        some = cells[start : start + 5]
        lines = range(2 + start, 2 + start + len(some))
        column.add(CsvBlock(path, lines, {"y": list(some)}))
    return column


def resolved(cells, **settings):
    column = column_of(cells)
    source = CsvSource(label="y", **settings)
    source = dataclasses.replace(source, **column.fields(source))
    labels = column.labels(source)
    if source.task == "binary":
        column.check_both(labels)
    return source, labels


BINARY = {
    "numbers": (["0", "1", "1"], {}, "1", [0, 1, 1]),
    "floats": (["0.0", "1.0", "0"], {}, "1.0", [0, 1, 0]),
    "one and two": (["1", "2", "2"], {}, "2", [0, 1, 1]),
    "minus one": (["-1", "1", "1"], {}, "1", [0, 1, 1]),
    "fractions": (["0.5", "-.5", "0.50"], {}, "0.5", [1, 0, 1]),
    "words": (["yes", "no", "yes"], {}, "yes", [1, 0, 1]),
    "letters": (["N", "Y", "Y"], {}, "Y", [0, 1, 1]),
    "capitals": (["True", "false", "TRUE"], {}, "True", [1, 0, 1]),
    "words and numbers": (["true", "0", "1", "FALSE"], {}, "1", [1, 0, 1, 0]),
    "income": (["<=50K", ">50K", ">50K"], {}, ">50K", [0, 1, 1]),
    "the rarer text": (["male", "female", "male"], {}, "female", [0, 1, 0]),
    "the choice": (
        ["male", "female", "male"],
        dict(positive="male"),
        "male",
        [1, 0, 1],
    ),
    "a number's spelling": (["1", "2", "1"], dict(positive="1.0"), "1.0", [1, 0, 1]),
    "one of three": (["a", "b", "c"], dict(positive="b"), "b", [0, 1, 0]),
    "missing ones": (["yes", "", "no", "NA"], {}, "yes", [1, NAN, 0, NAN]),
    "threshold": (["3", "4.5", "", "1"], dict(positive_from=3), None, [1, 1, NAN, 0]),
}


@pytest.mark.parametrize("case", BINARY)
def test_two_values(case):
    cells, settings, positive, wanted = BINARY[case]
    source, labels = resolved(cells, **settings)
    assert (source.task, source.positive) == ("binary", positive)
    assert labels.dtype == np.float32
    np.testing.assert_array_equal(labels, wanted)
    # A recorded source gives the same labels without a look at all values.
    np.testing.assert_array_equal(column_of(cells).labels(source), wanted)
    np.testing.assert_array_equal(resolved(cells[::-1], **settings)[1], wanted[::-1])


OTHERS = {
    "texts": (["b", "a", "c", "a"], {}, ("a", "b", "c"), [1, 0, 2, 0]),
    "integers": (["10", "9", "2.0", "9"], {}, ("2.0", "9", "10"), [2, 1, 0, 1]),
    "missing": (["b", "a", "", "c"], {}, ("a", "b", "c"), [1, 0, NAN, 2]),
    "numbers by choice": (
        ["0.5", "1.5", "2.5"],
        dict(task="classes"),
        ("0.5", "1.5", "2.5"),
        [0, 1, 2],
    ),
    "fractions": (["0.5", "1", "2", "-1e3"], {}, (), [0.5, 1, 2, -1000]),
    "prices": (["0.5", "NA", "2", "2.5"], {}, (), [0.5, NAN, 2, 2.5]),
    "many integers": (list(map(str, range(21))), {}, (), range(21)),
    "integers by choice": (["1", "2", "5"], dict(task="regression"), (), [1, 2, 5]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_classes_and_numbers(case):
    cells, settings, classes, wanted = OTHERS[case]
    source, labels = resolved(cells, **settings)
    assert source.task == ("classes" if classes else "regression")
    assert (source.positive, source.classes) == (None, classes)
    np.testing.assert_array_equal(labels, wanted)


def test_what_is_predicted_is_told():
    labels = np.array([0, 1, 1, 2], np.float32)
    source = CsvSource(label="y", task="classes", classes=("a", "b", "c"))
    text = describe_labels(source, labels)
    assert text == "3 classes of y: 'a' 25.0%, 'b' 50.0%, 'c' 25.0%"
    source = CsvSource(label="y", task="regression")
    assert describe_labels(source, labels).startswith("regression: y from 0 to 2")
    source = CsvSource(label="y", task="binary", positive=">50K")
    text = describe_labels(source, labels > 1)
    assert text == "predicts y = '>50K' (25.0% of the rows)"


NUMBERS = list(map(str, range(100)))
KNOWN = dict(task="classes", classes=("a", "b", "c"))
WRONG = {
    "one value": (["1", "1"], {}, "'y'.*two different values, got .'1'"),
    "nothing": (["", "NA"], {}, "two different values, got .."),
    "no such value": (["a", "b"], dict(positive="c"), "value 'c', got .'a', 'b'"),
    "a text": ([*NUMBERS, "x1"], {}, "line 102, column 'y'.*number.*'x1'.*task"),
    "a word": (["1", "2.5", "x"], dict(task="regression"), "line 4.*number.*'x'"),
    "many texts": ([f"u{i}" for i in range(1001)], {}, "at most 1,000 classes, got"),
    "many numbers": (
        list(map(str, range(1001))),
        dict(task="classes"),
        "at most 1,000 classes, got 1,001",
    ),
    "three for two": (["a", "b", "c"], dict(task="binary"), "two label values, got 3"),
    "a new class": (["a", "d"], KNOWN, "line 3, column 'y'.*one of .'a'.*'d'"),
    "no number": (["3", "b"], dict(positive_from=3), "line 3.*a number.*'b'"),
    "all positive": (["3", "4"], dict(positive_from=3), "2 rows.*both 0 and 1"),
    "huge": (["1e30", "1.5", "7"], {}, "line 2.*at most 1e18.*'1e30'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_labels(case):
    cells, settings, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        resolved(cells, **settings)


def test_rows_without_a_label_are_dropped_and_counted(tmp_path):
    rows = [f"{'ab'[i % 2]},{'' if i % 5 == 3 else i + 0.5}" for i in range(40)]
    (tmp_path / "f.csv").write_text("a,y\n" + "\n".join([*rows, "a,", "b,NA"]))
    source = CsvSource(label="y", split="last", held_out=0.25)
    data = source.open(tmp_path / "f.csv", batch_size=4, seed=0)
    assert "f.csv: 32 rows, 8 of them held out" in data.description
    assert "dropped 10 rows without a label" in data.description
    kept = np.array([i + 0.5 for i in range(40) if i % 5 != 3])
    trained = data._reader.read(np.arange(data.num_train_samples))
    np.testing.assert_array_equal(trained.labels, kept[:24])
    assert data.label_scale == pytest.approx((kept[:24].mean(), kept[:24].std()))
    wanted = np.sqrt(np.mean((kept[24:] - kept[:24].mean()) ** 2))
    assert data.constant_loss() == pytest.approx(wanted)


def test_the_constant_loss_of_classes(tmp_path):
    rows = ["1,a", "2,b", "1,c", "2,a", "1,a", "2,b"]
    (tmp_path / "f.csv").write_text("x,y\n" + "\n".join(rows))
    source = CsvSource(label="y", split="last", held_out=0.4)
    data = source.open(tmp_path / "f.csv", batch_size=2, seed=0)
    assert data.num_classes == 3
    assert data.constant_loss() == pytest.approx(-np.log([0.5, 0.25]).mean())
