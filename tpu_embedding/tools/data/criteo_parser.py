"""Parses lines of Criteo's click logs, by pyarrow.csv.

pyarrow splits the lines and parses the integers. The categories stay text there: their
hex digits are read here, all those of a feature at once. If anything is wrong, a plain
check of the lines finds the first damaged field.
"""

import binascii
import dataclasses
import pathlib
import re
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.criteo_format import (
    CATEGORY_NAMES,
    NUM_CATEGORIES,
    NUM_DENSE,
    dense_of_integers,
    row_ids_of_categories,
)
from tpu_embedding.tools.data.pyarrow_modules import CRITEO_LOGS, load_pyarrow

NUM_FIELDS: Final = 1 + NUM_DENSE + NUM_CATEGORIES
MAX_CATEGORY_DIGITS: Final = 8
MAX_INTEGER_DIGITS: Final = 18  # any 18 digits fit in int64
MAX_SHOWN_CHARACTERS: Final = 40

_FIELDS: Final = (
    re.compile(rb"[01]"),
    *[re.compile(rb"(-?0*\d{1,%d})?" % MAX_INTEGER_DIGITS)] * NUM_DENSE,
    *[re.compile(rb"[\da-fA-F]{0,%d}" % MAX_CATEGORY_DIGITS)] * NUM_CATEGORIES,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoRows:
    """Fields of a group of lines, converted to the inputs of a model.

    Attributes:
      labels: float32 `[rows]`, 0 or 1.
      dense: float32 `[rows, 13]`.
      row_ids: int32 `[26, rows]`.
    """

    labels: np.ndarray
    dense: np.ndarray
    row_ids: np.ndarray


class _UnexpectedTextError(ValueError):
    """Raised for text that is no number of the format."""


def parse_lines(
    text: bytes,
    line_numbers: np.ndarray,
    path: pathlib.Path,
    vocabulary_sizes: np.ndarray,
) -> CriteoRows:
    """Parses a group of lines.

    Args:
      text: whole lines. Each ends with a newline, with or without a carriage return
        before it.
      line_numbers: `[rows]`, counted from 1, for error messages.
      path: path of the file, for error messages.
      vocabulary_sizes: `[26]`, each at least 2.

    Raises:
      DataError: if a line is damaged; the message names file, line and field of the
        first one.
      MissingPyarrowError: if pyarrow is not installed.
    """
    pyarrow = load_pyarrow("pyarrow", CRITEO_LOGS)
    try:
        labels, integers, categories = _read_columns(text, len(line_numbers))
        return CriteoRows(
            labels=_parse_labels(labels),
            dense=_parse_integers(integers),
            row_ids=_parse_categories(categories, vocabulary_sizes),
        )
    except (pyarrow.ArrowInvalid, binascii.Error, _UnexpectedTextError):
        _check_lines(text, line_numbers, path)
        raise


def _read_columns(text: bytes, num_rows: int) -> tuple[Any, list[Any], list[Any]]:
    """Returns the columns of labels, integers and categories, as arrays of Arrow."""
    pa: Any = load_pyarrow("pyarrow", CRITEO_LOGS)
    csv: Any = load_pyarrow("pyarrow.csv", CRITEO_LOGS)
    # pyarrow would skip blanks around numbers and a byte order mark, and read 0x12.
    if not text.isascii() or b" " in text or b"x" in text or b"X" in text:
        raise _UnexpectedTextError
    names = [str(number) for number in range(NUM_FIELDS)]
    types = [pa.binary(), *[pa.int64()] * NUM_DENSE, *[pa.binary()] * NUM_CATEGORIES]
    table = csv.read_csv(
        pa.BufferReader(text),
        # Threads gain nothing for the few lines of a group.
        csv.ReadOptions(
            use_threads=False, block_size=len(text) + 1, column_names=names
        ),
        csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=dict(zip(names, types, strict=True)), null_values=[""]
        ),
    )
    if table.num_rows != num_rows:  # A carriage return inside of a line ends it.
        raise _UnexpectedTextError
    labels, *columns = (column.chunk(0) for column in table.columns)
    return labels, columns[:NUM_DENSE], columns[NUM_DENSE:]


def _text_of(column: Any) -> tuple[np.ndarray, Any]:
    """Returns the lengths of the texts of a column, and the bytes of all of them."""
    _, offsets, data = column.buffers()
    lengths = np.diff(np.frombuffer(offsets, np.int32, len(column) + 1))
    return lengths, data if data is not None else b""


def _parse_labels(column: Any) -> np.ndarray:
    lengths, data = _text_of(column)
    labels = np.frombuffer(data, np.uint8) - np.uint8(ord("0"))
    if (lengths != 1).any() or labels.max() > 1:
        raise _UnexpectedTextError
    return labels.astype(np.float32)


def _parse_integers(columns: list[Any]) -> np.ndarray:
    dense = np.empty((len(columns[0]), len(columns)), np.float32)
    for number, column in enumerate(columns):
        integers = column.fill_null(0).to_numpy()
        if max(-integers.min(), integers.max()) >= 10**MAX_INTEGER_DIGITS:
            raise _UnexpectedTextError
        dense[:, number] = dense_of_integers(integers)
    return dense


def _parse_categories(columns: list[Any], vocabulary_sizes: np.ndarray) -> np.ndarray:
    row_ids = np.zeros((len(columns), len(columns[0])), np.int32)
    for feature, column in enumerate(columns):
        lengths, digits = _text_of(column)
        is_given = lengths > 0
        if (lengths[is_given] != MAX_CATEGORY_DIGITS).any():
            digits = _with_zeros(column.to_pylist())
        categories = np.frombuffer(binascii.unhexlify(digits), ">u4")
        row_ids[feature, is_given] = row_ids_of_categories(
            categories, feature, int(vocabulary_sizes[feature])
        )
    return row_ids


def _with_zeros(fields: list[bytes]) -> bytes:
    """Returns the digits of fields with zeros before those of a short field."""
    if max(map(len, fields)) > MAX_CATEGORY_DIGITS:
        raise _UnexpectedTextError
    return b"".join(field.rjust(MAX_CATEGORY_DIGITS, b"0") for field in fields if field)


def _check_lines(text: bytes, line_numbers: np.ndarray, path: pathlib.Path) -> None:
    """Raises DataError for the first damaged field."""
    for line, line_number in zip(text.split(b"\n"), line_numbers, strict=False):
        fields = line.removesuffix(b"\r").split(b"\t")
        owner = f"{path}, line {line_number}"
        if len(fields) != NUM_FIELDS:
            hint = (
                "; Kaggle's test.txt has no labels and cannot be used"
                if len(fields) == NUM_FIELDS - 1
                else ""
            )
            raise DataError(
                f"{owner}: expected {NUM_FIELDS} fields between tabs, got "
                f"{len(fields)}: {_show(line)}{hint}."
            )
        for number, (field, pattern) in enumerate(zip(fields, _FIELDS, strict=True)):
            if not pattern.fullmatch(field):
                raise DataError(f"{owner}: {_rule(number)}, got {_show(field)}.")


def _rule(field: int) -> str:
    if field == 0:
        return "field 1 (the label) must be 0 or 1"
    if field <= NUM_DENSE:
        return (
            f"field {field + 1} (integer {field} of {NUM_DENSE}) must be an integer of "
            f"at most {MAX_INTEGER_DIGITS} digits or empty"
        )
    name = CATEGORY_NAMES[field - 1 - NUM_DENSE]
    return (
        f"field {field + 1} ({name}) must have at most {MAX_CATEGORY_DIGITS} hex "
        "digits or be empty"
    )


def _show(value: bytes) -> str:
    """Returns bytes as a quoted string, with escapes for bytes outside ASCII."""
    shown = repr(value[:MAX_SHOWN_CHARACTERS])[1:]
    return shown + ("..." if len(value) > MAX_SHOWN_CHARACTERS else "")
