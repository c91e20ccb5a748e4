"""Checks the ids that a caller or a file gives to the rows of a table."""

from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import SourceIds
from tpu_embedding.inputs.wide_ids import NO_WIDE_ID, fingerprints_of
from tpu_embedding.types import Ids64

_MAX_WORD: Final = 2**32 - 1


def given_ids(
    values: Any, owner: str, num_rows: int
) -> tuple[SourceIds | None, list[str]]:
    """Returns the ids that a caller gives to rows, and the problems with them.

    Args:
      values: integers or strings `[rows]`, or `Ids64`.
      owner: name of the table, for messages.
      num_rows: rows of the table.
    """
    array = values.to_numpy() if isinstance(values, Ids64) else np.asarray(values)
    is_text = array.dtype.kind in "US" or (
        array.dtype == object and all(isinstance(x, str | bytes) for x in array.flat)
    )
    if not is_text and not np.issubdtype(array.dtype, np.integer):
        return None, [
            f"{owner}: ids must be integers of at most 64 bits, or strings, got "
            f"dtype {array.dtype}; ids that passed through floating numbers are not "
            "exact beyond 2**53, so read them again as integers."
        ]
    if array.shape != (num_rows,):
        return None, [
            f"{owner}: ids must have one id for each of the {num_rows} rows of the "
            f"source, got shape {array.shape}."
        ]
    words = fingerprints_of(array) if is_text else wide_ids(array)
    problems = id_problems(words, array, owner)
    return None if problems else SourceIds(ids=words), problems


def wide_ids(ids: np.ndarray) -> np.ndarray:
    """Returns integers of any width as uint64; negative ones keep their bits."""
    if ids.dtype == np.uint64:
        return ids
    return ids.astype(np.int64).view(np.uint64)


def checked_ids(ids: np.ndarray, owner: str) -> np.ndarray:
    """Returns the integer ids of a file as uint64.

    Args:
      ids: integers `[rows]`.
      owner: name of the file or table, for messages.

    Raises:
      CheckpointError: if an id occurs twice, or is the reserved one.
    """
    words = wide_ids(ids)
    problems = id_problems(words, ids, owner)
    if problems:
        raise CheckpointError(" ".join(problems))
    return words


def clock_of(times: np.ndarray, now: int | None = None) -> tuple[np.ndarray, int]:
    """Returns the last uses of ids as uint32 from 1 on, and a clock behind them.

    Args:
      times: steps or other times of the last use, int64 `[rows]`. If some are beyond
        32 bits or negative, all are replaced by their ranks.
      now: clock of the source, if it is known.
    """
    if times.max(initial=0) >= _MAX_WORD or times.min(initial=0) < 0:
        _, ranks = np.unique(times, return_inverse=True)
        times, now = ranks.reshape(times.shape) + 1, None
    # 0 means never.
    used = np.maximum(times, 1).astype(np.uint32)
    latest = int(used.max(initial=1))
    return used, min(max(latest, now or 0) + 1, _MAX_WORD)


def as_counts(counts: np.ndarray) -> np.ndarray:
    """Returns numbers of uses as uint32; larger ones become the largest."""
    return np.clip(counts, 0, _MAX_WORD).astype(np.uint32)


def id_problems(words: np.ndarray, shown: np.ndarray, owner: str) -> list[str]:
    """Returns what is wrong with ids: one that is reserved, and those that repeat.

    Args:
      words: uint64 `[rows]`.
      shown: the ids as they were given, for messages.
      owner: name of the table, for messages.
    """
    problems = []
    reserved = np.flatnonzero(words == NO_WIDE_ID)
    if reserved.size:
        problems.append(
            f"{owner}: ids must not be 2**64 - 1 (-1 if signed), which means 'no id', "
            f"got it for row {reserved[0]} and {reserved.size} rows in all; give these "
            "rows another id, or leave them out."
        )
    order = np.argsort(words, kind="stable")
    is_repeat = words[order][1:] == words[order][:-1]
    if is_repeat.any():
        first = int(np.argmax(is_repeat))
        row, other = int(order[first]), int(order[first + 1])
        problems.append(
            f"{owner}: ids must be distinct, got {shown[row].item()!r} for row {row} "
            f"and {shown[other].item()!r} for row {other}, and {int(is_repeat.sum())} "
            "repeats in all; keep one row of each id."
        )
    return problems
