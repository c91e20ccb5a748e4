"""The inputs of an exported program: their signature, and an example of them.

The program itself takes three dicts: the tables, the dense parameters and the arrays of
the inputs. An input is what the model's caller knows. It is one array, or, if ragged,
the arrays `NAME/values` and `NAME/row_splits`. Weights are an array `NAME/weights`.
NAME is the path of the input in the arguments, with `%2F` for a slash in a key and
`%25` for a percent sign. No input is inside another, so no two arrays have the same
name. Their shapes and dtypes are as the program takes them.
"""

import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self, get_args

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from tpu_embedding import types
from tpu_embedding.dynamic.ids_64 import Ids64
from tpu_embedding.types import DenseIds, ShardedRaggedIds

InputKind = Literal["array", "dense_ids", "ragged_ids"]

WIDE_DTYPE: Final = "uint32"
"""Type of the words of ids of 64 bits, which dynamic tables take. The last axis of
their array has the eight bytes of an id as two words, the lower one first. No other
array has this type."""


class ExportError(ValueError):
    """Raised if a model cannot be exported, or an export cannot be read or called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """An input of the model.

    Attributes:
      name: name of its array, or the start of the names of several.
      path: keys that lead to the input: the name of its argument, if there are several,
        and then the keys in the argument. Empty for a bare argument.
      kind: ids that the program was traced to look up, ragged ids, or another array.
      vocabulary_size: ids must be below it; None if ids beyond it are left out or
        clipped, or have 64 bits, or the model computes with them first.

    Raises:
      ValueError: if a field is of another type.
    """

    name: str
    path: tuple[str, ...]
    kind: InputKind
    vocabulary_size: int | None = None

    def __post_init__(self):
        size = self.vocabulary_size
        is_size = size is None or (type(size) is int and size > 0)
        is_kind = self.kind in get_args(InputKind)
        if not is_kind or not isinstance(self.name, str) or not is_size:
            raise ValueError(f"no input has these fields: {self}")

    @property
    def ids_name(self) -> str:
        """Name of the array of ids, or of the only array."""
        return f"{self.name}/values" if self.kind == "ragged_ids" else self.name

    @property
    def row_splits_name(self) -> str:
        """Name of the row splits of ragged ids."""
        return f"{self.name}/row_splits"

    @property
    def weights_name(self) -> str:
        """Name of the weights, if there are any."""
        return f"{self.name}/weights"

    def array_names(self, arrays: Collection[str]) -> set[str]:
        """Returns the names of its arrays, given all arrays of the program."""
        names = {self.ids_name}
        if self.kind == "ragged_ids":
            names.add(self.row_splits_name)
        if self.kind != "array" and self.weights_name in arrays:
            names.add(self.weights_name)
        return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs of an exported program.

    Attributes:
      arguments: names of the arguments of the model.
      inputs: inputs of the model, in the order of their names in the arguments.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Reads a signature that `dataclasses.asdict` and JSON wrote.

        Raises:
          LookupError, TypeError, ValueError: if it is none.
        """
        inputs = tuple(
            Input(**{**entry, "path": _texts(entry["path"])})
            for entry in value["inputs"]
        )
        return cls(arguments=_texts(value["arguments"]), inputs=inputs)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"a signature needs lists of names, got {value!r}")
    return tuple(value)


def keys_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the keys of a path in a pytree as strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def quoted_path(keys: Iterable[str]) -> str:
    """Joins keys by slashes, so that other keys never give the same text.

    Example:
      >>> quoted_path(("features", "user/geo"))
      'features/user%2Fgeo'
    """
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)


def refuse_repeated(kind: str, names: Iterable[str]) -> None:
    """Rejects two things of the same name.

    Args:
      kind: names the things in the error.
      names: name of each.

    Raises:
      ExportError: if a name comes twice.
    """
    repeated = sorted(k for k, n in collections.Counter(names).items() if n > 1)
    if repeated:
        raise ExportError(
            f"The {kind} of an export must have different names, but several have "
            f"the name {', '.join(map(repr, repeated))}; rename a feature, table or "
            "attribute."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """The inputs of a model, and the nest of arguments that they make.

    Attributes:
      arguments: names of the arguments.
      inputs: in the order of the leaves of the nest, without lookups.
      leaves: array or feature of each input.
      tree: structure of the nest: the only argument, or a dict of all.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    leaves: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Sequence[Any]) -> Self:
        """Reads the arguments of a call.

        Args:
          function: method of the model.
          arguments: positional arguments, whose arrays may be `jax.ShapeDtypeStruct`.

        Raises:
          ExportError: if a leaf is no input.
          TypeError: if the arguments do not fit the method.
        """
        names = tuple(inspect.signature(function).bind(*arguments).arguments)
        nest = nest_of(names, arguments)
        leaves, tree = jax.tree_util.tree_flatten_with_path(nest, is_leaf=_is_container)
        paths = [keys_of(path) for path, _ in leaves]
        inputs = tuple(
            Input(
                name=quoted_path(path) if path else names[0],
                path=path,
                kind=_kind_of(leaf),
            )
            for path, (_, leaf) in zip(paths, leaves, strict=True)
        )
        for each, (_, leaf) in zip(inputs, leaves, strict=True):
            if each.kind != "ragged_ids" and not hasattr(ids_of(leaf), "shape"):
                raise ExportError(
                    f"Input {each.name!r} of the example must be an array, RaggedIds "
                    f"or DenseIds, as it is before prepare, got {type(leaf).__name__}; "
                    "write np.asarray(...) for numbers, te.RaggedIds.from_lists(...) "
                    "for lists of ids."
                )
        return cls(
            arguments=names,
            inputs=inputs,
            leaves=tuple(leaf for _, leaf in leaves),
            tree=tree,
        )

    def structs(
        self, batch_size: int | None, wide: Collection[str] = ()
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the program's arrays, with a symbol per free size.

        Args:
          batch_size: samples that the export is made for; None: any. If no input has as
            many, those of the first feature are the batch of the example.
          wide: names of inputs whose ids have 64 bits, beside those that have already.

        Raises:
          ExportError: if no input has an axis of samples.
        """
        found = self._samples()
        own_size = batch_size if batch_size in found else found[0]
        scope = jax.export.SymbolicScope()

        def symbol(name: str) -> Any:
            return jax.export.symbolic_shape(name, scope=scope)[0]

        batch = symbol("batch") if batch_size is None else batch_size
        structs = {}
        for number, (each, leaf) in enumerate(
            zip(self.inputs, self.leaves, strict=True)
        ):
            if each.kind == "ragged_ids":
                samples = _num_samples(leaf)
                samples = batch if samples == own_size else samples
                shape, dtype = (symbol(f"places_{number}"),), jnp.int32
                splits = jax.ShapeDtypeStruct((samples + 1,), jnp.int32)
                structs[each.row_splits_name] = splits
            else:
                array = ids_of(leaf)
                shape, dtype = tuple(array.shape), _served_dtype(array.dtype)
                if shape and shape[0] == own_size:
                    shape = (batch, *shape[1:])
            if getattr(leaf, "weights", None) is not None:
                structs[each.weights_name] = jax.ShapeDtypeStruct(shape, jnp.float32)
            if each.name in wide or isinstance(types.ids_of(leaf), Ids64):
                shape, dtype = (*shape, 2), jnp.dtype(WIDE_DTYPE)
            structs[each.ids_name] = jax.ShapeDtypeStruct(shape, dtype)
        return structs

    def _samples(self) -> list[int]:
        """Returns the samples of each input: ragged features, other ids, others."""
        ragged, ids, others = [], [], []
        for each, leaf in zip(self.inputs, self.leaves, strict=True):
            if each.kind == "ragged_ids":
                ragged.append(_num_samples(leaf))
            elif (array := ids_of(leaf)).ndim:
                is_ids = jnp.issubdtype(array.dtype, jnp.integer)
                (ids if is_ids else others).append(int(array.shape[0]))
        if not ragged + ids + others:
            raise ExportError(
                "The example must hold at least one array with an axis of samples; "
                "pass a batch as the model takes it."
            )
        return ragged + ids + others

    def rebuild(
        self, arrays: Mapping[str, jax.Array]
    ) -> tuple[tuple[Any, ...], dict[int, str]]:
        """Puts the arrays of a program back into the arguments of the model.

        A lookup gets an array of ids without its name. So the second result finds the
        input that an array belongs to by the identity of the array.

        Args:
          arrays: all arrays that `structs` names.

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
    ids = types.ids_of(leaf)
    return ids.low if isinstance(ids, Ids64) else ids


def _is_container(leaf: Any) -> bool:
    return isinstance(leaf, DenseIds | Ids64) or _is_ragged(leaf)


def _is_ragged(leaf: Any) -> bool:
    is_mapping = isinstance(leaf, Mapping)
    names = ("row_splits", "dense_shape")
    return not is_mapping and any(hasattr(leaf, name) for name in names)


def _kind_of(leaf: Any) -> InputKind:
    if _is_ragged(leaf):
        return "ragged_ids"
    return "dense_ids" if isinstance(leaf, DenseIds) else "array"


def _num_samples(ragged: Any) -> int:
    if isinstance(ragged, ShardedRaggedIds):
        return ragged.batch_size
    if hasattr(ragged, "row_splits"):
        return int(np.shape(ragged.row_splits)[0]) - 1
    return math.prod(np.asarray(ragged.dense_shape).tolist()[:-1])


def _served_dtype(dtype: Any) -> Any:
    """Returns the type of an array of the program; `load` checks the range of ids."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    is_wide = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return jnp.dtype(jnp.int32) if is_wide else dtype


def _rebuild(each: Input, arrays: Mapping[str, jax.Array]) -> Any:
    """Returns the leaf of the model's arguments for one input."""
    ids: Any = arrays[each.ids_name]
    if ids.dtype == WIDE_DTYPE:
        ids = Ids64(high=ids[..., 1], low=ids[..., 0])
    if each.kind == "array":
        return ids
    weights = arrays.get(each.weights_name)
    if each.kind == "dense_ids":
        return DenseIds(ids=ids, weights=weights)
    row_splits = arrays[each.row_splits_name]
    return ShardedRaggedIds(
        values=jax.tree.map(lambda x: x[None], ids),
        row_splits=row_splits[None],
        weights=None if weights is None else weights[None],
        batch_size=row_splits.shape[0] - 1,
    )
