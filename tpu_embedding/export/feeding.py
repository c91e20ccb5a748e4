"""Turns the arguments of a call into the arrays that an exported program takes.

Inputs that hold ids are checked by `prepare_features`, so that a wrong id is refused
with the same words as in training. The program itself refuses wrong shapes.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.dynamic import Dynamic
from tpu_embedding.export.example import nest_of
from tpu_embedding.export.signature import ExportError, Input, Signature
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.forms import is_integer
from tpu_embedding.inputs.prepare import prepare_features
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.input_plan import InputPlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    Ids64,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
)


class Feeder:
    """Checks the arguments of calls, and remembers the sizes of ragged buffers."""

    def __init__(self, signature: Signature):
        self._signature = signature
        self._inputs = {each.name: each for each in signature.inputs}
        self._sizes = BufferSizes()
        # One plan each: inputs may differ in their numbers of samples.
        self._plans = {
            each.name: _input_plan(each)
            for each in signature.inputs
            if each.kind != "array"
        }

    def arrays_of(self, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of the signature.

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
        values = {name: _value_at(nest, each) for name, each in self._inputs.items()}
        for name, plan in self._plans.items():
            ids = {name: _ragged(values[name], self._inputs[name])}
            values |= prepare_features(ids, plan, sizes=self._sizes)
        arrays: dict[str, np.ndarray] = {}
        for name, each in self._inputs.items():
            parts = _parts_of_input(each, values[name])
            arrays |= each.named({k: _in_words(array) for k, array in parts.items()})
        return arrays


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


def _ragged(value: Any, each: Input) -> Any:
    """Returns lists and samples of equal length as ragged ids, if the program does."""
    if each.kind != "ragged_ids":
        return value
    if isinstance(value, list):
        return RaggedIds.from_lists(value)
    if isinstance(value, SparseIds):
        # Several axes of samples become one, in row-major order.
        *outer, last = (int(size) for size in value.dense_shape)
        *axes, places = np.asarray(value.indices).T
        samples = np.ravel_multi_index(tuple(axes), outer)
        return dataclasses.replace(
            value,
            indices=np.stack([samples, places], axis=1),
            dense_shape=(math.prod(outer), last),
        )
    if not isinstance(value, np.ndarray | jax.Array):
        return value
    valence = math.prod(value.shape[1:])
    splits = np.arange(len(value) + 1, dtype=np.int32) * np.int32(valence)
    return RaggedIds(values=value.reshape(-1), row_splits=splits)


def _input_plan(each: Input) -> InputPlan:
    """Returns the rules by which the ids of an input are checked."""
    _, tree = jax.tree.flatten({each.name: 0})
    return InputPlan(features=(_feature_plan(each),), feature_tree=tree, num_shards=1)


def _feature_plan(each: Input) -> FeaturePlan:
    """Returns the rules by which the ids of an input are checked."""
    num_rows = min(each.vocabulary_size or PADDING_ROW_ID, PADDING_ROW_ID - 1)
    table = TableConfig(
        vocabulary_size=Dynamic(capacity=1) if each.is_wide else num_rows, dim=1
    )
    policy = "drop" if each.vocabulary_size is None else "error"
    config = FeatureConfig(table=table, out_of_range_ids=policy)
    return FeaturePlan(
        name=each.name,
        config=config,
        stack_index=0,
        row_offset=0,
        num_rows=table.max_rows,
    )


def _parts_of_input(each: Input, leaf: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of one input, by the keys of `Input.parts`."""
    if each.kind == "array":
        assert each.spec is not None
        return {"": _as_dtype(leaf, each.spec.dtype, each.name)}
    weights = getattr(leaf, "weights", None)
    if (weights is not None) != each.is_weighted:
        wanted = "one weight per id" if each.is_weighted else "no weights"
        raise ExportError(
            f"Input {each.name!r} must have {wanted}, as in the example of the export."
        )
    is_ragged = isinstance(leaf, ShardedRaggedIds)
    if is_ragged != (each.kind == "ragged_ids"):
        raise ExportError(
            f"Input {each.name!r} must hold {each.kind}, as in the example of the "
            f"export, got {'ragged_ids' if is_ragged else 'dense_ids'}."
        )
    parts: dict[str, Any] = {} if weights is None else {"weights": weights}
    if is_ragged:
        parts |= {"values": _on_host(leaf.values), "row_splits": leaf.row_splits}
        return {key: np.asarray(x)[0] for key, x in parts.items()}
    parts[each.ids_part] = _on_host(leaf.ids if isinstance(leaf, DenseIds) else leaf)
    return {key: np.asarray(x) for key, x in parts.items()}


def _on_host(ids: Any) -> np.ndarray:
    """Returns ids as int32 or uint64."""
    return ids.to_numpy() if isinstance(ids, Ids64) else np.asarray(ids)


def _in_words(array: np.ndarray) -> np.ndarray:
    """Returns ids of 64 bits as two words along a last axis, all others as they are."""
    if array.dtype != np.uint64:
        return array
    words = Ids64.of_array(array)
    return np.stack([words.low, words.high], axis=-1)


def _as_dtype(value: Any, dtype: str, name: str) -> np.ndarray:
    """Converts an array, unless that would change its numbers beyond rounding."""
    array, target = np.asarray(value), np.dtype(dtype)
    if array.dtype == object or array.dtype.kind in "SUT":
        raise TypeError(f"Input {name!r} must hold numbers, got dtype {array.dtype}.")
    if is_integer(target):
        if not is_integer(array.dtype) and array.dtype != np.bool_:
            raise TypeError(
                f"Input {name!r} must hold integers, got dtype {array.dtype}."
            )
        limits = np.iinfo(target)
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ExportError(
                f"Input {name!r} must hold numbers that {target} can hold, got "
                f"{array.min()} to {array.max()}."
            )
    return array.astype(target, copy=False)
