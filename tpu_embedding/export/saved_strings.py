"""Turns strings into ids in a SavedModel, as `hash_ids` and `Vocabulary` do."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from tpu_embedding.export.signature import ExportError, Input, Signature
from tpu_embedding.inputs.string_ids import Vocabulary, hash_ids
from tpu_embedding.types import PADDING_ROW_ID

StringIds = Vocabulary | functools.partial | Literal["fingerprint"]
"""A vocabulary, or a `functools.partial` of `te.inputs.hash_ids` with `num_buckets`.

For dynamic tables, it is the fingerprint of 64 bits that `prepare` makes."""

FINGERPRINT: Final = "fingerprint"

_MAX_BYTES: Final = 2**30
"""Maximum bytes of the tokens of a SavedModel, whose graph must stay below 2 GB."""

_WAYS: Final = (
    "a te.inputs.Vocabulary, or functools.partial(te.inputs.hash_ids, num_buckets=N)"
)


def check_strings(strings: Mapping[str, StringIds], signature: Signature) -> None:
    """Refuses strings for inputs that are no ids, and ids that a table lacks.

    Args:
      strings: name of an input to what turns its strings into ids.
      signature: inputs and outputs of the program.

    Raises:
      ExportError: if an entry is wrong.
    """
    inputs = {each.name: each for each in signature.inputs if each.kind != "array"}
    for name, ids in strings.items():
        if name not in inputs:
            raise ExportError(
                f"strings must name inputs of ids, {sorted(inputs)}, got {name!r}."
            )
        each = inputs[name]
        if each.is_wide != (ids == FINGERPRINT):
            wanted = repr(FINGERPRINT) if each.is_wide else _WAYS
            kind = "" if each.is_wide else "no "
            raise ExportError(
                f"strings[{name!r}] must be {wanted}, because its ids go to {kind}"
                f"tables with a te.Dynamic vocabulary, got {ids!r}."
            )
        if not each.is_wide:
            _check_size(each, _num_ids(ids, name))


def _num_ids(ids: Any, name: str) -> int:
    if isinstance(ids, Vocabulary):
        num_bytes = sum(len(token.encode()) for token in ids.tokens)
        if num_bytes > _MAX_BYTES:
            raise ExportError(
                f"The tokens of the vocabulary of input {name!r} must have at most "
                f"{_MAX_BYTES} bytes to fit into the graph of a SavedModel, got "
                f"{num_bytes}; export without it, and give ids to the server."
            )
        return ids.vocabulary_size
    if isinstance(ids, functools.partial) and ids.func is hash_ids:
        options = _hash_options(ids)
        if "num_buckets" in options:
            ids([])  # It raises an error for wrong options.
            return options["num_buckets"]
    raise ExportError(f"strings[{name!r}] must be {_WAYS}, got {ids!r}.")


def _hash_options(ids: functools.partial) -> dict[str, Any]:
    """Returns the options of `hash_ids`; its strings may be no part of them."""
    return {} if ids.args else dict(ids.keywords)


def _check_size(each: Input, num_ids: int) -> None:
    for lookup in each.lookups:
        if num_ids > lookup.vocabulary_size:
            raise ExportError(
                f"The strings of input {each.name!r} have {num_ids} ids, but table "
                f"{lookup.table!r} has vocabulary_size {lookup.vocabulary_size}; give "
                "what the model was trained with."
            )


def converter_of(tf: Any, ids: StringIds) -> tuple[Callable[[Any], Any], Any]:
    """Returns a function of string tensors, and what the SavedModel must keep for it.

    Args:
      tf: the module of TensorFlow.
      ids: checked by `check_strings`.

    Returns:
      The function, which returns int64 ids in the shape of the strings; and the lookup
      table of a vocabulary, or None.
    """
    if isinstance(ids, Vocabulary):
        return _of_vocabulary(tf, ids)
    if ids == FINGERPRINT:
        return functools.partial(_fingerprints, tf), None
    assert isinstance(ids, functools.partial)
    options = _hash_options(ids)
    salt, padding = options.get("salt"), options.get("padding")
    num_buckets = int(options["num_buckets"])

    def hash_strings(strings: Any) -> Any:
        if salt is None:
            found = tf.strings.to_hash_bucket_fast(strings, num_buckets)
        else:
            pair = salt if isinstance(salt, tuple | list) else (salt, salt)
            # TensorFlow's numbers are signed.
            key = [int(n) - (2**64 if n >= 2**63 else 0) for n in pair]
            found = tf.strings.to_hash_bucket_strong(strings, num_buckets, key)
        if padding is None:
            return found
        mark = str(padding) if isinstance(padding, int) else padding
        return tf.where(strings == mark, tf.cast(PADDING_ROW_ID, tf.int64), found)

    return hash_strings, None


def _fingerprints(tf: Any, strings: Any) -> Any:
    """Returns int64 ids of strings, as `inputs.wide_ids.fingerprints_of` makes them."""
    lowest_first = tf.fingerprint(tf.reshape(strings, [-1, 1]))
    ids = tf.reshape(tf.bitcast(lowest_first, tf.int64), tf.shape(strings))
    return tf.where(ids == -1, tf.constant(-2, tf.int64), ids)


def _of_vocabulary(tf: Any, vocabulary: Vocabulary) -> tuple[Callable[[Any], Any], Any]:
    keys = list(vocabulary.tokens)
    first = vocabulary.vocabulary_size - len(keys)
    first_oov = first - vocabulary.num_oov_buckets
    values = list(range(first, first + len(keys)))
    if vocabulary.mask_token is not None:
        keys.append(vocabulary.mask_token)
        values.append(PADDING_ROW_ID)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant(keys, tf.string), tf.constant(values, tf.int64)
        ),
        default_value=-1,
    )

    def look_up(strings: Any) -> Any:
        found = table.lookup(strings)
        if vocabulary.num_oov_buckets:
            buckets = tf.strings.to_hash_bucket_fast(
                strings, vocabulary.num_oov_buckets
            )
            return tf.where(found >= 0, found, buckets + first_oov)
        message = (
            f"Strings must be among the {len(vocabulary)} tokens of the vocabulary; "
            "num_oov_buckets would give unknown strings ids."
        )
        with tf.control_dependencies(
            [tf.debugging.assert_non_negative(found, message)]
        ):
            return tf.identity(found)

    return look_up, table
