"""Turns the arguments of a call into the arrays that an exported program takes.

Inputs that hold ids are checked by `prepare_features`, so that a wrong id is rejected
with the same words as in training. The program itself rejects wrong shapes.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.dynamic.ids_64 import Ids64
from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.export.example import (
    WIDE_DTYPE,
    ExportError,
    Input,
    Signature,
    nest_of,
)
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.containers import read_ids
from tpu_embedding.inputs.prepare import prepare_features
from tpu_embedding.plan.features import FeaturePlan, InputPlan
from tpu_embedding.strings.string_ids import Unknown, Vocabulary
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    RaggedIds,
    ShardedRaggedIds,
    is_integer,
)


class Feeder:
    """Checks the arguments of calls, and remembers the sizes of ragged buffers."""

    def __init__(
        self,
        signature: Signature,
        arrays: Mapping[str, Any],
        vocabularies: Mapping[str, Vocabulary],
        unknown: Unknown,
    ):
        """Prepares to feed a program.

        Args:
          signature: the inputs of the program.
          arrays: shape and dtype of each array that the program takes, by name.
          vocabularies: vocabulary of each input that is given strings, by its name.
          unknown: what becomes of strings that are in none.
        """
        self._signature, self._arrays = signature, arrays
        self._vocabularies = vocabularies
        self._unknown: Unknown = unknown
        self._sizes = BufferSizes()
        # One plan each: inputs may differ in their numbers of samples.
        self._plans = {
            each.name: _input_plan(each, arrays[each.ids_name].dtype == WIDE_DTYPE)
            for each in signature.inputs
            if each.kind != "array"
        }

    def arrays_of(self, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of the program.

        Args:
          arguments: a batch like the example of the export. Further inputs in its
            dicts are left alone.

        Raises:
          TypeError, ValueError: if they are others than in the example.
        """
        names = self._signature.arguments
        if len(arguments) != len(names):
            raise ExportError(
                f"The exported model takes {len(names)} arguments, {list(names)}, got "
                f"{len(arguments)}."
            )
        nest = nest_of(names, arguments)
        arrays: dict[str, np.ndarray] = {}
        for each in self._signature.inputs:
            value = _value_at(nest, each)
            if (vocabulary := self._vocabularies.get(each.name)) is not None:
                value = vocabulary.ids(value, unknown=self._unknown)
            if each.kind == "array":
                dtype = self._arrays[each.ids_name].dtype
                arrays[each.ids_name] = _as_dtype(value, dtype, each.name)
                continue
            arrays |= _arrays_of_ids(each, self._prepare(value, each))
        if arrays.keys() != self._arrays.keys():
            raise ExportError(
                "Each input must be dense or ragged, and have weights or none, as in "
                "the example of the export; the program takes the arrays "
                f"{sorted(self._arrays)}, got {sorted(arrays)}."
            )
        return arrays

    def _prepare(self, value: Any, each: Input) -> Any:
        """Returns the checked ids of an input, ragged if the program takes them so."""

        def check(ids: Any) -> Any:
            ids = {each.name: ids}
            plan = self._plans[each.name]
            return prepare_features(ids, plan, sizes=self._sizes)[each.name]

        if each.kind != "ragged_ids":
            return check(value)
        if isinstance(value, list):
            value = read_ids(value, f"feature {each.name!r}")
            value = value.ids if isinstance(value, DenseIds) else value
        if isinstance(value, np.ndarray | jax.Array):
            # Dense int64 ids may hold padding, and ragged ones may not.
            is_wide = self._arrays[each.ids_name].dtype == WIDE_DTYPE
            value = _ragged(value if is_wide else check(value))
        return check(value)


def by_input(
    vocabularies: Mapping[str, Vocabulary], signature: Signature
) -> dict[str, Vocabulary]:
    """Returns vocabularies by the names of inputs, given those of features.

    Raises:
      ExportError: if a name is not that of one input, or its value is no vocabulary, or
        has more ids than its table has rows.
    """
    found: dict[str, Vocabulary] = {}
    for name, vocabulary in vocabularies.items():
        inputs = [each for each in signature.inputs if each.name == name] or [
            each for each in signature.inputs if name in each.path[-1:]
        ]
        if len(inputs) != 1 or inputs[0].name in found:
            names = [each.name for each in inputs or signature.inputs]
            raise ExportError(
                "Each of vocabularies must be named like one input, and no two like "
                f"the same one, got {name!r}; the inputs are {names}."
            )
        size = inputs[0].vocabulary_size or math.inf
        if not isinstance(vocabulary, Vocabulary) or vocabulary.vocabulary_size > size:
            raise ExportError(
                f"vocabularies[{name!r}] must be a te.inputs.Vocabulary with at most "
                f"as many ids as its table has rows, {size}, got {vocabulary!r}; give "
                "the one that the table was trained with."
            )
        found[inputs[0].name] = vocabulary
    return found


def _value_at(nest: Any, each: Input) -> Any:
    """Returns the value of an input in the nest of the arguments."""
    for key in each.path:
        try:
            if isinstance(nest, Mapping):
                nest = {str(name): part for name, part in nest.items()}[key]
            elif isinstance(nest, Sequence) and not hasattr(nest, "_fields"):
                nest = nest[int(key)]
            else:
                nest = getattr(nest, key)
        except (LookupError, AttributeError, ValueError):
            raise ExportError(
                f"The arguments must hold the input {each.name!r}, as in the example "
                f"of the export, but {key!r} is missing."
            ) from None
    return nest


def _ragged(ids: Any) -> RaggedIds:
    """Returns samples of equal length as ragged ids."""
    valence = math.prod(ids.shape[1:])
    splits = np.arange(len(ids) + 1, dtype=np.int32) * np.int32(valence)
    return RaggedIds(values=ids.reshape(-1), row_splits=splits)


def _input_plan(each: Input, is_wide: bool) -> InputPlan:
    """Returns the rules by which the ids of an input are checked."""
    num_rows = min(each.vocabulary_size or PADDING_ROW_ID, PADDING_ROW_ID - 1)
    table = TableConfig(
        vocabulary_size=Dynamic(capacity=1) if is_wide else num_rows, dim=1
    )
    policy = "drop" if each.vocabulary_size is None else "error"
    feature = FeaturePlan(
        name=each.name,
        config=FeatureConfig(table=table, out_of_range_ids=policy),
        stack_index=0,
        row_offset=0,
        num_rows=table.max_rows,
    )
    _, tree = jax.tree.flatten({each.name: 0})
    return InputPlan(features=(feature,), feature_tree=tree, num_shards=1)


def _arrays_of_ids(each: Input, leaf: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of ids that were prepared for one shard."""
    if isinstance(leaf, ShardedRaggedIds):
        parts = {
            f"{each.name}/values": _on_host(leaf.values),
            each.row_splits_name: leaf.row_splits,
            each.weights_name: leaf.weights,
        }
        return {k: np.asarray(x)[0] for k, x in parts.items() if x is not None}
    if not isinstance(leaf, DenseIds):
        leaf = DenseIds(ids=leaf)
    parts = {each.name: _on_host(leaf.ids), each.weights_name: leaf.weights}
    return {k: np.asarray(x) for k, x in parts.items() if x is not None}


def _on_host(ids: Any) -> np.ndarray:
    """Returns ids, those of 64 bits as two words along a last axis."""
    if not isinstance(ids, Ids64):
        return np.asarray(ids)
    return np.stack([np.asarray(ids.low), np.asarray(ids.high)], axis=-1)


def _as_dtype(value: Any, dtype: Any, name: str) -> np.ndarray:
    """Converts an array, unless that would change its numbers beyond rounding."""
    array = np.asarray(value)
    converted = array.astype(dtype, casting="same_kind")
    if is_integer(converted.dtype) and (converted != array).any():
        raise ExportError(
            f"Input {name!r} must hold numbers that {dtype} can hold, got "
            f"{array.min()} to {array.max()}."
        )
    return converted
