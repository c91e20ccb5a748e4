"""Tests the reader of Criteo's logs against a plain parser."""

import gzip
import itertools
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from tpu_embedding.tools.data import block_order, criteo_lines, criteo_parser
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.data.criteo_lines import find_logs
from tpu_embedding.tools.data.pyarrow_modules import MissingPyarrowError

ZEROS = ["0"] * 13
CATEGORY = ["68fd1e64"] * 26


@pytest.fixture
def small_groups(monkeypatch):
    """Parses three lines at a time, so that a batch has several groups."""
    monkeypatch.setattr(criteo_lines, "PARSED_LINES", 3)


def make_line(label="0", integers=ZEROS, categories=CATEGORY):
    return "\t".join([label, *integers, *categories])


def replaced(field, text):
    """Returns a valid line with one field replaced; `field` counts from 1."""
    fields = make_line().split("\t")
    fields[field - 1] = text
    return "\t".join(fields)


def numbered_lines(count):
    """Returns lines whose first integer is their number."""
    return [make_line(integers=[str(n), *ZEROS[1:]]) for n in range(count)]


def line_numbers(batch):
    return np.rint(np.expm1(batch.dense[:, 0])).astype(int).tolist()


def write(path, lines, end="\n", last="\n"):
    path.write_bytes((end.join(lines) + last).encode("latin-1"))
    return path


def read(path, **changes):
    arguments = {"batch_size": 4, "vocabulary_sizes": 1000, "block_size": 3}
    arguments |= {"num_evaluation_samples": 2}
    return Criteo(path, **(arguments | changes))


def python_row_id(feature, text, vocabulary_size):
    """Returns the row id of `row_ids_of_categories`, by Python's integers."""
    if not text:
        return 0
    mask = 2**64 - 1
    key = ((feature + 1) * 2**32 + int(text, 16) + 0x9E3779B97F4A7C15) & mask
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & mask
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & mask
    return 1 + (key ^ (key >> 31)) % (vocabulary_size - 1)


NASTY = [
    make_line("1", ["5", "-1", "", "0", "-3", "999999999999999999", *ZEROS[6:]]),
    make_line("0", [""] * 13, [""] * 26),
    make_line("1", ["007", "-0", "-999999999999999999", *[""] * 10], ["ffffffff"] * 26),
    make_line("0", ZEROS, ["", "0", "00000000", "ABCDEF01", "abcdef01", *CATEGORY[5:]]),
    make_line("1", ZEROS, [*CATEGORY[:25], ""]),
    make_line(
        "0", ["1", *ZEROS[1:]], [f"{n * 0x9E3779B1 % 2**32:x}" for n in range(26)]
    ),
]


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("last", ["newline", "nothing"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("block_size", [1, 2, 64])
def test_values_match_a_plain_parser(tmp_path, end, last, block_size):
    path = write(tmp_path / "train.txt", NASTY, end, end if last == "newline" else "")
    sizes = [2 + 10 * n for n in range(26)]
    data = read(
        path,
        evaluation_path=path,
        num_evaluation_samples=None,
        batch_size=len(NASTY),
        vocabulary_sizes=sizes,
        block_size=block_size,
    )
    (batch,) = data.evaluation_batches()
    assert list(batch.features) == list(CATEGORY_NAMES) == list(data.vocabulary_sizes)
    assert batch.dense.shape == (6, 13) and batch.dense.dtype == np.float32
    assert batch.labels.dtype == batch.weights.dtype == np.float32
    assert {ids.dtype for ids in batch.features.values()} == {np.dtype(np.int32)}
    for row, line in enumerate(NASTY):
        label, *rest = line.split("\t")
        assert batch.labels[row] == float(label)
        dense = [math.log1p(max(int(text or "0"), 0)) for text in rest[:13]]
        np.testing.assert_array_equal(batch.dense[row], np.float32(dense))
        assert [ids[row] for ids in batch.features.values()] == [
            python_row_id(feature, text, sizes[feature])
            for feature, text in enumerate(rest[13:])
        ]


def test_hash_is_stable(tmp_path):
    # Literal values, because a change of the hash would invalidate saved checkpoints.
    path = write(tmp_path / "train.txt", [make_line()] * 3)
    batch = next(read(path, vocabulary_sizes=1_000_000).evaluation_batches())
    assert [int(batch.features[name][0]) for name in CATEGORY_NAMES[:3]] == [
        225294,
        712433,
        613582,
    ]


@pytest.mark.parametrize("length", [1, 3, 8])
def test_every_byte_in_every_place_of_a_category(tmp_path, length):
    digits = b"0123456789abcdefABCDEF"
    path = tmp_path / "day_0"
    for byte in range(256):
        if byte in b"\t\n":
            continue
        texts = [
            b"7" * place + bytes([byte]) + b"a" * (length - 1 - place)
            for place in range(length)
        ]
        line = make_line(categories=[""] * 25 + ["{}"]).encode()
        text = b"".join(line.replace(b"{}", each) + b"\n" for each in texts)
        numbers, sizes = np.arange(length) + 1, np.full(26, 1000)
        # A carriage return before the newline belongs to the end of the line.
        if byte in digits or (byte == ord("\r") and length == 1):
            row_ids = criteo_parser.parse_lines(text, numbers, path, sizes).row_ids
            assert row_ids[25].tolist() == [
                python_row_id(25, each.decode().strip(), 1000) for each in texts
            ]
            continue
        with pytest.raises(DataError, match=r"line 1: field 40 \(cat_25\)"):
            criteo_parser.parse_lines(text, numbers, path, sizes)


def test_damage_that_pyarrow_reads(tmp_path):
    text = {"bom": "\ufeff" + make_line(), "hex": replaced(4, "0x12")}
    for line in text.values():
        (tmp_path / "day_0").write_text(line + "\n" + make_line() + "\n")
        with pytest.raises(DataError, match=r"day_0, line 1: field [14] "):
            read(tmp_path / "day_0", num_evaluation_samples=1)


def test_the_missing_library_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "day_0", [make_line()] * 5)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    with pytest.raises(
        MissingPyarrowError, match=r"Criteo's logs need .*tpu-embedding\[parquet\]"
    ):
        read(path)


DAMAGED = {
    "label": (replaced(1, "2"), r"field 1 \(the label\) must be 0 or 1, got '2'"),
    "label_empty": (replaced(1, ""), r"field 1 .* got ''"),
    "label_long": (replaced(1, "01"), r"field 1 .* got '01'"),
    "label_sign": (replaced(1, "-"), r"field 1 .* got '-'"),
    "integer": (replaced(2, "1.5"), r"field 2 \(integer 1 of 13\).* got '1\.5'"),
    "integer_last": (replaced(14, "x"), r"field 14 \(integer 13 of 13\).* got 'x'"),
    "integer_minus": (replaced(4, "-"), r"field 4 .* got '-'"),
    "integer_minus_minus": (replaced(4, "--1"), r"field 4 .* got '--1'"),
    "integer_plus": (replaced(4, "+1"), r"field 4 .* got '\+1'"),
    "integer_space": (replaced(4, " 1"), r"field 4 .* got ' 1'"),
    "integer_colon": (replaced(4, "1:"), r"field 4 .* got '1:'"),  # "9" + 1
    "integer_slash": (replaced(4, "/"), r"field 4 .* got '/'"),  # "0" - 1
    "integer_long": (replaced(5, "1" * 19), r"field 5 .*18 digits"),
    "integer_very_long": (replaced(5, "1" * 99), r"field 5 .* got '1{40}'\.\.\."),
    "hex": (replaced(15, "0000000g"), r"field 15 \(cat_00\).* got '0000000g'"),
    "hex_last": (replaced(40, "68fd 1e6"), r"field 40 \(cat_25\).* got '68fd 1e6'"),
    "hex_long": (replaced(20, "123456789"), r"field 20 .*8 hex .* got '123456789'"),
    "hex_sign": (replaced(20, "-1"), r"field 20 .* got '-1'"),
    "hex_prefix": (replaced(20, "0x12"), r"field 20 .* got '0x12'"),
    "return_inside": (replaced(20, "12\r"), r"field 20 .* got '12\\r'"),
    "null_byte": (replaced(20, "\0"), r"field 20 .* got '\\x00'"),
    "utf8_category": (replaced(16, "\xff\xfe"), r"field 16 .* got '\\xff\\xfe'"),
    "utf8_integer": (replaced(3, "\xc3"), r"field 3 .* got '\\xc3'"),
    "utf8_label": (replaced(1, "\xb1"), r"field 1 .* got '\\xb1'"),
    "too_few": ("1\t2\t3", r"expected 40 fields between tabs, got 3: '1\\t2\\t3'"),
    "too_many": (make_line() + "\t", "expected 40 fields between tabs, got 41"),
    "no_label": (make_line()[2:], r"got 39: .*Kaggle's test\.txt has no labels"),
    "blank": ("", "expected 40 fields between tabs, got 1: ''"),
    "first_of_two": (replaced(3, "a").replace("68fd1e64", "?"), r"field 3 .* got 'a'"),
}


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("place", [0, 4, 7, 9])
@pytest.mark.parametrize(("line", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_lines_are_named(tmp_path, line, message, place):
    lines = [make_line()] * 10
    lines[place] = line
    path = write(tmp_path / "day_0", lines)
    with pytest.raises(DataError, match=rf"day_0, line {place + 1}: .*{message}"):
        data = read(path)
        for step in range(2):  # The 8 training lines.
            data.train_batch(step)
        list(data.evaluation_batches())


def test_damaged_evaluation_file_is_named(tmp_path):
    train = write(tmp_path / "day_0", numbered_lines(3))
    evaluation = write(tmp_path / "day_1", [*numbered_lines(4), replaced(1, "?")])
    data = read(train, evaluation_path=evaluation, num_evaluation_samples=None)
    data.train_batch(0)
    with pytest.raises(DataError, match=r"day_1, line 5: field 1"):
        list(data.evaluation_batches())


@pytest.mark.parametrize("batch_size", [1, 4, 10, 23, 50])
@pytest.mark.parametrize("block_size", [1, 3, 10, 64])
def test_every_line_once_per_epoch(tmp_path, batch_size, block_size):
    path = write(tmp_path / "train.txt", numbered_lines(25))
    data = read(path, batch_size=batch_size, block_size=block_size)
    assert (data.num_train_samples, data.num_evaluation_samples) == (23, 2)
    steps = math.ceil(3 * 23 / batch_size)
    lines = list(
        itertools.chain(*(line_numbers(data.train_batch(n)) for n in range(steps)))
    )
    epochs = [lines[start : start + 23] for start in (0, 23, 46)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(23))
    if block_size < 10:  # So many blocks that two orders never agree by chance.
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_many_lines_have_few_blocks_that_batches_mix(tmp_path, monkeypatch):
    monkeypatch.setattr(block_order, "MAX_BLOCKS", 8)
    path = write(tmp_path / "train.txt", numbered_lines(1026))
    data = read(path, batch_size=256, block_size=None)
    assert np.diff(data._reader.block_bounds).tolist() == [256] * 4 + [2]
    batches = [line_numbers(data.train_batch(step)) for step in range(4)]
    assert sorted(itertools.chain(*batches)) == list(range(1024))
    for lines in batches:  # 64 lines of each block, as if blocks had 64 lines
        assert np.bincount(np.array(lines) // 256).tolist() == [64] * 4


def test_train_batch_depends_on_seed_and_step_alone(tmp_path):
    path = write(tmp_path / "train.txt", numbered_lines(40))
    data, other, reseeded = read(path), read(path), read(path, seed=1)
    expected = [data.train_batch(step) for step in range(30)]
    for step in (29, 3, 12, 3):
        jax.tree.map(
            np.testing.assert_array_equal, other.train_batch(step), expected[step]
        )
    assert line_numbers(reseeded.train_batch(0)) != line_numbers(expected[0])


HELD_OUT = {
    "end_of_training_file": (5, None, list(range(15, 20))),
    "whole_file": (None, 7, list(range(7))),
    "end_of_file": (3, 7, [4, 5, 6]),
    "full_batch": (4, None, list(range(16, 20))),
}


@pytest.mark.parametrize("case", HELD_OUT.values(), ids=HELD_OUT.keys())
def test_held_out_lines(tmp_path, case):
    num_evaluation_samples, evaluation_lines, expected = case
    path, evaluation_path = write(tmp_path / "day_0", numbered_lines(20)), None
    if evaluation_lines:
        evaluation_path = write(tmp_path / "day_1", numbered_lines(evaluation_lines))
    data = read(
        path,
        evaluation_path=evaluation_path,
        num_evaluation_samples=num_evaluation_samples,
    )
    assert data.num_evaluation_samples == len(expected)
    assert data.num_train_samples == (20 if evaluation_path else 20 - len(expected))
    for _ in range(2):  # Evaluation batches can be read twice.
        batches = list(data.evaluation_batches())
        assert all(batch.labels.shape == (4,) for batch in batches)
        seen = [line for batch in batches for line in line_numbers(batch)]
        weights = np.concatenate([batch.weights for batch in batches])
        assert seen[: len(expected)] == expected
        assert weights.tolist() == [1.0] * len(expected) + [0.0] * (-len(expected) % 4)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    write(tmp_path / "short", numbered_lines(2))
    for name, message in [
        ("absent", r"absent is not a file.*Kaggle.*1TB.*SyntheticCriteo"),
        ("empty", "empty is empty"),
        ("table.csv", "line 1: expected 40 fields between tabs, got 1: 'a,b'.*Kaggle"),
        ("short", "short has 2 samples, too few to hold out 2"),
    ]:
        with pytest.raises(DataError, match=message):
            read(tmp_path / name)
    with pytest.raises(DataError, match="too few to hold out 3"):
        read(
            tmp_path / "short",
            evaluation_path=tmp_path / "short",
            num_evaluation_samples=3,
        )


@pytest.mark.usefixtures("small_groups")
def test_days_are_read_as_one_log(tmp_path):
    counts = {"day_0": 5, "day_1": 6, "day_2": 7, "day_10": 1}
    lines = iter(numbered_lines(18))
    for name, count in list(counts.items())[:3]:
        write(tmp_path / name, [next(lines) for _ in range(count)])
    (tmp_path / "readme.txt").write_text("no log")
    data = read(find_logs(tmp_path))
    assert data.num_train_samples == 16
    batches = [data.train_batch(step) for step in range(4)]
    assert sorted(itertools.chain(*map(line_numbers, batches))) == list(range(16))
    assert [line_numbers(b) for b in data.evaluation_batches()] == [[16, 17, 17, 17]]
    for batch in batches:
        for sample, number in enumerate(line_numbers(batch)):
            day, line = (0, number) if number < 5 else (1, number - 5)
            day, line = (day, line) if line < 6 or not day else (2, number - 11)
            name = list(counts)[day]
            assert batch.origin(sample) == f"{tmp_path / name}, line {line + 1}"

    write(tmp_path / "day_1.gz", numbered_lines(1))
    with pytest.raises(DataError, match=r"each day once, got day_1 and day_1\.gz"):
        find_logs(tmp_path)
    (tmp_path / "day_1").unlink()
    (tmp_path / "day_1.gz").unlink()
    write(tmp_path / "day_10", numbered_lines(1))
    with pytest.raises(DataError, match="days 0 to 10 without 1, 3, 4, 5, 6, 7, 8, 9"):
        find_logs(tmp_path)
    with pytest.raises(DataError, match=r"absent is not a file"):
        read(find_logs(tmp_path / "absent"))


def test_packed_files_are_refused_with_the_command_that_unpacks_them(tmp_path):
    directory = tmp_path / "a log"
    directory.mkdir()
    packed = gzip.compress("\n".join(numbered_lines(9)).encode())
    for name in ("day_0", "day_1.gz", "day_2.gz"):
        (directory / name).write_bytes(packed)
    with pytest.raises(
        DataError, match="day_0 must be plain text, got.* gzip"
    ) as error:
        read(find_logs(directory))
    command = str(error.value).split("unpacks to: ")[1]
    subprocess.run(command, shell=True, check=True)
    data = read(find_logs(directory))
    assert [file.path.name for file in data._reader.files] == [
        "day_0",
        "day_1",
        "day_2",
    ]
    assert data.num_train_samples == 25


BAD = {
    "batch_size": ({"batch_size": 0}, r"\.batch_size .* got 0"),
    "seed": ({"seed": -1}, "seed .* got -1"),
    "size_1": ({"vocabulary_sizes": 1}, "from 2 .* got 1; row 0 stands for an empty"),
    "size_of_one": ({"vocabulary_sizes": [9] * 25 + [0]}, "from 2 .* got 0"),
    "sizes_25": ({"vocabulary_sizes": [9] * 25}, "one int or 26 of them, got 25"),
    "size_float": ({"vocabulary_sizes": 9.0}, r"must be ints .* got 9\.0"),
    "evaluation": ({"num_evaluation_samples": 0}, "num_evaluation_samples .* got 0"),
    "all_at_once": ({"batch_size": 0, "vocabulary_sizes": 1}, "batch.*vocabulary"),
    "block_size": ({"block_size": 0}, "block_size .* got 0"),
    "no_split": ({"num_evaluation_samples": None}, "num_evaluation_samples must be"),
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    BAD.values(),
    ids=BAD.keys(),
)
def test_bad_reader_arguments_are_named(tmp_path, arguments, message):
    path = write(tmp_path / "train.txt", numbered_lines(9))
    with pytest.raises(ValueError, match="Criteo.*" + message):
        read(path, **arguments)
