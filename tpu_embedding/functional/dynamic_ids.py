"""Replaces the 64-bit ids of dynamic tables by the numbers of their rows.

`insert_ids` runs at the beginning of a training step, in the same compiled program:
new ids get rows, and the rows start as new. `find_ids` changes nothing; lookups outside
of training call it. All other functions see row numbers, as those of a static table.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.field_checks import is_int
from tpu_embedding.inputs.shard_inputs import feature_shape, positions_of
from tpu_embedding.inputs.wide_ids import narrow_ids
from tpu_embedding.lookup._directory import Counts, NewRows, no_counts
from tpu_embedding.lookup._flatten_to_owners import leaves_out_weights
from tpu_embedding.lookup._translate import SourceIds, find_rows, insert_rows
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan, dynamic_tables
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.id_directory import IdDirectory, directory_name
from tpu_embedding.rows.id_mixing import NO_ID, unmix_ids
from tpu_embedding.types import (
    DenseIds,
    DynamicStats,
    Ids64,
    RaggedIds,
    RowIds,
    ShardedRaggedIds,
    SparseIds,
)
from tpu_embedding.update.partition_specs import slot_specs
from tpu_embedding.update.start_rows import start_rows
from tpu_embedding.update.totals import across_shards

_CLOCK_RULE: Final = "insert_ids: now must be one integer from 1 to 2**32 - 1"
_CLOCK_LINE: Final = (
    "Write now=np.uint32(time.time() // 60), for example, or leave it out: the number "
    "of the step."
)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """The ids of a dynamic table and their rows, on the host; all arrays `[ids]`.

    Attributes:
      ids: uint64, rising.
      rows: int64, row of each id in the arrays of `unstack_tables`.
      natural_rows: int64, row of each id on one device.
      last_used: uint32, clock of the last step that used the id.
      counts: uint32, steps that used it.
    """

    ids: np.ndarray
    rows: np.ndarray
    natural_rows: np.ndarray
    last_used: np.ndarray
    counts: np.ndarray


def insert_ids(
    tables: dict[str, Any],
    slots: dict[str, Any],
    features: Any,
    plan: EmbeddingPlan,
    now: Any = None,
) -> InsertResult:
    """Finds the rows of a batch's ids; new ids get rows, which start as new.

    Call it once per step before the lookup, in the same `jit`, with tables and slots
    donated. Ids of features with `find_only` get no rows.

    Args:
      tables: stack name to rows, from `init_tables`.
      slots: stack name to optimizer state, from `init_slots`.
      features: see `lookup`; those of dynamic tables hold `Ids64`, which
        `prepare_features` makes.
      plan: plan of the layer.
      now: clock of the step, an integer from 1 to 2**32 - 1, the same in all calls of
        a step. Ids used at one `now` count as used once and are not evicted at it, so
        far fewer ids than the capacity should be used in a unit. It sets the clock of
        the tables. None: that clock, which each step raises by 1. So is a value in a
        traced step that is out of range.

    Returns:
      Tables, slots, the batch with row numbers, and counts.

    Raises:
      TypeError, ValueError: if a feature has the wrong form, tables or slots belong to
        another plan, or `now` is no such integer.

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
    _refuse_narrow(features, plan)
    return _insert_ids(tables, slots, features, _clock(now), plan)


def _clock(now: Any) -> Any:
    """Returns the `now` of a call, as uint32 if its value is known.

    Raises:
      TypeError: if it is no integer.
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
    batch_plan = plan.for_batch(features)
    leaves = batch_plan.flatten(features)
    stacks = _dynamic_stacks(leaves, batch_plan)
    check_tables(tables, stacks)
    check_slots(slots, [s for s in plan.trained_stacks if s in stacks])
    stats = {}
    for stack in stacks:
        name = directory_name(stack.name)
        directory, rows, state, translated, found = _insert_in_stack(
            tables[name],
            tables[stack.name],
            slots.get(stack.name),
            _features_of(stack, leaves, batch_plan),
            now,
            stack,
            batch_plan,
        )
        tables = {**tables, name: directory, stack.name: rows}
        if state is not None:
            slots = {**slots, stack.name: state}
        for i, leaf in translated.items():
            leaves[i] = leaf
        stats |= found
    return InsertResult(
        tables=tables,
        slots=slots,
        features=batch_plan.unflatten(leaves),
        stats=stats,
    )


def find_ids(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> FindResult:
    """Finds the rows of a batch's ids, and changes nothing.

    Args:
      tables: stack name to rows, from `init_tables`.
      features: see `insert_ids`.
      plan: plan of the layer.

    Returns:
      The batch with row numbers, and counts.
    """
    _refuse_narrow(features, plan)
    return _find_ids(tables, features, plan)


@functools.partial(jax.jit, static_argnames="plan")
def _find_ids(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> FindResult:
    plan = plan.for_batch(features)
    leaves = plan.flatten(features)
    stats = {}
    for stack in _dynamic_stacks(leaves, plan):
        translated, found = _find_in_stack(
            tables[directory_name(stack.name)],
            _features_of(stack, leaves, plan),
            stack,
            plan,
        )
        for i, leaf in translated.items():
            leaves[i] = leaf
        stats |= found
    return FindResult(features=plan.unflatten(leaves), stats=stats)


def _find_in_stack(
    directory: IdDirectory,
    of_stack: dict[int, Any],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[dict[int, Any], dict[str, DynamicStats]]:
    members = dynamic_tables(stack)

    def find_shard(directory, words):
        sources = _sources(words, of_stack, members)
        rows, hits = find_rows(directory, sources, members, stack, plan)
        counts = no_counts(len(members))
        return rows, _totals(sources, hits, counts, directory, stack, plan)

    def find(directory, values):
        leaves = _with_values(of_stack, values)
        rows, counts = on_shards(
            find_shard,
            plan,
            in_specs=(stack.rows_spec, plan.sample_spec),
            out_specs=(plan.sample_spec, PartitionSpec()),
        )(directory, [_words_of(leaf, plan) for leaf in leaves])
        return _shaped_like(leaves, rows), counts

    values = [leaf.value for leaf in of_stack.values()]
    out_specs = (_row_specs(of_stack, plan), PartitionSpec())
    rows, counts = in_auto_axes(find, plan, out_specs)(directory, values)
    return _translated(of_stack, rows), _stats_of(counts, stack)


def _insert_in_stack(
    directory: IdDirectory,
    table: Any,
    state: Any,
    of_stack: dict[int, Any],
    now: Any,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[IdDirectory, Any, Any, dict[int, Any], dict[str, DynamicStats]]:
    members = dynamic_tables(stack)

    def insert_shard(directory, table, state, words, now):
        sources = _sources(words, of_stack, members)
        clock = directory.clock[0]
        if now is not None:
            clock = jnp.where(now > 0, now, clock)
            directory = dataclasses.replace(directory, clock=clock[None])

        def start(rows, new: NewRows):
            table, state = rows
            return start_rows(
                table,
                state,
                new.rows,
                (new.first, new.second),
                new.tables,
                new.count,
                directory.init_keys,
                stack,
                across_shards(stack, plan),
            )

        directory, rows, found, hits, counts = insert_rows(
            directory, start, (table, state), sources, members, clock, stack, plan
        )
        totals = _totals(sources, hits, counts, directory, stack, plan)
        return directory, rows, found, totals

    spec = stack.rows_spec
    state_spec = slot_specs({stack.name: state}, plan)[stack.name]

    def insert(directory, table, state, values, now):
        leaves = _with_values(of_stack, values)
        directory, rows, found, counts = on_shards(
            insert_shard,
            plan,
            in_specs=(spec, spec, state_spec, plan.sample_spec, PartitionSpec()),
            out_specs=(spec, (spec, state_spec), plan.sample_spec, PartitionSpec()),
        )(directory, table, state, [_words_of(leaf, plan) for leaf in leaves], now)
        return directory, rows, _shaped_like(leaves, found), counts

    if now is not None:
        is_clock = now > 0
        if now.dtype.itemsize == 8:
            is_clock &= now < 2**32
        now = jnp.where(is_clock, now, 0).astype(jnp.uint32)
    values = [leaf.value for leaf in of_stack.values()]
    out_specs = (spec, (spec, state_spec), _row_specs(of_stack, plan), PartitionSpec())
    directory, (table, state), found, counts = in_auto_axes(insert, plan, out_specs)(
        directory, table, state, values, now
    )
    translated = _translated(of_stack, found)
    return directory, table, state, translated, _stats_of(counts, stack)


def dynamic_rows(tables: dict[str, Any], plan: EmbeddingPlan) -> dict[str, DynamicRows]:
    """Returns the ids of all dynamic tables and their rows, on the host.

    All processes of a job call it together, and each gets all ids.

    Args:
      tables: stack name to rows.
      plan: plan of the layer.
    """
    result = {}
    for stack in plan.stacks:
        if stack.is_dynamic:
            result |= rows_in_directory(tables[directory_name(stack.name)], stack)
    return result


def rows_in_directory(
    directory: IdDirectory, stack: StackPlan
) -> dict[str, DynamicRows]:
    """Returns the ids of each table of a dynamic stack, and their rows."""
    keys, scores = (
        on_host(x).reshape(stack.num_shards, -1, 2, x.shape[1] // 2)
        for x in (directory.keys, directory.scores)
    )
    return {
        member.table.name: _rows_of(keys, scores, member)
        for member in dynamic_tables(stack)
    }


def on_host(array: Any) -> np.ndarray:
    """Returns the whole of an array that may lie on devices of several processes."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _rows_of(
    keys: np.ndarray, scores: np.ndarray, member: DynamicTablePlan
) -> DynamicRows:
    first = member.first_bucket
    of_table = slice(first, first + member.buckets_per_shard)
    keys, scores = keys[:, of_table], scores[:, of_table]
    is_used = ~((keys[:, :, 0] == NO_ID) & (keys[:, :, 1] == NO_ID))
    shard, bucket, lane = np.nonzero(is_used)
    high, low = unmix_ids(keys[shard, bucket, 0, lane], keys[shard, bucket, 1, lane])
    ids = Ids64(high=high, low=low).to_numpy()
    order = np.argsort(ids)
    size = keys.shape[3]
    on_shard = size * bucket + lane
    return DynamicRows(
        ids=ids[order],
        rows=(on_shard * member.num_shards + shard)[order],
        natural_rows=(shard * member.buckets_per_shard * size + on_shard)[order],
        last_used=scores[shard, bucket, 0, lane][order],
        counts=scores[shard, bucket, 1, lane][order],
    )


def row_numbers(leaf: Any, feature: FeaturePlan) -> Any:
    """Returns the ids that a lookup takes: int32 rows of the feature's table.

    Raises:
      TypeError: if a feature of a dynamic table holds ids, or one of a static table
        holds numbers of rows.
    """
    if isinstance(leaf, RowIds):
        if feature.table.dynamic is None:
            raise TypeError(
                f"Feature {feature.name!r} holds RowIds, which are for tables with a "
                "te.Dynamic vocabulary, but its table has a fixed one; pass its ids."
            )
        return leaf.ids
    if feature.table.dynamic is not None:
        refuse_raw_ids(feature.name)
    return leaf


def refuse_raw_ids(feature_name: str) -> None:
    """Raises a TypeError: a feature of a dynamic table holds ids inside a loss."""
    raise TypeError(
        f"Feature {feature_name!r} of a table with a te.Dynamic vocabulary must hold "
        "RowIds inside a loss, got ids. Replace them at the beginning of the step, so "
        "that new ids get rows: ids = optimizer.insert_ids(model, ids), state, ids = "
        "state.insert_ids(ids), or te.functional.insert_ids. To train without new ids: "
        "te.functional.find_ids."
    )


def rows_of_batch(features: Any, plan: EmbeddingPlan) -> list[Any]:
    """Returns the `row_numbers` of all features of a batch, in the plan's order."""
    plan = plan.for_batch(features)
    return [
        row_numbers(leaf, feature)
        for leaf, feature in zip(plan.flatten(features), plan.features, strict=True)
    ]


def holds_raw_ids(leaf: Any, feature: FeaturePlan) -> bool:
    """Returns True if a feature of a dynamic table holds ids in place of rows."""
    return feature.table.dynamic is not None and not isinstance(leaf, RowIds)


def raw_feature(features: Any, plan: EmbeddingPlan) -> str | None:
    """Returns the name of a feature for which `holds_raw_ids`, or None."""
    plan = plan.for_batch(features)
    pairs = zip(plan.flatten(features), plan.features, strict=True)
    return next((x.name for leaf, x in pairs if holds_raw_ids(leaf, x)), None)


def _dynamic_stacks(leaves: Sequence[Any], plan: EmbeddingPlan) -> list[StackPlan]:
    """Returns the stacks of dynamic tables whose features hold ids."""
    wanted = {
        feature.stack_index
        for leaf, feature in zip(leaves, plan.features, strict=True)
        if holds_raw_ids(leaf, feature)
    }
    return [plan.stacks[i] for i in sorted(wanted)]


def _features_of(
    stack: StackPlan, leaves: Sequence[Any], plan: EmbeddingPlan
) -> dict[int, Any]:
    """Returns the leaves of a stack that hold ids, by position; see `_Leaf`."""
    return {
        i: _Leaf(leaves[i], plan.features[i])
        for i in plan.features_of(stack)
        if not isinstance(leaves[i], RowIds)
    }


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A feature of a batch and its plan."""

    value: Any
    feature: FeaturePlan


def _ids_in(leaf: _Leaf) -> Any:
    """Returns the array of ids of a feature."""
    match leaf.value:
        case DenseIds():
            return leaf.value.ids
        case ShardedRaggedIds():
            return leaf.value.values
        case RaggedIds() | SparseIds():
            raise TypeError(
                f"Feature {leaf.feature.name!r} is a {type(leaf.value).__name__}, "
                "whose size changes from batch to batch; pass the batch through "
                "prepare first."
            )
    return leaf.value


def _refuse_narrow(features: Any, plan: EmbeddingPlan) -> None:
    """Refuses integers of 32 bits, which may be the lower halves of ids.

    Raises:
      TypeError: if a feature of a dynamic table holds such integers.
    """
    plan = plan.for_batch(features)
    for value, feature in zip(plan.flatten(features), plan.features, strict=True):
        if feature.table.dynamic is None or isinstance(value, RowIds):
            continue
        ids = _ids_in(_Leaf(value, feature))
        is_wide = isinstance(ids, jax.Array) and ids.dtype.itemsize == 8
        if not isinstance(ids, Ids64) and not is_wide:
            found = getattr(ids, "dtype", type(ids).__name__)
            raise narrow_ids(str(found), feature)


def _with_values(of_stack: dict[int, Any], values: Sequence[Any]) -> list[Any]:
    return [
        dataclasses.replace(leaf, value=value)
        for leaf, value in zip(of_stack.values(), values, strict=True)
    ]


def _words_of(leaf: _Leaf, plan: EmbeddingPlan) -> tuple[Array, Array, Array]:
    """Returns the words of a feature's ids, and which may get rows. Global.

    They are filled up for the devices.
    """
    ids = _ids_in(leaf)
    if not isinstance(ids, Ids64):
        ids = Ids64.of_array(jnp.asarray(ids))
    inserts = jnp.full(ids.shape, not leaf.feature.config.find_only)
    inserts &= _is_looked_up(leaf, plan)
    room = -ids.high.size % plan.num_shards

    def flat(values, fill):
        values = jnp.asarray(values).reshape(-1)
        return jnp.pad(values, (0, room), constant_values=fill)

    return flat(ids.high, NO_ID), flat(ids.low, NO_ID), flat(inserts, False)


def _is_looked_up(leaf: _Leaf, plan: EmbeddingPlan) -> Any:
    """Returns False for ids that add nothing to a lookup, which need no row. Global."""
    ids, feature = leaf.value, leaf.feature
    result: Any = True
    weights = getattr(ids, "weights", None)
    if weights is not None:
        weights = jnp.asarray(weights)
        is_left_out = weights <= 0 if leaves_out_weights(feature) else weights == 0
        result = ~is_left_out
    length = feature_shape(ids, feature, plan).sequence_length
    if length:
        result &= _positions(ids, plan) < length
    return result


def _positions(ids: Any, plan: EmbeddingPlan) -> Array:
    """Returns the position of each id in its sample. Global."""
    if not isinstance(ids, ShardedRaggedIds):
        shape = ids.ids.shape if isinstance(ids, DenseIds) else ids.shape
        if len(shape) == 1:
            return jnp.zeros(shape, jnp.int32)
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    num_values = ids.values.shape[1]

    def of_shard(row_splits):
        return positions_of(row_splits[0], num_values)[None]

    spec = plan.sample_spec
    on_all = on_shards(of_shard, plan, in_specs=spec, out_specs=spec)
    return on_all(jnp.asarray(ids.row_splits))


def _shaped_like(leaves: Sequence[_Leaf], rows: Sequence[Array]) -> list[Array]:
    """Returns the rows of each feature in the shape of its ids."""
    shapes = [_ids_in(leaf).shape for leaf in leaves]
    return [
        of_feature[: int(np.prod(shape))].reshape(shape)
        for shape, of_feature in zip(shapes, rows, strict=True)
    ]


def _row_specs(of_stack: dict[int, Any], plan: EmbeddingPlan) -> list[PartitionSpec]:
    """Returns the partition of the rows of each feature, on explicit axes."""
    specs = []
    for leaf in of_stack.values():
        if isinstance(leaf.value, ShardedRaggedIds):
            specs.append(plan.sample_spec)
            continue
        divides = _ids_in(leaf).shape[0] % plan.num_shards == 0
        specs.append(plan.batch_sharding.spec if divides else PartitionSpec())
    return specs


def _with_rows(leaf: _Leaf, rows: Int[Array, "..."]) -> RowIds:
    """Returns the feature with row numbers in place of its ids."""
    match leaf.value:
        case DenseIds():
            return RowIds(dataclasses.replace(leaf.value, ids=rows))
        case ShardedRaggedIds():
            return RowIds(dataclasses.replace(leaf.value, values=rows))
    return RowIds(rows)


def _translated(of_stack: dict[int, Any], rows: Sequence[Array]) -> dict[int, RowIds]:
    return {
        i: _with_rows(leaf, found)
        for (i, leaf), found in zip(of_stack.items(), rows, strict=True)
    }


def _sources(
    words: Sequence[tuple[Array, Array, Array]],
    of_stack: dict[int, Any],
    members: Sequence[DynamicTablePlan],
) -> list[SourceIds]:
    offsets = [member.table.row_offset for member in members]
    return [
        SourceIds(
            high=high,
            low=low,
            inserts=inserts,
            table=offsets.index(leaf.feature.row_offset),
        )
        for (high, low, inserts), leaf in zip(words, of_stack.values(), strict=True)
    ]


def _totals(
    sources: Sequence[SourceIds],
    hits: Sequence[Array],
    counts: Counts,
    directory: IdDirectory,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Any:
    """Adds counts over the devices; those of owners are the same on all copies."""
    places = [
        jnp.sum(~((x.high == NO_ID) & (x.low == NO_ID)), dtype=jnp.int32)
        for x in sources
    ]
    zero = jnp.int32(0)
    of_places = [
        jnp.stack(
            [
                sum(
                    (n for n, x in zip(numbers, sources, strict=True) if x.table == i),
                    zero,
                )
                for i in range(len(stack.tables))
            ]
        )
        for numbers in (places, hits)
    ]
    of_owners = (counts, directory.used_rows)
    if plan.mesh.size > 1:
        of_places = jax.lax.psum(of_places, plan.sample_axes)
    if stack.num_shards > 1:
        of_owners = jax.lax.psum(of_owners, stack.shard_axes)
    return of_places, of_owners


def _stats_of(totals: Any, stack: StackPlan) -> dict[str, DynamicStats]:
    (places, hits), (found, used) = totals
    return {
        table.name: DynamicStats(
            ids=places[i],
            hits=hits[i],
            inserts=found.inserts[i],
            evictions=found.evictions[i],
            not_admitted=found.not_admitted[i],
            no_place=found.no_place[i],
            used_rows=used[i],
        )
        for i, table in enumerate(stack.tables)
    }
