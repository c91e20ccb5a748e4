"""Arithmetic on the gradients of whole models, dense and sparse.

A table's gradient is not an array, so `optax.global_norm` and arithmetic in
`jax.tree.map` raise errors. Instead, call these functions on any pytree of
`TableGradients` and dense arrays, such as `Gradients` or your own dict.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from tpu_embedding.argument_checks import check_scalar, describe_value, invalid
from tpu_embedding.lookup._backward import (
    gradient_rounds,
    join_gradients,
    merge,
    scale_gradient,
)
from tpu_embedding.optimizers.checks import check_hyperparameters, positive_bound
from tpu_embedding.optimizers.row_optimizer import InSequence
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.report import count_of, summarize
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.row_gradients import (
    GUARD,
    RowGradients,
    Sealed,
    WithoutOperators,
)
from tpu_embedding.types import RowUpdates
from tpu_embedding.xla import run_if

__all__ = [
    "Gradients",
    "TableGradients",
    "add",
    "all_finite",
    "clip_by_global_norm",
    "global_norm",
    "is_whole",
    "scale",
    "update_if",
]

T = TypeVar("T")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class TableGradients(WithoutOperators):
    """Sparse table gradients, stored on the devices that hold the samples.

    The leaves include row ids, so arithmetic on them raises an error. Use `add`,
    `scale`, `global_norm` and `clip_by_global_norm` from this module.

    Attributes:
      stacks: stack name to sealed gradient.
      plan: plan of the lookup.
      guard: first leaf of the pytree. It is False, or an array of False if
        `jax.lax.scan` stacked the gradients.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> result = te.functional.lookup(tables, jnp.array([1, 2]), plan)
      >>> ones = jnp.ones((2, 4))
      >>> gradients = te.functional.compute_gradients(result.routing, ones, plan)
      >>> float(te.gradients.global_norm(gradients))
      2.8284270763397217
    """

    stacks: dict[str, Sealed]
    plan: EmbeddingPlan
    guard: Any = dataclasses.field(default_factory=lambda: GUARD, compare=False)

    def tree_flatten_with_keys(self) -> Any:
        """Lists the children with their keys, for JAX."""
        # Arithmetic must reach the guard first: its error names the right functions.
        keys = map(jax.tree_util.GetAttrKey, ("guard", "stacks"))
        return tuple(zip(keys, (self.guard, self.stacks), strict=True)), self.plan

    @classmethod
    def tree_unflatten(cls, plan: EmbeddingPlan, parts: Any) -> "TableGradients":
        """Rebuilds the gradients from their children, for JAX."""
        guard, stacks = parts
        # JAX functions return the guard as a plain array; `jax.lax.scan` stacks guards.
        return cls(stacks, plan, guard if getattr(guard, "ndim", 0) else GUARD)

    def __repr__(self) -> str:
        return f"TableGradients({summarize(self.plan)})"

    def row_updates(self, stack_name: str) -> RowUpdates:
        """Collects a stack's gradient by row, as global arrays.

        However, rows from later exchange rounds are missing. With `in_sequence`
        optimizers, each occurrence of an id has its own entry.
        """
        return _row_updates(self, stack_name)


class _DenseKey(str):
    """The key of dense gradients, which raises when `nnx.Optimizer` hashes it."""

    def __hash__(self) -> int:
        raise TypeError(
            "nnx.Optimizer and nnx.split cannot take the gradients of "
            "te.value_and_grad, which have sparse gradients of tables. Write optimizer "
            "= te.Optimizer(model, tx), then optimizer.update(model, gradients)."
        )


_DENSE = jax.tree_util.GetAttrKey(_DenseKey("dense"))


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients(WithoutOperators):
    """Gradients of a whole model, from `tpu_embedding.value_and_grad`.

    Attributes:
      dense: gradients of the dense parameters, as Flax or JAX structures them.
      tables: layer path to sparse table gradients. If your loss didn't call a layer,
        its gradients contain no stacks.

    Example:
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> model = nnx.Dict(movie=layer)
      >>> gradients = te.grad(lambda m: m["movie"](jnp.array([1])).sum())(model)
      >>> list(gradients.tables)
      ['movie']
    """

    dense: Any
    tables: dict[str, TableGradients]

    def __getattribute__(self, name: str) -> Any:
        if name in ("dense", "tables"):  # `__del__` checks what was read.
            object.__setattr__(self, f"_read_{name}", True)
        return object.__getattribute__(self, name)

    def __del__(self) -> None:
        # Otherwise tables would silently stay untrained, as under `nnx.Optimizer`.
        facts = vars(self)  # Attribute access would count as reading.
        if "_read_dense" not in facts or "_read_tables" in facts:
            return
        if any(table.stacks for table in facts.get("tables", {}).values()):
            warnings.warn(
                "The gradients of the tables were never used, only gradients.dense. An "
                "nnx.Optimizer does not train tables. Write optimizer = te.Optimizer("
                "model, tx), then optimizer.update(model, gradients).",
                stacklevel=2,
            )

    def tree_flatten_with_keys(self) -> Any:
        """Lists the children with their keys, for JAX."""
        tables = (jax.tree_util.GetAttrKey("tables"), self.tables)
        return ((_DENSE, self.dense), tables), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> "Gradients":
        """Rebuilds the gradients from their children, for JAX."""
        return cls(dense=parts[0], tables=parts[1])

    def __getitem__(self, name: str) -> Any:
        """Looks up a layer path in `tables`, or a key such as `"linear"` in `dense`."""
        if name in self.tables:
            return self.tables[name]
        dense = self.dense if isinstance(self.dense, Mapping) else {}
        if name not in dense:
            rule = f"have the dense parts {sorted(dense)} or the layers "
            rule += f"{sorted(self.tables)}"
            raise invalid("gradients", rule, name, kind=KeyError)
        return dense[name]

    def __repr__(self) -> str:
        sizes = [getattr(leaf, "size", 1) for leaf in jax.tree.leaves(self.dense)]
        dense = f"{count_of(len(sizes), 'array')} of {count_of(sum(sizes), 'number')}"
        return f"Gradients(dense={dense}, tables={self.tables})"


def global_norm(gradients: Any) -> Float[Array, ""]:
    """Computes one norm over all gradients, tables and dense arrays together.

    Args:
      gradients: pytree of arrays and `TableGradients`, such as the gradients from
        `tpu_embedding.value_and_grad`.

    Returns:
      Square root of the summed squares; float32. Each touched row counts once, with its
      summed gradient, even with `in_sequence` optimizers.

    Example:
      >>> import jax.numpy as jnp
      >>> float(global_norm({"kernel": jnp.array([3.0, 4.0])}))
      5.0
    """
    return jnp.sqrt(_total(gradients, _sum_of_squares))


def all_finite(gradients: Any) -> Bool[Array, ""]:
    """Checks that no gradient is NaN or infinite.

    Args:
      gradients: see `global_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> bool(all_finite({"kernel": jnp.array([3.0, jnp.inf])}))
      False
    """
    return _total(gradients, _num_not_finite) == 0


def is_whole(gradients: Any) -> Bool[Array, ""]:
    """Checks that the lookups could read all rows of their batches.

    The result can be False only with a backend that has no fallback for ids beyond its
    limits. A lookup that can't read all rows returns NaN, and `te.Optimizer` and
    `te.functional.apply_gradients` skip the step. If you write your own loop, also skip
    the dense update.

    Args:
      gradients: see `global_norm`.

    Example:
      >>> import jax.numpy as jnp
      >>> bool(is_whole({"kernel": jnp.array([3.0])}))
      True
    """
    result = jnp.ones((), bool)
    for leaf in jax.tree.leaves(gradients, is_leaf=_is_table_gradients):
        if isinstance(leaf, TableGradients):
            for name, sealed in leaf.stacks.items():
                if _trained_stack(leaf.plan, name).backend.must_run_all:
                    result &= _is_whole(sealed, leaf.plan)
    return result


def may_be_partial(plan: EmbeddingPlan) -> bool:
    """Tells whether `is_whole` can be False, and so must be computed."""
    return any(stack.backend.must_run_all for stack in plan.trained_stacks)


@functools.partial(jax.jit, static_argnames="plan")
def _is_whole(sealed: Sealed, plan: EmbeddingPlan) -> Bool[Array, ""]:
    return _on_shards(lambda x: ~x.open().is_partial[0], sealed, plan, PartitionSpec())


def update_if(condition: Any, update: Callable[[T], T], state: T) -> T:
    """Updates a state if a condition holds, and otherwise keeps it.

    Use it to skip a whole step: tables, slot variables and dense parameters. Unlike
    `jax.lax.cond`, it does not copy the tables. Under `jax.jit` with a donated state,
    the update stays in place.

    Args:
      condition: bool scalar, equal on all devices, such as `all_finite(gradients)`.
      update: function from the state to a new one with the same shapes and dtypes.
      state: pytree of arrays, such as tables and slot variables.

    Example:
      >>> import jax.numpy as jnp
      >>> update_if(jnp.array(False), lambda x: x + 1, jnp.array([1.0])).tolist()
      [1.0]
    """
    return run_if(condition, update, state)


def scale(gradients: T, factor: Any) -> T:
    """Multiplies all gradients by a factor.

    Args:
      gradients: see `global_norm`.
      factor: float, or float32 scalar array.

    Raises:
      TypeError: if a leaf is an array of integers.

    Example:
      >>> import jax.numpy as jnp
      >>> scale({"kernel": jnp.array([3.0, 4.0])}, 0.5)["kernel"].tolist()
      [1.5, 2.0]
    """
    check_scalar(
        "te.gradients.scale: factor", factor, "te.gradients.scale(gradients, factor)"
    )

    def scale_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, TableGradients):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                rule, fix = "be floats to be scaled", "Remove integers from the pytree."
                raise invalid("gradients", rule, leaf, fix, TypeError)
            # A float32 factor would promote bfloat16 gradients.
            return (leaf * factor).astype(leaf.dtype)
        stacks = {
            name: scale_gradient(sealed, factor) for name, sealed in leaf.stacks.items()
        }
        return dataclasses.replace(leaf, stacks=stacks)

    return jax.tree.map(scale_leaf, gradients, is_leaf=_is_table_gradients)


def clip_by_global_norm(gradients: T, max_norm: float) -> T:
    """Scales all gradients down until their norm is at most `max_norm`.

    Args:
      gradients: see `global_norm`.
      max_norm: positive number. Gradients with a smaller norm don't change. Note that
        a traced value can't be checked: if it isn't positive, gradients become NaN.

    Raises:
      TypeError: if `max_norm` is not a number.
      ValueError: if `max_norm` is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> clip_by_global_norm({"kernel": jnp.array([3.0, 4.0])}, 1.0)["kernel"].tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    line = "te.gradients.clip_by_global_norm(gradients, max_norm)"
    check_scalar("te.gradients.clip_by_global_norm: max_norm", max_norm, line)
    check_hyperparameters("clip_by_global_norm", max_norm=positive_bound(max_norm))
    # A negative limit would flip the update, and a limit of 0 would make it zero.
    limit = jnp.where(max_norm > 0, max_norm, jnp.nan)
    norm = global_norm(gradients)
    # Comparisons with NaN are False, so a NaN norm or limit makes the factor NaN.
    factor = jnp.where(norm < limit, 1.0, limit / jnp.maximum(norm, limit))
    return scale(gradients, factor)


def add(*gradients: T) -> T:
    """Adds gradients of one model, for example from several micro-batches.

    A row that several gradients touch appears once in the sum, as in the gradient of
    one batch with all samples. Optimizers that square gradients depend on this.

    Args:
      *gradients: see `global_norm`. All have the same structure, but some may lack
        tables. To average them, `scale` the sum.

    Raises:
      ValueError: if the structures differ in more than missing tables, or table
        gradients belong to different plans.

    Example:
      >>> import jax.numpy as jnp
      >>> add({"kernel": jnp.ones(2)}, {"kernel": jnp.ones(2)})["kernel"].tolist()
      [2.0, 2.0]
    """
    if not gradients:
        raise ValueError("add needs at least one gradient, got none.")
    # Table gradients count as leaves here, because some may lack stacks.
    structure = jax.tree.structure(gradients[0], is_leaf=_is_table_gradients)
    for number, other in enumerate(gradients[1:], start=2):
        try:
            structure.flatten_up_to(other)
        except ValueError as error:
            raise ValueError(
                f"add needs gradients of one structure, but gradient {number} has a "
                f"different structure, got {describe_value(other)}. Compute all of "
                "them with te.value_and_grad of one model, or add only shared parts: "
                "te.gradients.add(first.dense, second.dense). JAX's error: "
                f"{error}"
            ) from None

    def add_leaves(*leaves: Any) -> Any:
        if not any(map(_is_table_gradients, leaves)):
            return functools.reduce(jnp.add, leaves)
        for leaf in leaves:
            if not _is_table_gradients(leaf):
                raise ValueError(
                    "add needs gradients of one structure, got table gradients "
                    f"together with {type(leaf).__name__}."
                )
            # Plans may differ in their features, but not in their tables.
            if leaf.plan.stacks != leaves[0].plan.stacks:
                raise ValueError(
                    "add needs gradients of one plan, got gradients of tables with "
                    "different plans; compute all of them with the same plan."
                )
        return _add_tables(leaves)

    return jax.tree.map(add_leaves, *gradients, is_leaf=_is_table_gradients)


def _is_table_gradients(value: Any) -> bool:
    return isinstance(value, TableGradients)


@jax.jit
def _add_tables(gradients: tuple[TableGradients, ...]) -> TableGradients:
    plan = gradients[0].plan
    stacks = {}
    for stack in plan.trained_stacks:
        sealed = [x.stacks[stack.name] for x in gradients if stack.name in x.stacks]
        if len(sealed) > 1:
            join = functools.partial(join_gradients, stack=stack)
            stacks[stack.name] = _on_shards(join, sealed, plan, plan.sample_spec)
        elif sealed:
            stacks[stack.name] = sealed[0]
    return TableGradients(stacks, plan)


@functools.partial(jax.jit, static_argnames="stack_name")
def _row_updates(gradients: TableGradients, stack_name: str) -> RowUpdates:
    stack = _trained_stack(gradients.plan, stack_name)

    def read(sealed: Sealed) -> RowUpdates:
        return gradient_rounds(sealed, stack).first.as_row_updates()

    sealed = gradients.stacks[stack_name]
    return _on_shards(read, sealed, gradients.plan, stack.rows_spec)


def _trained_stack(plan: EmbeddingPlan, name: str) -> StackPlan:
    return next(stack for stack in plan.trained_stacks if stack.name == name)


def _sum_of_squares(values: Array) -> Array:
    # `abs` makes complex gradients real.
    return jnp.sum(jnp.square(jnp.abs(values)).astype(jnp.float32))


def _num_not_finite(values: Array) -> Array:
    # float32 rounds large counts, but only 0 matters.
    return jnp.sum(~jnp.isfinite(values), dtype=jnp.float32)


def _total(gradients: Any, measure: Callable[[Array], Array]) -> Array:
    total = jnp.zeros(())
    for leaf in jax.tree.leaves(gradients, is_leaf=_is_table_gradients):
        if isinstance(leaf, TableGradients):
            for name in leaf.stacks:
                total += _total_of_stack(leaf, name, measure)
        else:
            total += measure(leaf)
    return total


@functools.partial(jax.jit, static_argnames=("stack_name", "measure"))
def _total_of_stack(
    gradients: TableGradients, stack_name: str, measure: Callable[[Array], Array]
) -> Array:
    """Sums a measure over the touched rows on all shards."""
    plan = gradients.plan
    stack = _trained_stack(plan, stack_name)

    def measure_shard(sealed: Sealed) -> Array:
        def measure_round(total: Array, gradient: RowGradients) -> Array:
            if isinstance(stack.optimizer.driver, InSequence):
                # The rule applies a row's occurrences one by one; measure their sum.
                max_rows = min(gradient.row_ids.shape[0], stack.rows_per_shard)
                gradient = merge(gradient.row_ids, gradient.values, max_rows)
            return total + measure(gradient.as_row_updates().values)

        total = gradient_rounds(sealed, stack).fold(measure_round, jnp.zeros(()))
        # Copies of a shard hold the same gradient, which must count only once.
        return jax.lax.psum(total, stack.shard_axes)

    sealed = gradients.stacks[stack_name]
    return _on_shards(measure_shard, sealed, plan, PartitionSpec())


def _on_shards(
    function: Callable[[Any], Any],
    sealed: Any,
    plan: EmbeddingPlan,
    out_specs: PartitionSpec,
) -> Any:
    run = on_shards(function, plan, in_specs=plan.sample_spec, out_specs=out_specs)
    return run(sealed)
