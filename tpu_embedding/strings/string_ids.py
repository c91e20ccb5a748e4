"""Turns strings into ids, by hashing, fingerprints or a vocabulary.

All three accept any container of strings, and keep its weights and structure. Ids are
the same as in TensorFlow and Keras, so you can use tables trained there. Runs and
exports save vocabularies in files, which `load` reads as untrusted data.
"""

import codecs
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from tpu_embedding.argument_checks import about, invalid, is_int
from tpu_embedding.inputs.containers import HostIds, read_ids
from tpu_embedding.paths import local_path, write_atomically
from tpu_embedding.strings.fingerprints import encode, farmhash64, siphash64
from tpu_embedding.types import PADDING_ROW_ID, DenseIds, is_integer
from tpu_embedding.types import ids_of as values_of
from tpu_embedding.types import with_ids as with_values

# Possessive quantifiers (`*+`) never backtrack, so a match takes linear time and no
# additional memory.
_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LIST: Final = rf"\[\s*+(?:{_STRING}\s*+,?+\s*+)*+\]"
_FIELD: Final = rf"{_STRING}\s*+:\s*+(?:{_STRING}|{_LIST}|[-+.\w]++)"
_FLAT: Final = re.compile(
    rf"\s*+(?:{_LIST}|\{{\s*+(?:{_FIELD}\s*+,?+\s*+){{0,9}}+\}})\s*+", re.DOTALL
)


def read_flat_json(path: pathlib.Path) -> Any:
    """Reads a JSON list of strings, or a dict whose values are scalars or such lists.

    Anything else raises ValueError.
    """
    # Nested lists take 40 times as much memory as their text, and files may be
    # untrusted. So match the text first.
    text = path.read_bytes().decode()
    if not _FLAT.fullmatch(text):
        raise ValueError("it must be JSON, with lists of strings and nothing nested")
    return json.loads(text)


MAX_IDS: Final = PADDING_ROW_ID - 1
"""Maximum number of ids, the limit of `TableConfig.vocabulary_size`."""

_UNKNOWN: Final = -1

_FILE_FORMAT: Final = "tpu_embedding.vocabulary 1"


def hash_ids(
    strings: Any,
    num_buckets: int,
    *,
    salt: int | tuple[int, int] | None = None,
    padding: str | bytes | int | None = None,
) -> Any:
    """Hashes each string to an id in `[0, num_buckets)`.

    Without a salt, the hash is FarmHash's `Fingerprint64`, as in
    `tf.strings.to_hash_bucket_fast` and `keras.layers.Hashing`. With a salt, it is
    SipHash-2-4, as in `tf.strings.to_hash_bucket_strong` and `Hashing(salt=...)`. The
    id is the hash modulo `num_buckets`. It is the same on every machine and in every
    version of this package.

    To tell apart strings that share a bucket, hash the feature into two tables with
    different salts.

    Note that `keras.layers.Hashing(num_bins, mask_value=mask)` reserves bin 0 for the
    mask, and adds 1 to other bins. `hash_ids(strings, num_bins - 1, padding=mask)`
    returns the Keras bins minus 1, so fill your table with the Keras table's rows from
    row 1 on. Masked strings then look up nothing, whereas Keras reads row 0.

    Args:
      strings: string array, nested lists, `DenseIds`, `RaggedIds`, `SparseIds`, or an
        object with the fields of a ragged or sparse tensor. Text is hashed as UTF-8.
        Integers are hashed as their decimal digits. Fixed-width NumPy arrays (dtype `S`
        or `U`) drop trailing NUL characters. Dtype `object` keeps them.
      num_buckets: the table's `vocabulary_size`, 1 to 2**31 - 2.
      salt: a number from 0 to 2**64 - 1, or a pair of numbers in this range. A single
        number `n` means `(n, n)`.
      padding: string that marks unused places, which become `PADDING_ROW_ID`.

    Returns:
      int32 ids in the same container. Lists become an array, or `RaggedIds` if their
      lengths differ.

    Raises:
      TypeError: if an element is neither a string nor an integer.
      ValueError: if `num_buckets` or `salt` is out of range, or a string is longer than
        65,536 bytes.

    Example:
      >>> hash_ids(["A", "B", "C"], 3).tolist()
      [1, 0, 1]
      >>> hash_ids(["A", "B", "C"], 3, salt=(133, 137)).tolist()
      [1, 2, 1]
      >>> hash_ids(["A", "", "C"], 3 - 1, padding="").tolist()  # of Hashing: 1, 0, 2
      [0, 2147483647, 1]
    """
    if not is_int(num_buckets) or not 1 <= num_buckets <= MAX_IDS:
        rule, fix = (
            f"be an int from 1 to {MAX_IDS}",
            "Pass the table's vocabulary_size.",
        )
        raise invalid("hash_ids: num_buckets", rule, num_buckets, fix)
    key: Any = tuple(salt) if isinstance(salt, tuple | list) else (salt, salt)
    is_key = len(key) == 2 and all(is_int(n) and 0 <= n < 2**64 for n in key)
    if salt is not None and not is_key:
        rule = "be an int from 0 to 2**64 - 1, or a pair of such ints"
        raise invalid("hash_ids: salt", rule, salt)
    read, values = _read_strings(strings, "hash_ids", takes_integers=True)
    encoded = encode(values)
    if salt is None:
        hashes = farmhash64(encoded)
    else:
        hashes = siphash64(encoded, (int(key[0]), int(key[1])))
    ids = (hashes % np.uint64(num_buckets)).astype(np.int32)
    if padding is not None:
        marker = padding if isinstance(padding, bytes) else str(padding).encode()
        ids[encoded.equal_to(marker)] = PADDING_ROW_ID
    return _in_container_of(strings, read, ids)


def fingerprint_ids(strings: Any) -> Any:
    """Computes a 64-bit FarmHash fingerprint per string, for tables of 64-bit ids.

    Among 2**32 strings, the probability that any two share a fingerprint is 0.4.

    Args:
      strings: see `hash_ids`.

    Returns:
      uint64 ids in the same container, never the reserved `2**64 - 1`.

    Raises:
      TypeError: if an element is neither str nor bytes.
      ValueError: if a string is longer than 65,536 bytes.

    Example:
      >>> ids = fingerprint_ids(["ann", "bob", "ann"])
      >>> ids.dtype, bool(ids[0] == ids[2])
      (dtype('uint64'), True)
    """
    read, values = _read_strings(strings, "fingerprint_ids", takes_integers=False)
    words = farmhash64(encode(values))
    words = np.minimum(words, np.uint64(2**64 - 2))
    return _in_container_of(strings, read, words)


class Vocabulary:
    """A numbered list of strings, like `keras.layers.StringLookup`.

    If you set a mask token, id 0 is reserved for it and stays unused. The next ids are
    for unknown strings, one per bucket, and the tokens follow. With several buckets,
    FarmHash chooses an unknown string's bucket.

    Attributes:
      tokens: the strings, in id order.
      num_oov_buckets: how many ids are reserved for unknown strings.
      mask_token: string that marks unused places, or None.
      strip_whitespace: True if `ids` strips white space around strings.

    Example:
      >>> vocabulary = Vocabulary(["comedy", "drama"], num_oov_buckets=1)
      >>> vocabulary.ids([["drama", "comedy"], ["western", "drama"]]).tolist()
      [[2, 1], [0, 2]]
      >>> vocabulary.vocabulary_size
      3
    """

    def __init__(
        self,
        tokens: Iterable[str],
        *,
        num_oov_buckets: int = 1,
        mask_token: str | None = None,
        oov_token: str = "[UNK]",
        strip_whitespace: bool = False,
    ):
        """Numbers the tokens.

        Args:
          tokens: distinct strings. A list from Keras may begin with `mask_token`, if
            you set one, and then `oov_token` once per bucket.
          num_oov_buckets: how many ids to reserve for unknown strings. With 0, unknown
            strings raise an error.
          mask_token: string that looks up nothing. Its places become `PADDING_ROW_ID`,
            and id 0 stays unused, as in Keras.
          oov_token: token for unknown strings in lists from Keras.
          strip_whitespace: True if `ids` strips white space around strings, like
            `str.strip`. The tokens themselves must not begin or end with white space.

        Raises:
          TypeError: if a token is not a str, or `tokens` is a single string.
          ValueError: if `tokens` is empty, has duplicates, or is too long.
        """
        if not is_int(num_oov_buckets) or not 0 <= num_oov_buckets <= MAX_IDS:
            rule = f"be an int from 0 to {MAX_IDS}"
            fix = "With 0, unknown strings raise an error."
            raise invalid("Vocabulary: num_oov_buckets", rule, num_oov_buckets, fix)
        if isinstance(tokens, str | bytes):
            fix = (
                f"Write [{tokens!r}] for a single token, or "
                "te.inputs.Vocabulary.from_file(path) to read a file of tokens."
            )
            rule = "be a list of strings"
            raise invalid("Vocabulary: tokens", rule, tokens, fix, TypeError)
        self.num_oov_buckets = num_oov_buckets
        self.mask_token = mask_token
        self.strip_whitespace = strip_whitespace
        self._oov_token = oov_token
        self._first_oov_id = 0 if mask_token is None else 1
        listed = tuple(tokens)
        first_id = self._first_oov_id + num_oov_buckets
        # A file may state any number of buckets, so compare lengths first.
        if len(listed) >= first_id and listed[:first_id] == self._special():
            listed = listed[first_id:]
        self.tokens = listed
        self._ids: dict[str, int] = {}
        for i, token in enumerate(listed):
            if not isinstance(token, str):
                fix = "Pass numbers as str(token), and bytes as token.decode()."
                raise invalid(
                    f"Vocabulary: token {i}", "be a str", token, fix, TypeError
                )
            if not token or token == mask_token:
                rule = "be neither empty nor the mask token"
                raise invalid(f"Vocabulary: token {i}", rule, token, "Remove it.")
            if strip_whitespace and token != token.strip():
                rule = "have no white space around it if strip_whitespace is set"
                raise invalid(f"Vocabulary: token {i}", rule, token, "Strip it.")
            if not token.isascii():
                token.encode()  # A lone surrogate raises an error.
            if (known_id := self._ids.setdefault(token, first_id + i)) < first_id + i:
                rule = f"differ, also tokens {known_id - first_id} and {i}"
                raise invalid("Vocabulary: tokens", rule, token)
        if not 1 <= len(listed) <= MAX_IDS - num_oov_buckets - 1:
            rule = f"be at least one token, and {MAX_IDS} with the buckets at most"
            raise invalid("Vocabulary: tokens", rule, len(listed))
        if mask_token is not None:
            self._ids[mask_token] = PADDING_ROW_ID

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> "Vocabulary":
        """Reads a UTF-8 text file with one token per line.

        Args:
          path: file to read. Spaces are part of a token. Line endings and a byte order
            mark are not.
          **options: keyword arguments to `Vocabulary`, such as `num_oov_buckets`.

        Raises:
          ValueError: if the file is not UTF-8, or a token occurs twice.
        """
        content = local_path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        try:
            lines = content.decode().split("\n")
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            where = f"{os.fspath(path)}:{line}: a vocabulary"
            found = content[error.start : error.end]
            raise invalid(where, "be UTF-8", found, f"{error}.") from None
        tokens = [line.removesuffix("\r") for line in lines]
        if tokens[-1] == "":
            tokens.pop()
        try:
            return cls(tokens, **options)
        except ValueError as error:
            error.args = (f"{os.fspath(path)}: {error}",)
            raise

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, for `TableConfig`: tokens, buckets, and any mask's id."""
        return self._first_oov_id + self.num_oov_buckets + len(self.tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file for `load`.

        The file's `tokens` has a string for each id, like `get_vocabulary` in Keras.
        First comes any mask token, then `oov_token` for each bucket, then the tokens.

        Args:
          path: file to write. An existing file is replaced once the new file is
            complete.

        Raises:
          OSError: if the file can't be written. An existing file is then unchanged.

        Example:
          >>> import pathlib, tempfile
          >>> path = pathlib.Path(tempfile.mkdtemp(), "genres.json")
          >>> Vocabulary(["comedy", "drama"]).save(path)
          >>> Vocabulary.load(path).ids(["drama", "opera"]).tolist()
          [2, 0]
        """
        document = {
            "format": _FILE_FORMAT,
            "num_oov_buckets": self.num_oov_buckets,
            "mask_token": self.mask_token,
            "strip_whitespace": self.strip_whitespace,
            "tokens": self._special() + self.tokens,
        }
        text = json.dumps(document, ensure_ascii=False)
        write_atomically(local_path(path), text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Reads a file that `save` wrote. The file may be untrusted.

        Raises:
          ValueError: if the file is not from `save`. The message names the file.
        """
        try:
            document = read_flat_json(local_path(path))
            if document["format"] != _FILE_FORMAT:
                raise ValueError(f"format must be {_FILE_FORMAT!r}")
            tokens, mask_token = document["tokens"], document["mask_token"]
            strips = document.get("strip_whitespace", False)
            if not isinstance(strips, bool) or not isinstance(mask_token, str | None):
                raise ValueError("a field has the wrong type")
            vocabulary = cls(
                tokens,
                num_oov_buckets=document["num_oov_buckets"],
                mask_token=mask_token,
                oov_token=tokens[mask_token is not None],
                strip_whitespace=strips,
            )
            if vocabulary.vocabulary_size != len(tokens):
                raise ValueError("tokens must have a string for each id")
            return vocabulary
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} must be a file of Vocabulary.save: {error}; save "
                "it again, or use from_file for a text file with one token per line."
            ) from None

    def ids(self, strings: Any) -> Any:
        """Looks up the id of each string.

        Args:
          strings: containers as in `hash_ids`. If any token is a number, integers are
            looked up by their decimal digits.

        Returns:
          int32 ids in the same container. Lists become an array, or `RaggedIds` if
          their lengths differ.

        Raises:
          TypeError: if an element is not a string.
          ValueError: if a string is unknown to a vocabulary without buckets, or if an
            unknown string is longer than 65,536 bytes and there are several buckets.
        """
        read, values = _read_strings(
            strings, "Vocabulary.ids", takes_integers=self._has_numbers
        )
        flat = values.tolist()
        kinds = set(map(type, flat))
        if not all(issubclass(kind, str | bytes) for kind in kinds):
            encode(flat)  # Raises an error that shows the value.
        has_bytes = any(issubclass(kind, bytes) for kind in kinds)
        known = self._ids_of_bytes if has_bytes else self._ids
        known_ids = map(known.get, flat, itertools.repeat(_UNKNOWN))
        ids = np.fromiter(known_ids, np.int32, len(flat))
        unknown_positions = np.flatnonzero(ids == _UNKNOWN)
        if self.strip_whitespace:
            for i in unknown_positions:
                flat[i] = _strip(flat[i])
                ids[i] = known.get(flat[i], _UNKNOWN)
            unknown_positions = np.flatnonzero(ids == _UNKNOWN)
        if unknown_positions.size:
            rest = [flat[i] for i in unknown_positions]
            ids[unknown_positions] = self._oov_ids(rest)
        return _in_container_of(strings, read, ids)

    @functools.cached_property
    def _ids_of_bytes(self) -> dict[str | bytes, int]:
        # This dict more than doubles the memory, so make it only to look up bytes.
        return {**self._ids, **{x.encode(): i for x, i in self._ids.items()}}

    @functools.cached_property
    def _has_numbers(self) -> bool:
        return any(token.removeprefix("-").isdecimal() for token in self.tokens)

    def _oov_ids(self, strings: list[Any]) -> np.ndarray:
        if not self.num_oov_buckets:
            text = (
                f"Vocabulary.ids: {strings[0]!r} is not one of the {len(self.tokens)} "
                f"tokens ({len(strings)} unknown strings in total). To give unknown "
                "strings ids, set num_oov_buckets."
            )
            raise about(ValueError(text), "Vocabulary.ids: strings", strings[0])
        if self.num_oov_buckets == 1:
            return np.full(len(strings), self._first_oov_id, np.int32)
        buckets = farmhash64(encode(strings)) % np.uint64(self.num_oov_buckets)
        return buckets.astype(np.int32) + self._first_oov_id

    def _special(self) -> tuple[str, ...]:
        """Lists the strings that Keras puts before the tokens."""
        mask = () if self.mask_token is None else (self.mask_token,)
        return mask + (self._oov_token,) * self.num_oov_buckets

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return (
            f"Vocabulary({len(self.tokens)} tokens, num_oov_buckets="
            f"{self.num_oov_buckets}, mask_token={self.mask_token!r})"
        )


def _strip(string: str | bytes) -> str | bytes:
    if isinstance(string, str):
        return string.strip()
    # `bytes.strip` would keep white space outside ASCII. Bytes that aren't UTF-8 stay.
    text = string.decode(errors="surrogateescape")
    return text.strip().encode(errors="surrogateescape")


def _read_strings(
    strings: Any, owner: str, *, takes_integers: bool
) -> tuple[HostIds, np.ndarray]:
    """Reads a container, and flattens its strings."""
    read = read_ids(strings, owner, "Strings")
    values = values_of(read).reshape(-1)
    if not values.size:
        return read, values.astype(object)  # Empty lists have dtype float64.
    if takes_integers and is_integer(values.dtype):
        return read, values.astype(np.bytes_)  # To decimal digits.
    if values.dtype.kind not in "SUTO":
        fix = "Convert numbers with .astype(str)."
        raise invalid(f"Strings of {owner}", "be strings", values, fix, TypeError)
    return read, values


def _in_container_of(strings: Any, read: HostIds, ids: np.ndarray) -> Any:
    container = with_values(read, ids.reshape(values_of(read).shape))
    if isinstance(container, DenseIds) and not isinstance(strings, DenseIds):
        return container.ids
    return container


VOCABULARIES_DIR: Final = "vocabularies"
# Vocabulary files are numbered, and this file lists the feature of each number. Files
# aren't named after features, because file systems limit the length of names and may
# ignore case.
_NAMES_FILE: Final = "names.json"


def save_vocabularies(
    directory: pathlib.Path, vocabularies: Mapping[str, Vocabulary]
) -> None:
    """Writes vocabularies to a subdirectory, or nothing if there are none."""
    path = directory / VOCABULARIES_DIR
    if vocabularies:
        path.mkdir(exist_ok=True)
        write_atomically(path / _NAMES_FILE, json.dumps(list(vocabularies)))
    for number, vocabulary in enumerate(vocabularies.values()):
        vocabulary.save(path / f"{number}.json")


def load_vocabularies(directory: pathlib.Path) -> dict[str, Vocabulary]:
    """Reads the vocabularies in a subdirectory, by feature name.

    The files may be untrusted, so the caller must reject symbolic links, which could
    point out of the directory. A missing file raises OSError, and a bad file raises
    ValueError.
    """
    path = directory / VOCABULARIES_DIR
    if not path.exists():
        return {}
    names_file = path / _NAMES_FILE
    try:
        names = read_flat_json(names_file)
        if not isinstance(names, list) or len(set(names)) < len(names):
            raise ValueError("it must be a list of different names")
    except ValueError as error:
        raise ValueError(
            f"{names_file} is not part of saved vocabularies: {error}; copy the "
            "directory again."
        ) from None
    return {
        name: Vocabulary.load(path / f"{number}.json")
        for number, name in enumerate(names)
    }
