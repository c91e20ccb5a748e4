"""Describes a program's inputs: the signature, an example, and a call's arrays.

A program takes flat arrays. An input's name is its path in the arguments. The input
`NAME` becomes the array `NAME`, or `NAME/values` and `NAME/row_splits` if it is ragged.
Its weights become `NAME/weights`. In a call, `prepare_features` checks ids, so a wrong
id raises the same error as in training. The program itself rejects wrong shapes.
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
from tpu_embedding.argument_checks import invalid
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.dynamic.ids_64 import Ids64
from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.containers import read_ids
from tpu_embedding.inputs.prepare import prepare_features
from tpu_embedding.plan.features import FeaturePlan, InputPlan
from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    is_integer,
)

InputKind = Literal["array", "dense_ids", "ragged_ids"]

WIDE_DTYPE: Final = "uint32"
"""Type of arrays that hold 64-bit ids of dynamic tables. Other arrays never have this
type. The last axis holds the two words of an id, the lower word first."""


class ExportError(ValueError):
    """Raised if a model cannot be exported, or an export cannot be read or called.

    Example:
      >>> import tpu_embedding as te
      >>> try:
      ...     te.export.load("/nowhere")
      ... except ExportError as error:
      ...     print(str(error).partition(",")[0])
      /nowhere must be a directory written by te.export
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """An input of the model."""

    # The name of the input's array. If there are several, the prefix of their names.
    name: str
    # The keys that lead to the input. If there are several arguments, the first key is
    # the argument's name. Empty if the only argument is the input itself.
    path: tuple[str, ...]
    # "dense_ids" for `DenseIds`, and for plain arrays that the model looks up.
    kind: InputKind
    # An exclusive upper bound on ids. None if ids have 64 bits, or if the model changes
    # ids before it looks them up. Also None if the program drops or clips out-of-range
    # ids.
    vocabulary_size: int | None = None

    def __post_init__(self):
        # Signatures are read from files, which may be forged.
        size = self.vocabulary_size
        is_size = size is None or (type(size) is int and size > 0)
        is_kind = self.kind in get_args(InputKind)
        if not is_kind or not isinstance(self.name, str) or not is_size:
            raise ValueError(f"an input has invalid fields: {self}")

    @property
    def ids_name(self) -> str:
        """Name of the array that holds the ids. Other inputs have just one array."""
        return f"{self.name}/values" if self.kind == "ragged_ids" else self.name

    @property
    def row_splits_name(self) -> str:
        return f"{self.name}/row_splits"

    @property
    def weights_name(self) -> str:
        return f"{self.name}/weights"

    def array_names(self, arrays: Collection[str]) -> set[str]:
        """Selects the input's arrays, given the names of all arrays."""
        names = {self.ids_name}
        if self.kind == "ragged_ids":
            names.add(self.row_splits_name)
        if self.kind != "array" and self.weights_name in arrays:
            names.add(self.weights_name)
        return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """A program's arguments and inputs."""

    arguments: tuple[str, ...]
    # The inputs have the order of the arguments' leaves.
    inputs: tuple[Input, ...]

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Reads JSON values, or raises LookupError, TypeError or ValueError."""
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
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def quoted_path(keys: Iterable[str]) -> str:
    """Joins keys with slashes. Different keys always give different strings.

    Example:
      >>> quoted_path(("features", "user/geo"))
      'features/user%2Fgeo'
    """
    # If keys could contain slashes, an input's name could equal a different input's
    # name plus a suffix, such as `/values`.
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)


def check_distinct(kind: str, names: Iterable[str]) -> None:
    """Raises ExportError if a name occurs twice."""
    repeated = sorted(k for k, n in collections.Counter(names).items() if n > 1)
    if repeated:
        rule, fix = "be distinct", "Rename a feature, table or attribute."
        raise invalid(f"Names of exported {kind}", rule, repeated, fix, ExportError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """An example batch. A later trace finds the features that look up its inputs."""

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    leaves: tuple[Any, ...]
    # The structure of the only argument, or of a dict with all arguments.
    tree: Any

    @classmethod
    def of(cls, function: Callable[..., Any], arguments: Sequence[Any]) -> Self:
        """Reads method arguments. Arrays may be `jax.ShapeDtypeStruct`s."""
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
        for input_, (_, leaf) in zip(inputs, leaves, strict=True):
            if input_.kind != "ragged_ids" and not hasattr(ids_of(leaf), "ndim"):
                rule = "be an array, RaggedIds or DenseIds"
                fix = "Use np.asarray(...), or te.RaggedIds.from_lists(...) for lists."
                owner = f"Example's input {input_.name!r}"
                raise invalid(owner, rule, leaf, fix, ExportError)
        return cls(
            arguments=names,
            inputs=inputs,
            leaves=tuple(leaf for _, leaf in leaves),
            tree=tree,
        )

    def structs(
        self, batch_size: int | None, wide: Collection[str] = ()
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes the program's arrays, with symbols for sizes that calls may change.

        If `batch_size` is None, calls may have any batch size. `wide` names additional
        inputs with 64-bit ids.
        """
        sizes = self._batch_sizes()
        # Calls may change a first axis only if it has the example's batch size, which
        # must therefore be known. If no input has the requested size, the first size in
        # `sizes` is used.
        own_size = batch_size if batch_size in sizes else sizes[0]
        # A program can't mix symbols from several scopes.
        scope = jax.export.SymbolicScope()

        def symbol(name: str) -> Any:
            return jax.export.symbolic_shape(name, scope=scope)[0]

        batch = symbol("batch") if batch_size is None else batch_size
        structs = {}
        for number, (input_, leaf) in enumerate(
            zip(self.inputs, self.leaves, strict=True)
        ):
            if input_.kind == "ragged_ids":
                samples = _num_samples(leaf)
                samples = batch if samples == own_size else samples
                shape, dtype = (symbol(f"places_{number}"),), jnp.int32
                splits = jax.ShapeDtypeStruct((samples + 1,), jnp.int32)
                structs[input_.row_splits_name] = splits
            else:
                array = ids_of(leaf)
                shape, dtype = tuple(array.shape), _served_dtype(array.dtype)
                if shape and shape[0] == own_size:
                    shape = (batch, *shape[1:])
            # Weights are described before `shape` gets the axis for the words of wide
            # ids, because an id has two words but one weight.
            if getattr(leaf, "weights", None) is not None:
                structs[input_.weights_name] = jax.ShapeDtypeStruct(shape, jnp.float32)
            if input_.name in wide or isinstance(types.ids_of(leaf), Ids64):
                shape, dtype = (*shape, 2), jnp.dtype(WIDE_DTYPE)
            structs[input_.ids_name] = jax.ShapeDtypeStruct(shape, dtype)
        return structs

    def _batch_sizes(self) -> list[int]:
        # Ragged ids know their batch size. The first axis of a dense array may be
        # something else. Integers may be ids, so they come before floats.
        ragged, ids, rest = [], [], []
        for input_, leaf in zip(self.inputs, self.leaves, strict=True):
            if input_.kind == "ragged_ids":
                ragged.append(_num_samples(leaf))
            elif (array := ids_of(leaf)).ndim:
                is_ids = jnp.issubdtype(array.dtype, jnp.integer)
                (ids if is_ids else rest).append(int(array.shape[0]))
        if not ragged + ids + rest:
            rule, fix = "have an array with a batch axis", "Pass a batch of the model."
            raise invalid(
                "te.export.save: example", rule, self.leaves, fix, ExportError
            )
        return ragged + ids + rest

    def rebuild(
        self, arrays: Mapping[str, jax.Array]
    ) -> tuple[tuple[Any, ...], dict[int, str]]:
        """Restores the arguments, and maps `id(array)` to input names."""
        leaves, owners = [], {}
        for input_ in self.inputs:
            leaf = _rebuild(input_, arrays)
            # Lookups see arrays without names, so an array's identity has to tell which
            # input it belongs to.
            owners[id(ids_of(leaf))] = input_.name
            leaves.append(leaf)
        nest = self.tree.unflatten(leaves)
        if len(self.arguments) == 1:
            return (nest,), owners
        return tuple(nest[name] for name in self.arguments), owners


def nest_of(names: Sequence[str], arguments: Sequence[Any]) -> Any:
    """Nests arguments, so that an input's path gives its name."""
    if len(arguments) == 1:
        return arguments[0]
    return dict(zip(names, arguments, strict=True))


def ids_of(leaf: Any) -> Any:
    """Reads a feature's ids, or the lower words of 64-bit ids."""
    ids = types.ids_of(leaf)
    return ids.low if isinstance(ids, Ids64) else ids


_RAGGED: Final = RaggedIds | SparseIds | ShardedRaggedIds


def _is_container(leaf: Any) -> bool:
    return isinstance(leaf, DenseIds | Ids64 | _RAGGED)


def _kind_of(leaf: Any) -> InputKind:
    if isinstance(leaf, _RAGGED):
        return "ragged_ids"
    return "dense_ids" if isinstance(leaf, DenseIds) else "array"


def _num_samples(ragged: Any) -> int:
    if isinstance(ragged, ShardedRaggedIds):
        return ragged.batch_size
    if isinstance(ragged, RaggedIds):
        return int(np.shape(ragged.row_splits)[0]) - 1
    return math.prod(np.asarray(ragged.dense_shape).tolist()[:-1])


def _served_dtype(dtype: Any) -> Any:
    # Wide integers become int32, and calls check that they fit. Even uint32 becomes
    # int32, because only words of 64-bit ids may be uint32.
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    is_wide = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize >= 4
    return jnp.dtype(jnp.int32) if is_wide else dtype


def _rebuild(input_: Input, arrays: Mapping[str, jax.Array]) -> Any:
    ids: Any = arrays[input_.ids_name]
    if ids.dtype == WIDE_DTYPE:
        ids = Ids64(high=ids[..., 1], low=ids[..., 0])
    if input_.kind == "array":
        return ids
    weights = arrays.get(input_.weights_name)
    if input_.kind == "dense_ids":
        return DenseIds(ids=ids, weights=weights)
    row_splits = arrays[input_.row_splits_name]
    return ShardedRaggedIds(
        values=jax.tree.map(lambda x: x[None], ids),
        row_splits=row_splits[None],
        weights=None if weights is None else weights[None],
        batch_size=row_splits.shape[0] - 1,
    )


class Feeder:
    """Turns call arguments into arrays, and remembers ragged buffer sizes."""

    def __init__(
        self,
        signature: Signature,
        arrays: Mapping[str, Any],
        vocabularies: Mapping[str, Vocabulary],
    ):
        # Keys in `arrays` are array names, and keys in `vocabularies` are input names.
        self._signature, self._arrays = signature, arrays
        self._vocabularies = vocabularies
        self._sizes = BufferSizes()
        # Each input has its own plan, because inputs may differ in batch size.
        self._plans = {
            input_.name: _input_plan(
                input_, arrays[input_.ids_name].dtype == WIDE_DTYPE
            )
            for input_ in signature.inputs
            if input_.kind != "array"
        }

    def arrays_of(self, arguments: Sequence[Any]) -> dict[str, np.ndarray]:
        """Converts a batch that is like the example. Extra dict keys are ignored."""
        names = self._signature.arguments
        if len(arguments) != len(names):
            rule = f"be {len(names)}, {list(names)}"
            raise invalid("Number of arguments", rule, len(arguments), kind=ExportError)
        nest = nest_of(names, arguments)
        arrays: dict[str, np.ndarray] = {}
        for input_ in self._signature.inputs:
            value = _value_at(nest, input_)
            if (vocabulary := self._vocabularies.get(input_.name)) is not None:
                value = vocabulary.ids(value)
            if input_.kind == "array":
                dtype = self._arrays[input_.ids_name].dtype
                arrays[input_.ids_name] = _as_dtype(value, dtype, input_.name)
                continue
            arrays |= _arrays_of_ids(input_, self._prepare(value, input_))
        if arrays.keys() != self._arrays.keys():
            rule = f"have the names of the export's example, {sorted(self._arrays)}"
            raise invalid("Input arrays", rule, sorted(arrays), kind=ExportError)
        return arrays

    def _prepare(self, value: Any, input_: Input) -> Any:
        """Checks ids, and makes them ragged if the program expects that."""

        def check(ids: Any) -> Any:
            ids = {input_.name: ids}
            plan = self._plans[input_.name]
            return prepare_features(ids, plan, sizes=self._sizes)[input_.name]

        if input_.kind != "ragged_ids":
            return check(value)
        if isinstance(value, list):
            value = read_ids(value, f"feature {input_.name!r}")
            value = value.ids if isinstance(value, DenseIds) else value
        if isinstance(value, np.ndarray | jax.Array):
            # Dense int64 ids may hold padding, but ragged ids may not. So dense ids are
            # checked before they become ragged.
            is_wide = self._arrays[input_.ids_name].dtype == WIDE_DTYPE
            ids: Any = value if is_wide else check(value)
            valence = math.prod(ids.shape[1:])
            row_splits = np.arange(len(ids) + 1, dtype=np.int32) * np.int32(valence)
            value = RaggedIds(values=ids.reshape(-1), row_splits=row_splits)
        return check(value)


def by_input(
    vocabularies: Mapping[str, Vocabulary], signature: Signature
) -> dict[str, Vocabulary]:
    """Maps input names to vocabularies. The given keys may also be feature names."""
    result: dict[str, Vocabulary] = {}
    for name, vocabulary in vocabularies.items():
        inputs = [input_ for input_ in signature.inputs if input_.name == name] or [
            input_ for input_ in signature.inputs if name in input_.path[-1:]
        ]
        if len(inputs) != 1 or inputs[0].name in result:
            names = [input_.name for input_ in inputs or signature.inputs]
            rule = "match exactly one input, and no two keys the same input"
            fix = f"The inputs are {names}."
            raise invalid("vocabularies: key", rule, name, fix, ExportError)
        # A larger vocabulary would produce ids that have no row.
        size = inputs[0].vocabulary_size or math.inf
        if not isinstance(vocabulary, Vocabulary) or vocabulary.vocabulary_size > size:
            rule = f"be a te.inputs.Vocabulary of at most {size} ids, its table's rows"
            fix = "Pass the vocabulary that the table was trained with."
            owner = f"vocabularies[{name!r}]"
            raise invalid(owner, rule, vocabulary, fix, ExportError)
        result[inputs[0].name] = vocabulary
    return result


def _value_at(nest: Any, input_: Input) -> Any:
    for key in input_.path:
        try:
            if isinstance(nest, Mapping):
                # Paths in a signature are strings, but dict keys may be integers.
                nest = {str(name): value for name, value in nest.items()}[key]
            elif isinstance(nest, Sequence) and not hasattr(nest, "_fields"):
                nest = nest[int(key)]
            else:
                nest = getattr(nest, key)
        except (LookupError, AttributeError, ValueError):
            rule = f"have the key {key!r}, as in the export's example"
            owner = f"Input {input_.name!r}"
            raise invalid(owner, rule, nest, kind=ExportError) from None
    return nest


def _input_plan(input_: Input, is_wide: bool) -> InputPlan:
    # Without a bound, all int32 ids pass this check, and the program drops or clips ids
    # that are out of range.
    num_rows = min(input_.vocabulary_size or PADDING_ROW_ID, PADDING_ROW_ID - 1)
    table = TableConfig(
        vocabulary_size=Dynamic(capacity=1) if is_wide else num_rows, dim=1
    )
    policy = "drop" if input_.vocabulary_size is None else "error"
    feature = FeaturePlan(
        name=input_.name,
        config=FeatureConfig(table=table, out_of_range_ids=policy),
        stack_index=0,
        row_offset=0,
        num_rows=table.max_rows,
    )
    _, tree = jax.tree.flatten({input_.name: 0})
    return InputPlan(features=(feature,), feature_tree=tree, num_shards=1)


def _arrays_of_ids(input_: Input, leaf: Any) -> dict[str, np.ndarray]:
    ids = types.ids_of(leaf)
    if isinstance(ids, Ids64):
        ids = np.stack([np.asarray(ids.low), np.asarray(ids.high)], axis=-1)
    weights = getattr(leaf, "weights", None)
    arrays = {input_.ids_name: ids, input_.weights_name: weights}
    arrays = {k: np.asarray(x) for k, x in arrays.items() if x is not None}
    if not isinstance(leaf, ShardedRaggedIds):
        return arrays
    arrays[input_.row_splits_name] = np.asarray(leaf.row_splits)
    return {k: array[0] for k, array in arrays.items()}  # There is one shard.


def _as_dtype(value: Any, dtype: Any, name: str) -> np.ndarray:
    """Converts an array, or raises if a value would change by more than rounding."""
    array = np.asarray(value)
    converted = array.astype(dtype, casting="same_kind")
    if is_integer(converted.dtype) and (converted != array).any():
        ends = [int(array.min()), int(array.max())]
        raise invalid(f"Input {name!r}", f"fit in {dtype}", ends, kind=ExportError)
    return converted
