"""Configures embedding tables, and the features that look up their rows.

Field names and meanings follow `tf.tpu.experimental.embedding`, so a TensorFlow
configuration carries over line by line. When you construct an object, one error reports
all its problems. `make_plan` then checks the features together.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import (
    BOOL_RULE,
    Problem,
    Rule,
    broken_rules,
    choice_rule,
    convert_ints,
    describe_value,
    int_rule,
    invalid,
    is_finite,
    is_int,
    optional,
    raise_all,
    right_names,
)
from tpu_embedding.initializers import Initializer, takes_key
from tpu_embedding.optimizers.resolve import optimizer_problems
from tpu_embedding.optimizers.row_optimizer import TableOptimizer
from tpu_embedding.rows.narrow_rows import NARROW_DTYPES
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.vocabularies import FixedVocabulary, Vocabulary

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import StackPlan

Combiner = Literal["sum", "mean", "sqrtn"]

OutOfRangePolicy = Literal["error", "drop", "clip"]

STORAGE_DTYPES: Final = ("float32", *NARROW_DTYPES)
"""Names of the types that `TableConfig.dtype` may have."""

MAX_VOCABULARY_SIZE: Final = PADDING_ROW_ID - 1
"""Largest number of rows: row ids are int32, and the largest int32 marks padding."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Simulated quantization of looked-up rows, before they are combined.

    Each element `x` becomes `floor((clip(x, lower, upper) - lower) / q + 0.5) * q +
    lower` with `q = (upper - lower) / (num_buckets - 1)`. Stored rows keep full
    precision. Gradients pass straight through, even for values outside the range.
    Source: TensorFlow, `optimization_parameters.proto`.

    Attributes:
      num_buckets: distinct quantized values, at least 2.
      lower: smallest quantized value.
      upper: largest quantized value, above `lower`.

    Example:
      >>> config = QuantizationConfig(num_buckets=256, lower=-1.0, upper=1.0)
      >>> TableConfig(vocabulary_size=10, dim=4, quantization_config=config).dim
      4
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self):
        convert_ints(self, "num_buckets")
        raise_all(self._problems())

    def _problems(self):
        yield from broken_rules(self, {"num_buckets": int_rule(2)})
        if not is_finite(self.lower, self.upper) or not self.lower < self.upper:
            yield Problem(
                "QuantizationConfig.lower",
                self.lower,
                "and upper must be finite with lower < upper, got "
                f"lower={self.lower!r} and upper={self.upper!r}",
            )


class Placement(abc.ABC):
    """Where table rows live on a mesh: `te.Sharded` or `te.Replicated`.

    A placement changes memory and traffic, never results.
    """

    @abc.abstractmethod
    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Picks the mesh axes that split rows, in mesh order.

        Raises:
          ValueError: if the placement names an axis that the mesh lacks.
        """

    stacking_key: Any = None
    """Hashable. Tables share a stack only if their placements have equal keys."""

    def store(
        self, stack: "StackPlan", placements: "Sequence[Placement]"
    ) -> "StackPlan":
        """Plans where a stack stores its rows, by default on the devices.

        Raises:
          ValueError: if the placement doesn't support the stack.
        """
        return stack


def _are_axes(value: Any) -> bool:
    is_names = isinstance(value, tuple) and all(isinstance(x, str) for x in value)
    return is_names and 0 < len(value) == len(set(value))


_AXES_RULE: Final = Rule(
    _are_axes,
    "a tuple of distinct mesh axis names",
    "write axes=('model',) for one axis and te.Replicated() for none",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(Placement):
    """Placement that splits a table's rows over `axes`, with copies along other axes.

    Ids and rows travel only along `axes`. Devices along the other axes sum their
    gradients, so their copies of the rows stay bitwise equal. However, on GPUs, bitwise
    equality needs `--xla_gpu_deterministic_ops=true`.

    Attributes:
      axes: mesh axis names. Defaults to all axes, so each row is on one device.

    Example:
      >>> Sharded(axes=("model",)).axes
      ('model',)
    """

    axes: tuple[str, ...] | None = None

    def __post_init__(self):
        raise_all(broken_rules(self, {"axes": optional(_AXES_RULE)}))

    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Picks the placement's axes, or all mesh axes if it names none."""
        axes = mesh_axes if self.axes is None else self.axes
        unknown = [axis for axis in axes if axis not in mesh_axes]
        if unknown:
            raise ValueError(
                f"{owner} must name axes of the mesh, {list(mesh_axes)}, got "
                f"{unknown} in {self!r}; correct the names, or leave axes out for the "
                "whole mesh."
            )
        # Equal placements share a stack, so the order of the names must not matter.
        return tuple(axis for axis in mesh_axes if axis in axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated(Placement):
    """Placement that copies a small table to every device.

    A lookup needs no communication. Each device all-gathers the gradients of all
    devices and sums them.

    Example:
      >>> table = TableConfig(vocabulary_size=7, dim=4, placement=Replicated())
      >>> table.placement
      Replicated()
    """

    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Picks no axes, because every device has all rows."""
        return ()


ChoosePlacement = Callable[[str, int], Placement]
"""Function that chooses a table's placement from its name and row count."""


def placement_of_embedding_feature(embedding_feature: Any) -> Replicated | None:
    """Translates TensorFlow's `embedding_feature` to a placement for all tables.

    If the result is None, `make_plan` chooses the placements.

    Example:
      >>> placement_of_embedding_feature("UNSUPPORTED")
      Replicated()
    """
    # TensorFlow's enum states a TPU's embedding hardware. "UNSUPPORTED" means a TPU
    # without such hardware, so tables are replicated. With V1 and V2, they are sharded
    # by default.
    name = getattr(embedding_feature, "name", embedding_feature)
    if name not in ("UNSUPPORTED", "V1", "V2", None):
        rule = "be 'UNSUPPORTED', which replicates all tables, 'V1', 'V2' or None"
        raise invalid("embedding_feature", rule, embedding_feature)
    return Replicated() if name == "UNSUPPORTED" else None


def _is_name(value: Any) -> bool:
    # Initial values depend on a hash of the name's UTF-8 bytes.
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _dtype_name(dtype: Any) -> str | None:
    try:
        return np.dtype(dtype).name
    except TypeError:
        return None


_NAME_RULE: Final = optional(Rule(_is_name, "a non-empty UTF-8 string"))

_ROWS_RULE: Final = int_rule(1, MAX_VOCABULARY_SIZE)

_TABLE_RULES: Final = {
    "vocabulary_size": Rule(
        lambda x: isinstance(x, Vocabulary) or _ROWS_RULE.is_met(x),
        f"{_ROWS_RULE.text}, or a te.Dynamic",
        "pass the number of different ids",
    ),
    "dim": int_rule(1, fix="pass the number of columns"),
    "initializer": optional(
        Rule(
            callable,
            "a function (key, shape, dtype) -> array",
            "pick one from te.initializers or jax.nn.initializers",
        )
    ),
    "combiner": choice_rule(
        get_args(Combiner),
        "to pool in another way, set FeatureConfig.max_sequence_length and pool in the "
        "model",
    ),
    "name": _NAME_RULE,
    "quantization_config": optional(
        Rule(lambda x: isinstance(x, QuantizationConfig), "a QuantizationConfig")
    ),
    "dtype": Rule(
        lambda x: _dtype_name(x) in STORAGE_DTYPES,
        f"one of {list(STORAGE_DTYPES)}",
        "bfloat16 has the size of float16 and the range of float32",
    ),
    "placement": optional(
        Rule(
            lambda x: isinstance(x, Placement),
            "a te.Sharded, te.Replicated",
            "write te.Sharded() or te.Replicated(); only make_plan takes functions",
        )
    ),
}


class _UnsaidCombiner(str):
    """The default combiner: a string that shows that the user didn't choose it."""

    # Layers warn about pooled ids, except if the user explicitly chose "mean".


@right_names(
    num_embeddings="vocabulary_size",
    input_dim="vocabulary_size",
    embedding_dim="dim",
    features="dim",
    output_dim="dim",
    param_dtype="dtype",
    embedding_init="initializer",
    embeddings_initializer="initializer",
    pooling="combiner",
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table.

    Features share a table if you pass them the same `TableConfig` object, or equal
    configs that have a name. Unnamed tables are called `table_0`, `table_1`, ... in
    the order of first use.

    Attributes:
      vocabulary_size: row count, 1 to 2**31 - 2. Pass a `te.Dynamic` if your ids can be
        any 64-bit integers.
      dim: column count, at least 1.
      initializer: function `(key, shape, dtype) -> array`, as in
        `jax.nn.initializers`. The shape is `(vocabulary_size, dim)` on any device
        count, so fan-based initializers see the whole table. Initializers from
        `tpu_embedding.initializers` need no memory for the whole table; any other
        initializer runs once for all rows. Defaults to a normal distribution with
        stddev `1 / sqrt(dim)`, truncated at two standard deviations, as in TensorFlow.
        Note that truncation reduces the deviation to 0.88 times this value.
      optimizer: optax transformation, an optimizer from `tpu_embedding.optimizers`,
        or a Keras optimizer, whose fields `make_plan` reads. A name such as
        `"adagrad"` selects an optimizer with its defaults. `optax.set_to_zero()` keeps
        the table fixed. Defaults to the layer's optimizer.
      combiner: how to pool a sample's rows: `"sum"`, `"mean"` or `"sqrtn"`. The mean is
        the sum divided by the summed weights. `"sqrtn"` divides the sum by the square
        root of the summed squared weights. A denominator of 0 gives 0. To pool in
        another way, look the feature up as a sequence and pool in the model.
      name: unique name, used in checkpoint keys and to seed the initial values.
      quantization_config: simulated quantization of looked-up rows, or None.
      dtype: storage type. Arithmetic, slot variables and activations are always
        float32. `bfloat16` halves the memory and rounds updates stochastically. `int8`
        takes about a quarter of the memory and stores a scale and a bias per row. You
        can't train int8 tables.
      placement: where the rows live, such as `te.Sharded()` or `te.Replicated()`. It
        never changes results. By default, `make_plan` decides.

    Example:
      >>> table = TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> FeatureConfig(table=table, name="watched").table.dim
      16
    """

    vocabulary_size: int | Vocabulary
    dim: int
    initializer: Initializer | None = None
    optimizer: TableOptimizer | None = None
    combiner: Combiner = cast(Combiner, _UnsaidCombiner("mean"))
    name: str | None = None
    quantization_config: QuantizationConfig | None = None
    dtype: Any = jnp.float32
    placement: Placement | None = None

    def __post_init__(self):
        convert_ints(self, "vocabulary_size", "dim")
        raise_all(self._problems())
        # Equal types have several spellings, and some differ in their hash.
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def _problems(self):
        owner = "" if self.name is None else f" for table {self.name!r}"
        yield from broken_rules(self, _TABLE_RULES, owner)
        initializer = self.initializer
        if callable(initializer) and not takes_key(initializer):
            yield Problem(
                "TableConfig.initializer",
                initializer,
                "must take (key, shape, dtype), got "
                f"{describe_value(initializer)}{inspect.signature(initializer)}{owner}"
                "; call it if it makes an initializer, as "
                "jax.nn.initializers.normal() does, or wrap it: lambda key, shape, "
                "dtype: jnp.asarray(initializer(shape), dtype)",
            )
        yield from optimizer_problems("TableConfig.optimizer", self.optimizer, owner)
        if isinstance(self.vocabulary_size, Vocabulary):
            dtype_name = _dtype_name(self.dtype)
            yield from self.vocabulary.table_problems(dtype_name, initializer, owner)

    @property
    def says_combiner(self) -> bool:
        """True if the combiner was passed explicitly."""
        return not isinstance(self.combiner, _UnsaidCombiner)

    @property
    def vocabulary(self) -> Vocabulary:
        """The map from ids to rows."""
        size = self.vocabulary_size
        return size if isinstance(size, Vocabulary) else FixedVocabulary(size)

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in use: the vocabulary size or the capacity."""
        return self.vocabulary.max_rows

    @property
    def dtype_name(self) -> str:
        """Name of the storage type, such as `"bfloat16"`."""
        return np.dtype(self.dtype).name


def _is_shape(value: Any) -> bool:
    sizes = value if isinstance(value, tuple) else (0,)
    return sizes == (-1,) or all(is_int(n) and n >= 1 for n in sizes)


_FEATURE_RULES: Final = {
    "max_sequence_length": int_rule(0, fix="0 combines the ids"),
    "validate_weights_and_indices": BOOL_RULE,
    "output_shape": optional(Rule(_is_shape, "a tuple of positive ints, (-1,)")),
    "combiner": optional(choice_rule(get_args(Combiner))),
    "name": _NAME_RULE,
    "out_of_range_ids": choice_rule(get_args(OutOfRangePolicy)),
    "expected_valence": optional(
        Rule(
            lambda x: is_finite(x) and x > 0,
            "a positive number",
            "give the mean number of ids per sample",
        )
    ),
    "find_only": BOOL_RULE,
}


@right_names(
    {"drop_nonpositive_weights": "validate_weights_and_indices"},
    sequence_length="max_sequence_length",
    **dict.fromkeys(
        ("vocabulary_size", "num_embeddings", "dim", "embedding_dim"),
        "table=te.TableConfig(vocabulary_size=..., dim=...)",
    ),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig:
    """One input column of ids, looked up in a table.

    Attributes:
      table: table that the ids index.
      max_sequence_length: 0 combines each sample's rows into one. L > 0 returns
        sequences instead: activations are `[batch, L, dim]`, and position j holds the
        row for the j-th id. (In `SparseIds`, this is the id with coordinate j.) Longer
        samples are truncated, and shorter samples are padded with zeros. The
        table's combiner has no effect on sequences, and weights raise an error.
      combiner: overrides `TableConfig.combiner` for this feature.
      validate_weights_and_indices: whether to ignore ids without a positive weight
        under `"mean"` and `"sqrtn"`. `prepare_features` rejects NaN weights; under jit,
        NaN weights make the activation NaN. The name comes from TensorFlow;
        `drop_nonpositive_weights` is an alias.
      output_shape: activation shape without the last axis, `dim`. If its sizes multiply
        to the batch size, samples are combined and reshaped. If they multiply to
        `batch * L`, samples are sequences with length L. Defaults to `(batch,)`. Pass
        `(-1,)` for `te.inputs.unique_ids`: it makes the sample count independent of the
        batch.
      default_id: row to read, with weight 1, for a sample without ids. A sample also
        counts as empty if all its ids were dropped because of their range or weight.
        The row gets the gradient of the sample. Without a default, an empty sample has
        zero activations and touches no rows.
      name: name in errors and metrics. Defaults to the path in the nest.
      out_of_range_ids: how to handle ids outside `[0, vocabulary_size)`. `"error"`
        raises in `prepare_features`. Inside jit, which cannot raise, the ids are
        dropped. `"drop"` ignores them: they add zero and update nothing. `"clip"` reads
        the nearest row. `LookupStats.out_of_range` counts them under every policy.
        However, a `Dynamic` vocabulary accepts every id except -1, which means "no id".
        There, `"error"` rejects only -1, in `prepare_features`. `"drop"` skips -1
        without counting it. `"clip"` is not supported.
      expected_valence: mean number of ids per sample, which sets a ragged feature's
        buffer size. If a shard has more ids, its buffer grows, which recompiles the
        step. If you omit this value, buffers grow as your batches need. For a feature
        from `te.inputs.unique_ids`, pass the distinct ids per device divided by the
        samples per device.
      find_only: whether `insert_ids` only finds ids and gives no rows to new ones. Use
        it if other features add the ids. Finding an id counts as a use. True needs a
        `Dynamic` vocabulary.

    Example:
      >>> table = TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> watched = FeatureConfig(table=table, combiner="sum")
      >>> latest = FeatureConfig(table=table, max_sequence_length=5)
      >>> watched.table is latest.table
      True
    """

    table: TableConfig
    max_sequence_length: int = 0
    combiner: Combiner | None = None
    validate_weights_and_indices: bool = True
    output_shape: tuple[int, ...] | None = None
    default_id: int | None = None
    name: str | None = None
    out_of_range_ids: OutOfRangePolicy = "error"
    expected_valence: float | None = None
    find_only: bool = False

    def __post_init__(self):
        convert_ints(self, "max_sequence_length", "output_shape", "default_id")
        raise_all(self._problems())

    @property
    def drop_nonpositive_weights(self) -> bool:
        """Alias of `validate_weights_and_indices`."""
        return self.validate_weights_and_indices

    @property
    def has_own_batch(self) -> bool:
        """True if the sample count is independent of the batch."""
        return self.output_shape == (-1,)

    def _problems(self):
        owner = "" if self.name is None else f" for feature {self.name!r}"
        if not isinstance(self.table, TableConfig):
            yield Problem(
                "FeatureConfig.table",
                self.table,
                f"must be a TableConfig, got {describe_value(self.table)}{owner}; "
                "write te.TableConfig("
                "vocabulary_size=..., dim=...), or one feature for each of several "
                "tables",
            )
            return
        yield from broken_rules(self, _FEATURE_RULES, owner)
        if self.output_shape is not None and self.max_sequence_length:
            yield Problem(
                "FeatureConfig.max_sequence_length",
                self.max_sequence_length,
                "has no effect with output_shape, "
                f"got {self.max_sequence_length!r} and {self.output_shape!r}{owner}; "
                "remove one of them",
            )
        for field in ("default_id", "combiner"):
            value = getattr(self, field)
            if value is not None and self.max_sequence_length:
                yield Problem(
                    f"FeatureConfig.{field}",
                    value,
                    f"has no effect on sequences, got {value!r} with "
                    f"max_sequence_length={self.max_sequence_length!r}{owner}; remove "
                    "one of them",
                )
        yield from self.table.vocabulary.feature_problems(self, owner)
        # A rule has already rejected values other than bools.
        if self.find_only is True and self.table.vocabulary.ids_are_rows:
            yield Problem(
                "FeatureConfig.find_only",
                True,
                "needs a table with a te.Dynamic vocabulary, "
                f"got True{owner}; remove it",
            )
