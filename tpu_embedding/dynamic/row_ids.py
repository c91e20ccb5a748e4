"""Replaces the 64-bit ids of dynamic tables by the numbers of their rows.

`insert_ids` runs at the beginning of a training step, in the same compiled program:
new ids get rows, and the rows start as new. `find_ids` changes nothing; lookups outside
of training call it. All other functions see row numbers, as in a static table.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tpu_embedding.argument_checks import describe_value, is_int
from tpu_embedding.dynamic.directory import IdDirectory, NewRows, directory_name
from tpu_embedding.dynamic.find_or_insert import Counts, no_counts
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64, truncated_ids
from tpu_embedding.dynamic.new_rows import init_new_rows
from tpu_embedding.dynamic.translation import SourceIds, find_rows, insert_rows
from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.inputs.shard_inputs import feature_shape, positions_of
from tpu_embedding.lookup._forward import leaves_out_weights
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import (
    RaggedIds,
    RowIds,
    ShardedRaggedIds,
    SparseIds,
    ids_of,
    with_ids,
)
from tpu_embedding.update.lazy_update import state_specs
from tpu_embedding.update.totals import across_shards

_CLOCK_RULE: Final = "insert_ids: now must be one integer from 1 to 2**32 - 1"
_CLOCK_LINE: Final = (
    "Write now=np.uint32(time.time() // 60), for example, or leave it out: the number "
    "of the step."
)


Translate = Callable[
    [StackPlan, list[SourceIds], EmbeddingPlan], tuple[list[Array], Any]
]
"""Returns the rows of some features of a stack, and counts `[tables]`. Global."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicStats:
    """Counts of one call for a dynamic table. int32 scalars, over all devices.

    Attributes:
      ids: ids of the batch, repeats included.
      hits: those that had a row before the call.
      inserts: different new ids that got a row.
      evictions: ids that lost their row to a new one.
      not_admitted: different unknown ids that were not admitted, or that no feature
        inserts. 0 if the call only finds.
      no_place: different admitted ids whose bucket has no place.
      used_rows: rows that ids have after the call.
    """

    ids: Array
    hits: Array
    inserts: Array
    evictions: Array
    not_admitted: Array
    no_place: Array
    used_rows: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class InsertResult:
    """Result of `insert_ids`.

    Attributes:
      tables: new tables, with the rows of new ids.
      slots: new optimizer states.
      features: the batch, with `RowIds` for features of dynamic tables.
      stats: table name to counts.
    """

    tables: dict[str, Any]
    slots: dict[str, Any]
    features: Any
    stats: dict[str, DynamicStats]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FindResult:
    """Result of `find_ids`.

    Attributes:
      features: the batch, with `RowIds` for features of dynamic tables.
      stats: table name to counts.
    """

    features: Any
    stats: dict[str, DynamicStats]


def insert_ids(
    tables: dict[str, Any],
    slots: dict[str, Any],
    features: Any,
    plan: EmbeddingPlan,
    now: Any = None,
) -> InsertResult:
    """Finds the rows of a batch's ids; new ids get rows, which start as new.

    Where the table is full, a new id takes the row of the id that the table's eviction
    rule values least. Call it once per step before the lookup, in the same `jit`, with
    tables and slots donated. Ids of features with `find_only` get no rows.

    Args:
      tables: stack name to rows, from `init_tables`.
      slots: stack name to optimizer state, from `init_slots`.
      features: see `lookup`; features of dynamic tables hold `Ids64`, which
        `prepare_features` makes.
      plan: plan of the layer.
      now: time of the step, an integer from 1 to 2**32 - 1, the same in all calls of
        a step. It becomes the tables' clock. Ids used at one `now` count as used once,
        and keep their rows until the next: give values that rise long before as many
        ids are used as the table has rows. None: the tables' clock, which each step
        raises by 1. A traced value out of range counts as None.

    Returns:
      Tables, slots, the batch with row numbers, and counts.

    Raises:
      TypeError, ValueError: if a feature has the wrong form, tables or slots belong to
        another plan, or `now` is not such an integer.

    Example:
      >>> import tpu_embedding as te
      >>> users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=100), dim=4)
      >>> plan = te.make_plan(
      ...     {"user": te.FeatureConfig(table=users)}, optimizer=te.optimizers.sgd(0.1)
      ... )
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> result = te.functional.insert_ids(tables, slots, ids, plan)
      >>> int(result.stats["table_0"].inserts)
      2
    """
    features = _with_words(features, plan)
    return _insert_ids(tables, slots, features, _clock(now), plan)


def _clock(now: Any) -> Any:
    """Returns the `now` of a call, as uint32 if its value is known.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if its value is known and out of range.
    """
    if now is None:
        return None
    is_scalar = isinstance(now, np.ndarray | jax.Array) and now.shape == ()
    if not is_int(now) and not (is_scalar and jnp.issubdtype(now.dtype, jnp.integer)):
        raise TypeError(f"{_CLOCK_RULE}, got {describe_value(now)}. {_CLOCK_LINE}")
    if isinstance(now, jax.core.Tracer):
        return now
    if not 1 <= int(now) < 2**32:
        raise ValueError(f"{_CLOCK_RULE}, got {int(now)}. {_CLOCK_LINE}")
    return now.astype(jnp.uint32) if isinstance(now, jax.Array) else np.uint32(now)


@functools.partial(jax.jit, static_argnames="plan")
def _insert_ids(
    tables: dict[str, Any],
    slots: dict[str, Any],
    features: Any,
    now: Any,
    plan: EmbeddingPlan,
) -> InsertResult:
    if now is not None:
        is_clock = now > 0
        if now.dtype.itemsize == 8:
            is_clock &= now < 2**32
        now = jnp.where(is_clock, now, 0).astype(jnp.uint32)
    new_tables: dict[str, Any] = {}
    new_slots: dict[str, Any] = {}

    def insert(stack, sources, plan):
        check_tables(tables, [stack])
        check_slots(slots, [x for x in plan.trained_stacks if x is stack])
        name, state = directory_name(stack.name), slots.get(stack.name)
        specs = (stack.rows_spec, stack.rows_spec, state_specs(state, stack))
        arrays, found, counts = on_shards(
            functools.partial(_insert_shard, stack=stack),
            plan,
            in_specs=(*specs, PartitionSpec(), plan.sample_spec),
            out_specs=(specs, plan.sample_spec, PartitionSpec()),
        )(tables[name], tables[stack.name], state, now, sources)
        new_tables[name], new_tables[stack.name], state = arrays
        if state is not None:
            new_slots[stack.name] = state
        return found, counts

    features, stats = _with_rows(features, plan, insert)
    return InsertResult(
        tables={**tables, **new_tables},
        slots={**slots, **new_slots},
        features=features,
        stats=stats,
    )


def _insert_shard(
    directory: IdDirectory,
    table: Any,
    state: Any,
    now: Any,
    sources: list[SourceIds],
    stack: StackPlan,
) -> tuple[Any, list[Array], DynamicStats]:
    """Gives the new ids of a batch rows, which start as new. Per shard."""
    clock = directory.clock[0]
    if now is not None:
        clock = jnp.where(now > 0, now, clock)
        directory = dataclasses.replace(directory, clock=clock[None])

    def start(rows, new: NewRows):
        table, state = rows
        all_reduce = across_shards(stack)
        return init_new_rows(table, state, new, directory.init_keys, stack, all_reduce)

    directory, rows, found, hits, counts = insert_rows(
        directory, start, (table, state), sources, clock, stack
    )
    stats = _stats(sources, hits, counts, directory, stack)
    return (directory, *rows), found, stats


def find_ids(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> FindResult:
    """Finds the rows of a batch's ids, and changes nothing.

    Args:
      tables: stack name to rows, from `init_tables`.
      features: see `insert_ids`.
      plan: plan of the layer.

    Returns:
      The batch with row numbers, and counts.
    """
    return _find_ids(tables, _with_words(features, plan), plan)


@functools.partial(jax.jit, static_argnames="plan")
def _find_ids(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> FindResult:
    def find_shard(directory, sources, stack):
        found, hits = find_rows(directory, sources, stack)
        counts = no_counts(len(stack.tables))
        return found, _stats(sources, hits, counts, directory, stack)

    def find(stack, sources, plan):
        return on_shards(
            functools.partial(find_shard, stack=stack),
            plan,
            in_specs=(stack.rows_spec, plan.sample_spec),
            out_specs=(plan.sample_spec, PartitionSpec()),
        )(tables[directory_name(stack.name)], sources)

    features, stats = _with_rows(features, plan, find)
    return FindResult(features=features, stats=stats)


def _with_rows(
    features: Any, plan: EmbeddingPlan, translate: Translate
) -> tuple[Any, dict[str, DynamicStats]]:
    """Returns a batch with `RowIds` for the ids of dynamic tables, and counts.

    Features that hold rows already stay as they are.
    """
    plan = plan.for_batch(features)
    leaves, stats = plan.flatten(features), {}
    sources = {}
    for i, (leaf, feature) in enumerate(zip(leaves, plan.features, strict=True)):
        if _holds_ids(leaf, feature):
            flatten = functools.partial(_flat_ids, feature=feature, plan=plan)
            sources[i] = in_auto_axes(flatten, plan, plan.sample_spec)(leaf)
    rows = {}
    for stack in plan.stacks:
        if numbers := [i for i in plan.features_of(stack) if i in sources]:
            found, counts = translate(stack, [sources[i] for i in numbers], plan)
            rows |= zip(numbers, found, strict=True)
            for i, table in enumerate(stack.tables):
                stats[table.name] = jax.tree.map(lambda x, i=i: x[i], counts)
    for i in rows:
        leaves[i] = RowIds(with_ids(leaves[i], _in_shape(rows[i], leaves[i], plan)))
    return plan.unflatten(leaves), stats


def _in_shape(rows: Array, leaf: Any, plan: EmbeddingPlan) -> Array:
    """Returns the rows of a feature in the shape of its ids, without spare ones."""
    shape = ids_of(leaf).shape
    spec = plan.sample_spec
    if not isinstance(leaf, ShardedRaggedIds):
        spec = plan.sharding_of_samples(shape).spec
    size = math.prod(shape)
    return in_auto_axes(lambda rows: rows[:size].reshape(shape), plan, spec)(rows)


def _holds_ids(leaf: Any, feature: FeaturePlan) -> bool:
    """Returns True if a feature of a dynamic table holds ids, not rows."""
    is_dynamic = isinstance(feature.table.vocabulary, Dynamic)
    return is_dynamic and not isinstance(leaf, RowIds)


def _with_words(features: Any, plan: EmbeddingPlan) -> Any:
    """Returns the batch with `Ids64` as the ids of all features of dynamic tables.

    Raises:
      TypeError: if a feature holds integers of 32 bits, which may be the lower halves
        of ids, or has no static shape.
    """
    plan = plan.for_batch(features)
    leaves = plan.flatten(features)
    for i, feature in enumerate(plan.features):
        if not _holds_ids(leaves[i], feature):
            continue
        if isinstance(leaves[i], RaggedIds | SparseIds):
            raise TypeError(
                f"Feature {feature.name!r} is a {type(leaves[i]).__name__}, whose size "
                "changes from batch to batch; pass the batch through prepare first."
            )
        ids = ids_of(leaves[i])
        if isinstance(ids, Ids64):
            continue
        if not isinstance(ids, jax.Array) or ids.dtype.itemsize < 8:
            raise truncated_ids(str(getattr(ids, "dtype", type(ids).__name__)), feature)
        leaves[i] = with_ids(leaves[i], Ids64.of_array(ids))
    return plan.unflatten(leaves)


def _flat_ids(leaf: Any, feature: FeaturePlan, plan: EmbeddingPlan) -> SourceIds:
    """Returns the ids of a feature in one axis, filled up for the devices. Global."""
    ids = ids_of(leaf)
    inserts = jnp.full(ids.shape, not feature.config.find_only)
    # Ids that add nothing to a lookup need no row.
    weights = getattr(leaf, "weights", None)
    if weights is not None:
        weights = jnp.asarray(weights)
        inserts &= weights > 0 if leaves_out_weights(feature) else weights != 0
    if length := feature_shape(leaf, feature, plan).sequence_length:
        inserts &= _positions(leaf, plan) < length
    room = -ids.high.size % plan.num_shards

    def flat(values, fill):
        values = jnp.asarray(values).reshape(-1)
        return jnp.pad(values, (0, room), constant_values=fill)

    offsets = [x.row_offset for x in plan.stacks[feature.stack_index].tables]
    return SourceIds(
        high=flat(ids.high, NO_ID),
        low=flat(ids.low, NO_ID),
        inserts=flat(inserts, False),
        table=offsets.index(feature.row_offset),
    )


def _positions(leaf: Any, plan: EmbeddingPlan) -> Array:
    """Returns the position of each id in its sample. Global."""
    if not isinstance(leaf, ShardedRaggedIds):
        shape = ids_of(leaf).shape
        if len(shape) == 1:
            return jnp.zeros(shape, jnp.int32)
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    num_values = leaf.values.shape[1]

    def of_shard(row_splits):
        return positions_of(row_splits[0], num_values)[None]

    spec = plan.sample_spec
    on_all = on_shards(of_shard, plan, in_specs=spec, out_specs=spec)
    return on_all(jnp.asarray(leaf.row_splits))


def _stats(
    sources: Sequence[SourceIds],
    hits: Sequence[Array],
    counts: Counts,
    directory: IdDirectory,
    stack: StackPlan,
) -> DynamicStats:
    """Returns the counts of all devices, `[tables]` each. Per shard."""
    num_tables = len(stack.tables)

    def by_table(numbers):
        """Adds the numbers of the features of each table."""
        sums = [jnp.int32(0)] * num_tables
        for number, source in zip(numbers, sources, strict=True):
            sums[source.table] += number
        return jnp.stack(sums)

    num_ids = [jnp.sum(x.is_id, dtype=jnp.int32) for x in sources]
    of_samples = by_table(num_ids), by_table(hits)
    of_owners = counts._asdict() | {"used_rows": directory.used_rows}
    if stack.num_devices > 1:
        of_samples = jax.lax.psum(of_samples, stack.sample_axes)
    if stack.num_shards > 1:
        # Copies of a shard have the same counts.
        of_owners = jax.lax.psum(of_owners, stack.shard_axes)
    return DynamicStats(ids=of_samples[0], hits=of_samples[1], **of_owners)
