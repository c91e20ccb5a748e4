"""Reads an example of a model's arguments: the names, kinds and sizes of its inputs.

Only shapes and dtypes of the example matter. Inputs are named by their path.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.export.signature import (
    BATCH,
    ArraySpec,
    ExportError,
    Input,
    keys_of,
    refuse_repeated,
)
from tpu_embedding.types import DenseIds, Ids64, ShardedRaggedIds, UniqueIds

_WIDE: Final = "int64"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """The inputs of a model, and the nest of arguments that they make.

    Attributes:
      arguments: names of the arguments.
      inputs: in the order of the leaves of the nest, without lookups.
      tree: structure of the nest: the only argument, or a dict of all.
      batch_size: samples of the example.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    tree: Any
    batch_size: int

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        batch_size: int | None = None,
    ) -> Self:
        """Reads the arguments of a call.

        Args:
          function: method of the model.
          arguments: positional arguments, whose arrays may be `jax.ShapeDtypeStruct`.
          batch_size: samples that the export is made for, or None. If no input has as
            many, those of the first feature are the batch of the example.

        Raises:
          ExportError: if the arguments do not fit the method, or a leaf is no input.
        """
        try:
            bound = inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise ExportError(
                f"The example must be the arguments of the model's method: {error}."
            ) from None
        names = tuple(bound.arguments)
        if len(names) != len(arguments):
            names = tuple(f"argument_{i}" for i in range(len(arguments)))
        nest = nest_of(names, arguments)
        leaves, tree = jax.tree_util.tree_flatten_with_path(nest, is_leaf=_is_container)
        paths = [keys_of(path) for path, _ in leaves]
        input_names = ["/".join(path) if path else names[0] for path in paths]
        refuse_repeated("inputs", input_names)
        by_name = {k: leaf for k, (_, leaf) in zip(input_names, leaves, strict=True)}
        if not by_name:
            raise ExportError(
                "The example must hold at least one array, got none; pass a batch as "
                "the model takes it."
            )
        for name, leaf in by_name.items():
            _check_numbers(name, leaf)
        samples = _samples(list(by_name.values()))
        if batch_size not in samples:
            batch_size = samples[0]
        inputs = tuple(
            _input(name, path, leaf, batch_size)
            for path, (name, leaf) in zip(paths, by_name.items(), strict=True)
        )
        return cls(arguments=names, inputs=inputs, tree=tree, batch_size=batch_size)

    def with_wide(self, names: Collection[str]) -> Self:
        """Returns the example with ids of 64 bits in some inputs."""

        def widen(each: Input) -> Input:
            if each.name not in names:
                return each
            spec = each.spec and dataclasses.replace(each.spec, dtype=_WIDE)
            return dataclasses.replace(each, is_wide=True, spec=spec)

        return dataclasses.replace(self, inputs=tuple(map(widen, self.inputs)))

    def rebuild(
        self, arrays: Mapping[str, jax.Array]
    ) -> tuple[tuple[Any, ...], dict[int, str]]:
        """Puts the arrays of a program back into the arguments of the model.

        A lookup gets an array of ids without its name. So the second result finds the
        input that an array belongs to by the identity of the array.

        Args:
          arrays: all arrays that `Input.arrays` names, for all inputs.

        Returns:
          The arguments, and `id(array)` to the name of the input for arrays of ids.
        """
        leaves, owners = [], {}
        for each in self.inputs:
            leaf = _rebuild(each, arrays)
            owners[id(ids_of(leaf))] = each.name
            leaves.append(leaf)
        nest = self.tree.unflatten(leaves)
        if len(self.arguments) == 1:
            return (nest,), owners
        return tuple(nest[name] for name in self.arguments), owners


def nest_of(names: Sequence[str], arguments: Sequence[Any]) -> Any:
    """Returns the nest whose paths name the inputs."""
    if len(arguments) == 1:
        return arguments[0]
    return dict(zip(names, arguments, strict=True))


def ids_of(leaf: Any) -> Any:
    """Returns the array of ids of a feature, without weights or row splits.

    Of ids of 64 bits, it returns the lower words.
    """
    ids = _all_ids_of(leaf)
    return ids.low if isinstance(ids, Ids64) else ids


def _all_ids_of(leaf: Any) -> Any:
    if isinstance(leaf, ShardedRaggedIds):
        return leaf.values
    return leaf.ids if isinstance(leaf, DenseIds) else leaf


def is_wide(leaf: Any) -> bool:
    """Returns True if the ids of a feature have 64 bits."""
    return isinstance(_all_ids_of(leaf), Ids64)


def _is_container(leaf: Any) -> bool:
    return isinstance(leaf, DenseIds | UniqueIds | Ids64) or _is_ragged(leaf)


def _is_ragged(leaf: Any) -> bool:
    if isinstance(leaf, Mapping):
        return False
    is_sparse = all(hasattr(leaf, x) for x in ("indices", "values", "dense_shape"))
    return is_sparse or (hasattr(leaf, "values") and hasattr(leaf, "row_splits"))


def _check_numbers(name: str, leaf: Any) -> None:
    if isinstance(leaf, UniqueIds):
        raise ExportError(
            f"Input {name!r} of the example is prepared for the devices of a training; "
            "give the ids as they were before prepare: arrays or RaggedIds."
        )
    if _is_ragged(leaf):
        return
    array = ids_of(leaf)
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        raise ExportError(
            f"Input {name!r} of the example must be an array, RaggedIds or DenseIds, "
            f"got {type(array).__name__}; write np.asarray(...) for numbers, "
            "te.RaggedIds.from_lists(...) for lists of ids."
        )
    if array.dtype == object or array.dtype.kind in "SUT":
        raise ExportError(
            f"Input {name!r} of the example must hold numbers, got dtype "
            f"{array.dtype}; turn strings into ids first."
        )


def _samples(leaves: Sequence[Any]) -> list[int]:
    """Returns the samples of each input: ragged features, other ids, other arrays."""
    ragged = [_num_samples(leaf) for leaf in leaves if _is_ragged(leaf)]
    arrays = [ids_of(leaf) for leaf in leaves if not _is_ragged(leaf)]
    arrays = [array for array in arrays if array.ndim]
    arrays.sort(key=lambda array: not jnp.issubdtype(array.dtype, jnp.integer))
    samples = [*ragged, *(int(array.shape[0]) for array in arrays)]
    if not samples:
        raise ExportError(
            "The example must hold an array with an axis of samples, got scalars only."
        )
    return samples


def _num_samples(ragged: Any) -> int:
    if isinstance(ragged, ShardedRaggedIds):
        return ragged.batch_size
    if hasattr(ragged, "row_splits"):
        return int(np.shape(ragged.row_splits)[0]) - 1
    return math.prod(np.asarray(ragged.dense_shape).tolist()[:-1])


def _input(name: str, path: tuple[str, ...], leaf: Any, batch_size: int) -> Input:
    is_weighted = getattr(leaf, "weights", None) is not None
    if _is_ragged(leaf):
        num_samples = _num_samples(leaf)
        return Input(
            name=name,
            path=path,
            kind="ragged_ids",
            is_weighted=is_weighted,
            num_samples=BATCH if num_samples == batch_size else num_samples,
            spec=None,
            is_wide=is_wide(leaf),
        )
    kind = "dense_ids" if isinstance(leaf, DenseIds) else "array"
    array = ids_of(leaf)
    shape = tuple(array.shape)
    if shape and shape[0] == batch_size:
        shape = (BATCH, *shape[1:])
    # JAX would keep 64-bit numbers in 32 bits; `load` refuses those that do not fit.
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4:
        dtype = np.dtype(np.int32)
    spec = ArraySpec(shape=shape, dtype=_WIDE if is_wide(leaf) else str(dtype))
    return Input(
        name=name,
        path=path,
        kind=kind,
        is_weighted=is_weighted,
        num_samples=shape[0] if shape else 0,
        spec=spec,
        is_wide=is_wide(leaf),
    )


def _rebuild(each: Input, arrays: Mapping[str, jax.Array]) -> Any:
    """Returns the leaf of the model's arguments for one input."""
    parts: dict[str, Any] = {k: arrays[name] for k, name in each.named_parts.items()}
    ids: Any = parts[each.ids_part]
    weights = parts.get("weights")
    if each.is_wide:
        ids = Ids64(high=ids[..., 1], low=ids[..., 0])
    if each.spec is None:
        row_splits = parts["row_splits"]
        return ShardedRaggedIds(
            values=jax.tree.map(lambda x: x[None], ids),
            row_splits=row_splits[None],
            weights=None if weights is None else weights[None],
            batch_size=row_splits.shape[0] - 1,
        )
    return ids if each.kind == "array" else DenseIds(ids=ids, weights=weights)
