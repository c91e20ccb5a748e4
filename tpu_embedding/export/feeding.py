"""Turns the arguments of a call into the arrays that an exported program takes.

Inputs that are looked up are checked by `prepare_features`, so that a wrong id is
refused with the same words as in training.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.dynamic import Dynamic
from tpu_embedding.export.example import nest_of
from tpu_embedding.export.signature import (
    BATCH,
    ROW_SPLITS,
    ExportError,
    Input,
    Signature,
)
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.forms import is_integer
from tpu_embedding.inputs.prepare import prepare_features
from tpu_embedding.inputs.wide_ids import padding_of
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.input_plan import InputPlan
from tpu_embedding.types import PADDING_ROW_ID, DenseIds, Ids64, ShardedRaggedIds


class Feeder:
    """Checks the arguments of calls, and remembers the sizes of ragged buffers."""

    def __init__(self, signature: Signature):
        self._signature = signature
        self._by_name = {each.name: each for each in signature.inputs}
        self._by_path = {each.path: each.name for each in signature.inputs}
        self._sizes = BufferSizes()
        self._plan = _input_plan(signature.inputs)
        self._arrays = signature.arrays

    def arrays_of(self, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns the arrays of `Signature.arrays`.

        Args:
          arguments: a batch like the example of the export.

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
        values = dict(self._leaves(nest, ()))
        missing = [name for name in self._by_name if name not in values]
        if missing:
            raise ExportError(
                f"The arguments must hold all inputs of the export, but {missing} are "
                f"missing; its inputs are {list(self._by_name)}."
            )
        prepared = self._prepared(values)
        arrays: dict[str, np.ndarray] = {}
        for name, each in self._by_name.items():
            parts = _parts_of_input(each, prepared.get(name, values[name]))
            arrays |= each.named({k: _in_words(array) for k, array in parts.items()})
        self._check_shapes(arrays)
        return arrays

    def _leaves(self, nest: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Yields the name and value of each input of a nest."""
        if path in self._by_path:
            yield self._by_path[path], nest
            return
        if nest is None:
            return
        if isinstance(nest, Mapping):
            parts = {str(key): part for key, part in nest.items()}
        elif isinstance(nest, tuple) and hasattr(nest, "_fields"):
            parts = nest._asdict()  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(nest, list | tuple):
            parts = {str(i): part for i, part in enumerate(nest)}
        elif dataclasses.is_dataclass(nest):
            parts = {f.name: getattr(nest, f.name) for f in dataclasses.fields(nest)}
        else:
            raise ExportError(
                f"The exported model has no input {'/'.join(path)!r}; its inputs are "
                f"{list(self._by_name)}."
            )
        for key, part in parts.items():
            yield from self._leaves(part, (*path, key))

    def _prepared(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Checks the inputs that hold ids; ragged ones get a buffer for one shard."""
        nest = {k: values[k] for k, x in self._by_name.items() if x.kind != "array"}
        return prepare_features(nest, self._plan, sizes=self._sizes) if nest else {}

    def _check_shapes(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Refuses arrays of other shapes, and inputs of unequal batches."""
        batch_size = self._signature.batch_size
        first = "the export's batch_size"
        for name, spec in self._arrays.items():
            shape = arrays[name].shape
            fits = len(shape) == len(spec.shape) and all(
                isinstance(want, str) or want == got
                for want, got in zip(spec.shape, shape, strict=True)
            )
            if not fits:
                raise ExportError(
                    f"Input {name!r} must have shape {_shown(spec.shape)}, got "
                    f"{_shown(shape)}."
                )
            if not spec.shape or spec.shape[0] not in (BATCH, ROW_SPLITS):
                continue
            samples = shape[0] - (spec.shape[0] == ROW_SPLITS)
            if batch_size is None:
                batch_size, first = samples, f"input {name!r}"
            if samples != batch_size:
                raise ExportError(
                    "All inputs must have the same number of samples, got "
                    f"{batch_size} for {first} and {samples} for input {name!r}."
                )


def _input_plan(inputs: Sequence[Input]) -> InputPlan:
    """Returns the rules by which all inputs that hold ids are checked."""
    by_name = {each.name: each for each in inputs if each.kind != "array"}
    _, tree = jax.tree.flatten(dict.fromkeys(by_name, 0))
    return InputPlan(
        features=tuple(_feature_plan(by_name[name]) for name in sorted(by_name)),
        feature_tree=tree,
        num_shards=1,
    )


def _feature_plan(each: Input) -> FeaturePlan:
    """Returns the rules by which the ids of an input are checked."""
    if not each.lookups and each.is_wide:
        table = TableConfig(vocabulary_size=Dynamic(capacity=1), dim=1)
        return _whole_table(each.name, FeatureConfig(table=table))
    if not each.lookups:
        # The model computes with the ids, so any int32 may be right.
        table = TableConfig(vocabulary_size=PADDING_ROW_ID, dim=1)
        config = FeatureConfig(table=table, out_of_range_ids="drop")
        return _whole_table(each.name, config)
    # Ids that go to several tables must lie in the smallest.
    lookup = min(each.lookups, key=lambda lookup: lookup.vocabulary_size)
    combiner: Any = lookup.combiner
    if lookup.max_valence is not None:
        combiner = CustomCombiner(function=_first_row, max_valence=lookup.max_valence)
    num_rows = lookup.vocabulary_size
    table = TableConfig(
        vocabulary_size=Dynamic(capacity=num_rows) if each.is_wide else num_rows,
        dim=1,
        combiner=combiner,
        name=lookup.table,
    )
    config = FeatureConfig(
        table=table,
        max_sequence_length=lookup.max_sequence_length,
        output_shape=lookup.output_shape,
        out_of_range_ids=lookup.out_of_range_ids,
        default_id=lookup.default_id,
    )
    return _whole_table(lookup.feature, config)


def _whole_table(name: str, config: FeatureConfig) -> FeaturePlan:
    num_rows = config.tables[0].max_rows
    return FeaturePlan(
        name=name, config=config, stack_index=0, row_offset=0, num_rows=num_rows
    )


def _first_row(valence: Any, rows: Any) -> Any:
    """Stands for the combiner, which the program contains."""
    del valence
    return rows[0]


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
    if isinstance(leaf, ShardedRaggedIds):
        if each.spec is not None:
            raise ExportError(
                f"Input {each.name!r} must be an array of shape "
                f"{_shown(each.spec.shape)}, got ragged ids; export the model with "
                "RaggedIds in the example."
            )
        parts = {"values": _on_host(leaf.values)[0], "row_splits": leaf.row_splits[0]}
        if weights is not None:
            parts["weights"] = weights[0]
        return {key: np.asarray(x) for key, x in parts.items()}
    ids = _on_host(leaf.ids if isinstance(leaf, DenseIds) else leaf)
    if each.spec is None:
        return _ragged_of_dense(ids, weights)
    parts = {} if weights is None else {"weights": np.asarray(weights)}
    return {each.ids_part: ids, **parts}


def _on_host(ids: Any) -> np.ndarray:
    """Returns ids as int32 or uint64."""
    return ids.to_numpy() if isinstance(ids, Ids64) else np.asarray(ids)


def _in_words(array: np.ndarray) -> np.ndarray:
    """Returns ids of 64 bits as two words along a last axis, all others as they are."""
    if array.dtype != np.uint64:
        return array
    words = Ids64.of_array(array)
    return np.stack([words.low, words.high], axis=-1)


def _ragged_of_dense(ids: np.ndarray, weights: Any) -> dict[str, np.ndarray]:
    """Returns samples of equal length as ragged ids."""
    num_samples, valence = ids.shape[0], math.prod(ids.shape[1:])
    # A program has at least one place for ids.
    missing = 1 if ids.size == 0 else 0
    splits = np.arange(num_samples + 1, dtype=np.int32) * np.int32(valence)
    padding = padding_of(ids.dtype)
    values = np.pad(ids.reshape(-1), (0, missing), constant_values=padding)
    parts = {"values": values, "row_splits": splits}
    if weights is not None:
        parts["weights"] = np.pad(np.asarray(weights).reshape(-1), (0, missing))
    return parts


def _as_dtype(value: Any, dtype: str, name: str) -> np.ndarray:
    """Converts an array, unless that would change its numbers beyond rounding."""
    array = np.asarray(value)
    if array.dtype == object or array.dtype.kind in "SUT":
        raise TypeError(f"Input {name!r} must hold numbers, got dtype {array.dtype}.")
    target = np.dtype(dtype)
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


def _shown(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
