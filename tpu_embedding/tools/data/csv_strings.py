"""The strings of a column, numbered by frequency, in few bytes per cell."""

import itertools
import json
import zlib
from collections.abc import Collection, Sequence

import numpy as np

from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.types import PADDING_ROW_ID, FeatureIds, RaggedIds


class Strings:
    """A column of strings or of lists of strings.

    Numbers the strings of each block, and stores a 64-bit hash and the compressed text
    of each string. Python's hashes have a random key per process, so no file can
    provoke collisions. The probability of a collision among ten million strings is
    3e-6.

    Example:
      >>> strings = Strings("|")
      >>> strings.add(["b|a", "", "b"])
      >>> number, vocabulary, ids = strings.encode(np.ones(3, bool), min_count=2)
      >>> number, vocabulary.tokens, ids.values.tolist(), ids.row_splits.tolist()
      (2, ('b',), [2, 1, 2], [0, 2, 2, 3])
    """

    def __init__(self, separator: str | None = None):
        """Starts an empty column of strings, or of lists if a separator is given."""
        self._separator = separator
        self._lengths: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._texts: list[bytes] = []

    def add(self, cells: Sequence[str]) -> None:
        """Adds cells, without white space around them."""
        if self._separator is not None:
            lists = [cell.split(self._separator) if cell else [] for cell in cells]
            self._lengths.append(np.fromiter(map(len, lists), np.int32, len(lists)))
            cells = [
                element.strip() for element in itertools.chain.from_iterable(lists)
            ]
        distinct: dict[str, int] = {}
        numbers = [distinct.setdefault(cell, len(distinct)) for cell in cells]
        self._numbers.append(np.array(numbers, np.min_scalar_type(len(distinct))))
        self._hashes.append(_hashes(distinct))
        texts = json.dumps(list(distinct))  # Cells may contain line breaks.
        self._texts.append(zlib.compress(texts.encode(), level=1))

    def encode(
        self, is_trained: np.ndarray, min_count: int
    ) -> tuple[int, Vocabulary | None, FeatureIds]:
        """Numbers the strings, most frequent first, and empties the column.

        Args:
          is_trained: bool `[rows]`, True for rows whose strings are counted.
          min_count: minimum count of a string in the vocabulary.

        Returns:
          The number of distinct strings; their vocabulary, or None if no string is
          frequent enough; and the ids of the rows.
        """
        row_splits = None
        if self._separator is not None:
            lengths = np.concatenate(self._lengths)
            row_splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            is_trained = np.repeat(is_trained, lengths)
        numbers, hashes, first_places = self._number_strings()
        counts = np.bincount(numbers[is_trained], minlength=len(hashes))
        is_empty = hashes == hash("")
        num_strings = len(hashes) - int(is_empty.sum())
        kept = np.flatnonzero((counts >= min_count) & ~is_empty)
        if not kept.size:
            return num_strings, None, numbers
        kept = kept[np.lexsort((first_places[kept], -counts[kept]))]
        vocabulary = Vocabulary(
            self._texts_of(hashes[kept]),
            num_oov_buckets=1,
            mask_token="",
            strip_whitespace=True,
        )
        first_id = vocabulary.vocabulary_size - len(kept)
        ids = np.full(len(hashes), first_id - 1, np.int32)
        ids[is_empty] = PADDING_ROW_ID
        ids[kept] = first_id + np.arange(len(kept), dtype=np.int32)
        values = ids[numbers]
        if row_splits is None:
            return num_strings, vocabulary, values
        return num_strings, vocabulary, RaggedIds(values=values, row_splits=row_splits)

    def _number_strings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers the strings of all blocks in the order of their hashes.

        Returns:
          The int32 number of each string; for each number, the hash of its string; and
          for each number, a value that increases with the string's first occurrence.
        """
        block_ends = np.cumsum([len(hashes) for hashes in self._hashes])
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        is_first = np.ones(len(hashes), bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        # Number of each distinct string of each block.
        new_numbers = np.empty(len(hashes), np.int32)
        new_numbers[order] = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
        blocks = zip(np.split(new_numbers, block_ends[:-1]), self._numbers, strict=True)
        numbers = np.concatenate([renumbered[old] for renumbered, old in blocks])
        self._hashes.clear()
        self._numbers.clear()
        return numbers, hashes[is_first], order[is_first]

    def _texts_of(self, hashes: np.ndarray) -> list[str]:

        order = np.argsort(hashes)
        rising, texts = hashes[order], np.empty(len(hashes), object)
        for compressed in self._texts:
            block = json.loads(zlib.decompress(compressed))
            block_hashes = _hashes(block)
            places = np.searchsorted(rising, block_hashes)
            places = np.minimum(places, len(rising) - 1)
            is_wanted = rising[places] == block_hashes
            is_wanted &= np.equal(texts[order[places]], None)  # Not in earlier blocks.
            texts[order[places[is_wanted]]] = np.array(block, object)[is_wanted]
        return texts.tolist()


def _hashes(strings: Collection[str]) -> np.ndarray:
    return np.fromiter(map(hash, strings), np.int64, len(strings))
