"""Line format of Criteo's click logs: fields, validation, conversion to model inputs.

A line has 40 fields separated by tabs: the label (0 or 1), 13 integers (mostly counts;
may be empty or negative) and 26 categories (32 bits as 8 hex digits; may be empty). The
Kaggle challenge and the 1TB logs share the format. `criteo_lines.py` reads it.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from tpu_embedding.field_checks import is_int
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.line_blocks import NEWLINE
from tpu_embedding.tools.data.zipf import MAX_VOCABULARY_SIZE

NUM_DENSE: Final = 13
CATEGORY_NAMES: Final = tuple(f"cat_{number:02d}" for number in range(26))
"""Names of the categorical features, in the order of the fields."""

NUM_CATEGORIES: Final = len(CATEGORY_NAMES)
ALL_FEATURES: Final = np.arange(NUM_CATEGORIES)
NUM_FIELDS: Final = 1 + NUM_DENSE + NUM_CATEGORIES

MAX_CATEGORY_DIGITS: Final = 8
MAX_INTEGER_DIGITS: Final = 18  # any 18 digits fit in int64
MAX_SHOWN_CHARACTERS: Final = 40

_TAB, _RETURN, _MINUS, _ZERO = (np.uint8(ord(c)) for c in "\t\r-0")
_ONES: Final = 0x0101010101010101  # each byte of a uint64 is 1
_ZEROS_BEFORE: Final = np.array(
    [ord("0") * _ONES >> 8 * n for n in range(8)] + [0], np.uint64
)
"""The digits "0" that fill a field of 0 to 8 digits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoRows:
    """Parsed fields of a group of lines.

    Attributes:
      labels: float32 `[rows]`, 0 or 1.
      integers: int64 `[rows, 13]`; 0 where the field is empty.
      categories: uint32 `[rows, 26]`; 0 where the field is empty.
      category_mask: bool `[rows, 26]`; False where the field is empty.
    """

    labels: np.ndarray
    integers: np.ndarray
    categories: np.ndarray
    category_mask: np.ndarray


def dense_of_integers(integers: np.ndarray) -> np.ndarray:
    """Returns `log(1 + max(x, 0))` in float32.

    MLPerf's DLRM uses the same transform (facebookresearch/dlrm: `data_utils.py` sets
    negative integers to 0, `dlrm_data_pytorch.py` takes the logarithm). It also counts
    an empty field as 0.
    """
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def row_ids_of_categories(rows: CriteoRows, vocabulary_sizes: np.ndarray) -> np.ndarray:
    """Hashes categories to int32 row ids `[rows, 26]`.

    Row 0 of a feature means an empty field. Category `x` of feature `f` (counted from
    0) has the row

        1 + splitmix64((f + 1) * 2**32 + x) mod (vocabulary_size - 1)

    which is the same in every run and on every machine, so checkpoints stay valid. Two
    categories of a feature may share a row.

    Args:
      rows: parsed lines.
      vocabulary_sizes: `[26]`, each at least 2.
    """
    buckets = np.asarray(vocabulary_sizes).astype(np.uint64) - np.uint64(1)
    hashes = splitmix64(category_keys(rows.categories))
    row_ids = (hashes % buckets).astype(np.int32) + np.int32(1)
    return np.where(rows.category_mask, row_ids, np.int32(0))


def category_keys(
    categories: np.ndarray, features: int | np.ndarray = ALL_FEATURES
) -> np.ndarray:
    """Returns uint64 keys, distinct for each feature and category.

    Args:
      categories: numbers of 32 bits, `[rows, 26]` unless `features` says otherwise.
      features: numbers of their features, counted from 0.
    """
    return (np.uint64(features + 1) << np.uint64(32)) + categories.astype(np.uint64)


def splitmix64(keys: np.ndarray) -> np.ndarray:
    """Hashes uint64 values; distinct values have distinct hashes.

    The algorithm is from Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (OOPSLA 2014), with the constants of Vigna's public `splitmix64.c`.
    """
    keys = keys + np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def vocabulary_sizes_by_name(sizes: int | Sequence[int]) -> dict[str, int]:
    """Returns rows by feature name, from one number per feature or one for all."""
    per_feature = sizes if isinstance(sizes, Sequence) else [sizes] * NUM_CATEGORIES
    return dict(zip(CATEGORY_NAMES, per_feature, strict=True))


def vocabulary_problems(owner: str, sizes: int | Sequence[int]) -> Iterator[str]:
    """Yields an error message for each problem of `vocabulary_sizes`."""
    per_feature = list(sizes) if isinstance(sizes, Sequence) else [sizes]
    if isinstance(sizes, Sequence) and len(sizes) != NUM_CATEGORIES:
        yield (
            f"{owner}.vocabulary_sizes must be one int or {NUM_CATEGORIES} of them, "
            f"got {len(sizes)}"
        )
    yield from size_problems(owner, per_feature)


def size_problems(owner: str, sizes: Iterable[int]) -> Iterator[str]:
    """Yields an error message for each size that is out of range."""
    for size in dict.fromkeys(sizes):
        if not is_int(size) or not 2 <= size <= MAX_VOCABULARY_SIZE:
            yield (
                f"{owner}.vocabulary_sizes must be ints from 2 to "
                f"{MAX_VOCABULARY_SIZE}, got {size!r}; row 0 stands for an empty field"
            )


def parse_lines(
    data: np.ndarray, line_numbers: np.ndarray, path: pathlib.Path
) -> CriteoRows:
    """Parses the bytes of a group of lines.

    Args:
      data: uint8, whole lines. Each ends with a newline, with or without a carriage
        return before it.
      line_numbers: `[rows]`, counted from 1, for error messages.
      path: path of the file, for error messages.

    Raises:
      DataError: if a line is damaged; the message names file, line and field of the
        first one.
    """
    starts, ends = _field_bounds(data, line_numbers, path)
    lengths = ends - starts
    integers, bad_integers = _parse_integers(data, starts[:, 1:14], lengths[:, 1:14])
    categories, bad_categories = _parse_hex(data, starts[:, 14:], lengths[:, 14:])
    labels = data[starts[:, 0]] - _ZERO
    bad_labels = (lengths[:, :1] != 1) | (labels[:, None] > 1)

    bad = np.concatenate([bad_labels, bad_integers, bad_categories], axis=1)
    if bad.any():
        row, field = (int(place) for place in np.argwhere(bad)[0])
        value = data[starts[row, field] : ends[row, field]]
        raise DataError(
            f"{path}, line {line_numbers[row]}: {_rule(field)}, got {_show(value)}."
        )
    return CriteoRows(
        labels=labels.astype(np.float32),
        integers=integers,
        categories=categories,
        category_mask=lengths[:, 14:] > 0,
    )


def _field_bounds(
    data: np.ndarray, line_numbers: np.ndarray, path: pathlib.Path
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the begin and end offsets of the fields, each `[rows, 40]`."""
    newlines = np.flatnonzero(data == NEWLINE)
    line_starts = np.append(0, newlines[:-1] + 1)
    tabs = np.flatnonzero(data == _TAB)
    num_fields = np.diff(np.searchsorted(tabs, newlines), prepend=0) + 1
    if (num_fields != NUM_FIELDS).any():
        row = int(np.argmax(num_fields != NUM_FIELDS))
        hint = (
            "; Kaggle's test.txt has no labels and cannot be used"
            if num_fields[row] == NUM_FIELDS - 1
            else ""
        )
        raise DataError(
            f"{path}, line {line_numbers[row]}: expected {NUM_FIELDS} fields between "
            f"tabs, got {num_fields[row]}: "
            f"{_show(data[line_starts[row] : newlines[row]])}{hint}."
        )
    # For a newline at offset 0 this reads data[-1]: a newline, no carriage return.
    line_ends = newlines - (data[newlines - 1] == _RETURN)
    tabs = tabs.reshape(len(newlines), NUM_FIELDS - 1)
    starts = np.concatenate([line_starts[:, None], tabs + 1], axis=1)
    ends = np.concatenate([tabs, line_ends[:, None]], axis=1)
    return starts, ends


def _parse_integers(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns int64 values and a mask of the fields that are not integers."""
    negative = (lengths > 0) & (data[starts] == _MINUS)
    starts, num_digits = starts + negative, lengths - negative
    bad = (negative & (num_digits == 0)) | (num_digits > MAX_INTEGER_DIGITS)
    values = np.zeros(starts.shape, np.int64)
    for place in range(min(int(num_digits.max()), MAX_INTEGER_DIGITS)):
        used = place < num_digits
        # Bytes below "0" wrap to large values, so one comparison finds all non-digits.
        digits = data[np.where(used, starts + place, 0)] - _ZERO
        bad |= used & (digits > 9)
        values = np.where(used, 10 * values + digits, values)
    return np.where(negative, -values, values), bad


def _parse_hex(
    data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns uint32 values and a mask of the fields that are not hexadecimal.

    The digits of a field are 8 bytes of one uint64, and all 8 are read at once.
    """
    padded = np.append(data, np.zeros(8, np.uint8))
    words = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))[starts]
    num_digits = np.minimum(lengths, MAX_CATEGORY_DIGITS)
    # The first digit is in the lowest byte. Zeros before it fill a short field.
    shift = (8 * (MAX_CATEGORY_DIGITS - num_digits) & 63).astype(np.uint64)
    words = np.where(num_digits == 0, np.uint64(0), words << shift)
    words |= _ZEROS_BEFORE[num_digits]

    is_letter = (words >> 6) & _each_byte(1)
    digits = (words & _each_byte(0x0F)) + 9 * is_letter
    above_nine = ((digits + _each_byte(6)) >> 4) & _each_byte(1)
    # A letter differs from its upper case by the bit 0x20, which digits have, too.
    spelled = digits + _each_byte("0") + above_nine * (ord("a") - ord("9") - 1)
    is_text = (words | (words >> 1)) & _each_byte(0x20)
    bad = (
        (lengths > MAX_CATEGORY_DIGITS)
        | ((digits & _each_byte(0xF0)) != 0)
        | (spelled != (words | _each_byte(0x20)))
        | (is_text != _each_byte(0x20))
    )
    values = digits.byteswap()
    for bits, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF)):
        values = (values | (values >> bits)) & np.uint64(mask)
    return (values | (values >> 16)).astype(np.uint32), bad


def _each_byte(value: int | str) -> np.uint64:
    """Returns 8 bytes of one value."""
    return np.uint64((ord(value) if isinstance(value, str) else value) * _ONES)


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


def _show(value: np.ndarray) -> str:
    """Returns bytes as a quoted string, with escapes for bytes outside ASCII."""
    shown = repr(value[:MAX_SHOWN_CHARACTERS].tobytes())[1:]
    return shown + ("..." if len(value) > MAX_SHOWN_CHARACTERS else "")
