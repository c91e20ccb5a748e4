"""Turns the 64-bit ids of dynamic tables into row numbers that lookups accept.

`insert_ids` is the first part of a compiled training step, and gives initialized rows
to new ids. Lookups outside training call `find_ids`, which changes nothing. Devices
send unique ids to the devices that own the ids' buckets, in rounds like a lookup's.
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
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.argument_checks import invalid, is_int
from tpu_embedding.dynamic.directory import (
    DynamicTablePlan,
    IdDirectory,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.find_or_insert import (
    Counts,
    MixedIds,
    Pass,
    find_lanes,
    insert,
    local_rows,
    no_counts,
)
from tpu_embedding.dynamic.ids_64 import (
    NO_ID,
    Ids64,
    mix_ids,
    multiply_high,
    truncated_ids,
)
from tpu_embedding.dynamic.new_rows import init_new_rows
from tpu_embedding.dynamic.vocabulary import Dynamic
from tpu_embedding.inputs.shard_inputs import (
    check_prepared,
    feature_shape,
    positions_of,
)
from tpu_embedding.lookup._forward import leaves_out_weights, split_by_feature
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    dedup,
    exchange,
    fold_later_rounds,
    send_unique,
    unsort,
)
from tpu_embedding.plan.capacity import round_size
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import (
    PADDING_ROW_ID,
    RowIds,
    ShardedRaggedIds,
    ids_of,
    with_ids,
)
from tpu_embedding.update.state import state_specs
from tpu_embedding.update.totals import across_shards

_CLOCK_RULE: Final = "insert_ids: now", "be an integer from 1 to 2**32 - 1"
_CLOCK_LINE: Final = (
    "Pass np.uint32(time.time() // 60), for example, or leave it out to use the number "
    "of the step."
)

_HEADROOM_STDDEVS: Final = 8
"""A round's capacity exceeds the mean number of ids per owner by this many standard
deviations. Each unused position costs 16 bytes."""

_MIN_CAPACITY: Final = 256

_NO_ROW: Final = NO_ID
"""Reply for an id without a row. Ids with a row get `2 * row + is_known`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SourceIds:
    """The ids of one feature on a source device.

    Attributes:
      high: upper words. Both words of a missing id have all bits set.
      table: position of the feature's table in the stack.
      inserts: whether an id may get a row if it is unknown.
    """

    high: UInt32[Array, " ids"]
    low: UInt32[Array, " ids"]
    inserts: Bool[Array, " ids"]
    table: int = dataclasses.field(metadata={"static": True})

    @property
    def is_id(self) -> Bool[Array, " ids"]:
        return ~((self.high == NO_ID) & (self.low == NO_ID))


Answer = Callable[[Any, MixedIds, Pass], tuple[Any, Array, Array]]
"""The ids' owner calls `answer(carry, ids, current_pass)`. It returns the new carry,
each id's lane in its bucket, and whether the id had a row before the call. Only lanes
from the last pass are used."""

Translate = Callable[
    [StackPlan, list[SourceIds], EmbeddingPlan], tuple[list[Array], Any]
]
"""Finds the rows for each feature in a stack, and the counts for each table. Arrays are
global."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicStats:
    """Counts for a dynamic table in one call, int32 scalars summed over all devices.

    Attributes:
      ids: ids in the batch, including repeats.
      hits: ids in the batch that had a row before the call, including repeats.
      inserts: unique new ids that got a row.
      evictions: ids that lost their row to a new id.
      not_admitted: unique unknown ids that were not admitted, or that no feature may
        insert. Always 0 for `find_ids`.
      no_place: unique admitted ids without a row, because their bucket was full.
        Always 0 for `find_ids`.
      used_rows: rows that have an id after the call.

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> stats = te.functional.find_ids(tables, ids, plan).stats["user"]
      >>> int(stats.ids), int(stats.hits)
      (3, 0)
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
      tables: new tables, including the rows of new ids.
      slots: new optimizer states.
      features: the batch, with `RowIds` for features of dynamic tables.
      stats: table name to counts.

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> result = te.functional.insert_ids(tables, slots, ids, plan)
      >>> int(result.stats["user"].used_rows)
      2
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

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> found = te.functional.find_ids(tables, ids, plan)
      >>> te.functional.lookup(tables, found.features, plan).activations["user"].shape
      (3, 4)
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
    """Finds the rows for a batch of ids, and inserts new ids.

    Call this once per step before the lookup, in the same `jit`, with tables and slots
    donated. Rows for new ids are initialized. In a full bucket, a new id may take the
    row from the id that the eviction policy values least. Features with `find_only`
    don't insert ids.

    Args:
      tables: stack name to rows, from `init_tables`.
      slots: stack name to optimizer state, from `init_slots`.
      features: see `lookup`. Features of dynamic tables hold `Ids64`, as returned by
        `prepare_features`.
      plan: plan of the layer.
      now: current time, an integer from 1 to 2**32 - 1, the same in all calls during a
        step. It becomes the tables' clock. An id used several times at the same `now`
        counts as used once, and can't be evicted until `now` changes. So increase `now`
        well before ids that were used at the same `now` fill the table. Defaults to the
        tables' clock, which each step advances by 1. A traced value out of range has
        the same effect as None.

    Returns:
      Tables, slots, the batch with row numbers, and counts.

    Raises:
      TypeError, ValueError: if a feature has the wrong form, if tables or slots belong
        to another plan, or if `now` is not an integer in its range.

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
    plan, leaves = _match_words(features, plan)
    return _insert_ids(tables, slots, leaves, _clock(now), plan)


def _clock(now: Any) -> Any:
    if now is None:
        return None
    is_scalar = isinstance(now, np.ndarray | jax.Array) and now.shape == ()
    if not is_int(now) and not (is_scalar and jnp.issubdtype(now.dtype, jnp.integer)):
        raise invalid(*_CLOCK_RULE, now, _CLOCK_LINE, TypeError)
    # Whether a traced value is in range isn't known yet, so `_insert_ids` checks it.
    if isinstance(now, jax.core.Tracer):
        return now
    if not 1 <= int(now) < 2**32:
        raise invalid(*_CLOCK_RULE, int(now), _CLOCK_LINE)
    return now.astype(jnp.uint32) if isinstance(now, jax.Array) else np.uint32(now)


@functools.partial(jax.jit, static_argnames="plan")
def _insert_ids(
    tables: dict[str, Any],
    slots: dict[str, Any],
    leaves: list[Any],
    now: Any,
    plan: EmbeddingPlan,
) -> InsertResult:
    if now is not None:
        is_clock = now > 0
        # Only 64-bit integers can exceed the range, and JAX can't compare int32 with
        # 2**32.
        if now.dtype.itemsize == 8:
            is_clock &= now < 2**32
        now = jnp.where(is_clock, now, 0).astype(jnp.uint32)
    new_tables: dict[str, Any] = {}
    new_slots: dict[str, Any] = {}

    def insert(stack, sources, plan):
        check_tables(tables, [stack])
        check_slots(slots, [s for s in plan.trained_stacks if s is stack])
        name, state = directory_name(stack.name), slots.get(stack.name)
        specs = (stack.rows_spec, stack.rows_spec, state_specs(state, stack))
        arrays, rows, counts = on_shards(
            functools.partial(_insert_shard, stack=stack),
            plan,
            in_specs=(*specs, PartitionSpec(), plan.sample_spec),
            out_specs=(specs, plan.sample_spec, PartitionSpec()),
        )(tables[name], tables[stack.name], state, now, sources)
        new_tables[name], new_tables[stack.name], state = arrays
        if state is not None:
            new_slots[stack.name] = state
        return rows, counts

    features, stats = _with_rows(leaves, plan, insert)
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
    clock, init_keys = directory.clock[0], directory.init_keys
    if now is not None:
        # `_insert_ids` replaced traced values out of range with 0.
        clock = jnp.where(now > 0, now, clock)
        directory = dataclasses.replace(directory, clock=clock[None])
    tables = dynamic_tables(stack)

    def answer(carry, ids, current_pass):
        directory, table, state, counts = carry
        directory, lanes, is_known, new_rows, new_counts = insert(
            directory, ids, tables, clock, current_pass
        )
        counts = jax.tree.map(jnp.add, counts, new_counts)
        all_reduce = across_shards(stack)
        table, state = init_new_rows(
            table, state, new_rows, init_keys, stack, all_reduce
        )
        return (directory, table, state, counts), lanes, is_known

    carry = (directory, table, state, no_counts(len(tables)))
    # An owner must note all ids in a bucket before it inserts one. Ids that arrive in
    # several rounds therefore take two passes.
    carry, answers = _ask_owners(carry, answer, 2, sources, stack)
    directory, table, state, counts = carry
    rows, hits = _by_feature(answers, sources, tables)
    stats = _stats(sources, hits, counts, directory, stack)
    return (directory, table, state), rows, stats


def find_ids(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> FindResult:
    """Finds the rows for a batch of ids without changing anything.

    Args:
      tables: stack name to rows, from `init_tables`.
      features: see `insert_ids`.
      plan: plan of the layer.

    Returns:
      The batch with row numbers, and counts.

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> result = te.functional.insert_ids(tables, slots, ids, plan)
      >>> ids = te.inputs.prepare_features({"user": [7, 8]}, plan)
      >>> found = te.functional.find_ids(result.tables, ids, plan)
      >>> int(found.stats["user"].hits)
      1
    """
    plan, leaves = _match_words(features, plan)
    return _find_ids(tables, leaves, plan)


@functools.partial(jax.jit, static_argnames="plan")
def _find_ids(
    tables: dict[str, Any], leaves: list[Any], plan: EmbeddingPlan
) -> FindResult:
    def find_shard(directory, sources, stack):
        def answer(carry, ids, current_pass):
            del current_pass
            lanes = find_lanes(directory, ids)
            return carry, lanes, lanes >= 0

        # One pass is enough: finding an id doesn't depend on other ids.
        _, answers = _ask_owners((), answer, 1, sources, stack)
        rows, hits = _by_feature(answers, sources, dynamic_tables(stack))
        counts = no_counts(len(stack.tables))
        return rows, _stats(sources, hits, counts, directory, stack)

    def find(stack, sources, plan):
        return on_shards(
            functools.partial(find_shard, stack=stack),
            plan,
            in_specs=(stack.rows_spec, plan.sample_spec),
            out_specs=(plan.sample_spec, PartitionSpec()),
        )(tables[directory_name(stack.name)], sources)

    features, stats = _with_rows(leaves, plan, find)
    return FindResult(features=features, stats=stats)


def _with_rows(
    leaves: list[Any], plan: EmbeddingPlan, translate: Translate
) -> tuple[Any, dict[str, DynamicStats]]:
    """Replaces ids with `RowIds`, and collects the counts for each table."""
    sources, stats = {}, {}
    for i, (leaf, feature) in enumerate(zip(leaves, plan.features, strict=True)):
        if _holds_ids(leaf, feature):
            flatten = functools.partial(_flat_ids, feature=feature, plan=plan)
            sources[i] = in_auto_axes(flatten, plan, plan.sample_spec)(leaf)
    rows = {}
    for stack in plan.stacks:
        if numbers := [i for i in plan.features_of(stack) if i in sources]:
            stack_sources = [sources[i] for i in numbers]
            stack_rows, counts = translate(stack, stack_sources, plan)
            rows |= zip(numbers, stack_rows, strict=True)
            for i, table in enumerate(stack.tables):
                stats[table.name] = jax.tree.map(lambda count, i=i: count[i], counts)
    for i, leaf in enumerate(leaves):
        if i not in rows:
            continue
        shape, spec = ids_of(leaf).shape, plan.sample_spec
        if not isinstance(leaf, ShardedRaggedIds):
            spec = plan.sharding_of_samples(shape).spec

        def in_shape(flat_rows, shape=shape):
            # `_flat_ids` padded the batch to a multiple of the shard count.
            return flat_rows[: math.prod(shape)].reshape(shape)

        rows_in_shape = in_auto_axes(in_shape, plan, spec)(rows[i])
        leaves[i] = RowIds(with_ids(leaf, rows_in_shape))
    return plan.unflatten(leaves), stats


def _holds_ids(leaf: Any, feature: FeaturePlan) -> bool:
    is_dynamic = isinstance(feature.table.vocabulary, Dynamic)
    return is_dynamic and not isinstance(leaf, RowIds)


def _match_words(features: Any, plan: EmbeddingPlan) -> tuple[EmbeddingPlan, list[Any]]:
    """Parses a batch into `Ids64`. Rejects 32-bit ids, which may have lost bits."""
    plan, leaves = plan.match(features)
    for i, feature in enumerate(plan.features):
        if not _holds_ids(leaves[i], feature):
            continue
        check_prepared(leaves[i], feature)
        ids = ids_of(leaves[i])
        if isinstance(ids, Ids64):
            continue
        # Only JAX arrays of 64 bits, which need `jax_enable_x64`, hold whole ids.
        if not isinstance(ids, jax.Array) or ids.dtype.itemsize < 8:
            raise truncated_ids(str(getattr(ids, "dtype", type(ids).__name__)), feature)
        leaves[i] = with_ids(leaves[i], Ids64.of_array(ids))
    return plan, leaves


def _flat_ids(leaf: Any, feature: FeaturePlan, plan: EmbeddingPlan) -> SourceIds:
    ids = ids_of(leaf)
    inserts = jnp.full(ids.shape, not feature.config.find_only)
    # Ids that contribute nothing to a lookup don't need a row. An id whose weight is
    # NaN does contribute, so that the NaN reaches the loss.
    weights = getattr(leaf, "weights", None)
    if weights is not None:
        weights = jnp.asarray(weights)
        inserts &= ~(weights <= 0) if leaves_out_weights(feature) else weights != 0
    if length := feature_shape(leaf, feature, plan.num_shards).sequence_length:
        inserts &= _positions(leaf, plan) < length
    room = -ids.high.size % plan.num_shards

    def flat(values, fill):
        values = jnp.asarray(values).reshape(-1)
        return jnp.pad(values, (0, room), constant_values=fill)

    tables = plan.stacks[feature.stack_index].tables
    offsets = [table.row_offset for table in tables]
    return SourceIds(
        high=flat(ids.high, NO_ID),
        low=flat(ids.low, NO_ID),
        inserts=flat(inserts, False),
        table=offsets.index(feature.row_offset),
    )


def _positions(leaf: Any, plan: EmbeddingPlan) -> Array:
    if not isinstance(leaf, ShardedRaggedIds):
        shape = ids_of(leaf).shape
        if len(shape) == 1:
            return jnp.zeros(shape, jnp.int32)
        return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    num_values = leaf.values.shape[1]

    def positions_on_shard(row_splits):
        return positions_of(row_splits[0], num_values)[None]

    return on_shards(
        positions_on_shard, plan, in_specs=plan.sample_spec, out_specs=plan.sample_spec
    )(jnp.asarray(leaf.row_splits))


def _stats(
    sources: Sequence[SourceIds],
    hits: Sequence[Array],
    counts: Counts,
    directory: IdDirectory,
    stack: StackPlan,
) -> DynamicStats:
    num_tables = len(stack.tables)

    def by_table(numbers):
        sums = [jnp.int32(0)] * num_tables
        for number, source in zip(numbers, sources, strict=True):
            sums[source.table] += number
        return jnp.stack(sums)

    num_ids = [jnp.sum(source.is_id, dtype=jnp.int32) for source in sources]
    sample_counts = by_table(num_ids), by_table(hits)
    owner_counts = counts._asdict() | {"used_rows": directory.used_rows}
    if stack.num_devices > 1:
        sample_counts = jax.lax.psum(sample_counts, stack.sample_axes)
    if stack.num_shards > 1:
        # Replicas of a shard have the same counts, so don't sum over them.
        owner_counts = jax.lax.psum(owner_counts, stack.shard_axes)
    ids, hit_counts = sample_counts
    return DynamicStats(ids=ids, hits=hit_counts, **owner_counts)


def _ask_owners(
    carry: Any,
    answer: Answer,
    num_passes: int,
    sources: Sequence[SourceIds],
    stack: StackPlan,
) -> tuple[Any, UInt32[Array, " ids"]]:
    """Sends all ids to their owners, round by round, and collects the replies."""
    ids = _mix(sources, stack)
    if stack.num_devices == 1:
        only_pass = Pass(notes=True, fills=True)
        # One device needs neither rounds nor dedup: `insert` merges repeats itself.
        return _answer(carry, answer, ids, only_pass, stack)
    sent = _send(ids, stack)
    (is_pending,) = sent.first.is_pending
    answers = jnp.full(ids.buckets.shape, _NO_ROW, jnp.uint32)
    # A single round notes and fills at once. Otherwise, the first round only notes.
    fills_at_once = ~is_pending | (num_passes == 1)

    def ask(state, current: Round, fills):
        carry, answers, notes = state
        requests = current.requests
        if stack.num_replicas > 1:
            # Each replica of the directory must see the ids from all replicas.
            requests = jax.lax.all_gather(requests, stack.replica_axes, tiled=True)
        bucket, first, second, may_insert = requests.T
        ids = MixedIds(bucket.astype(jnp.int32), first, second, may_insert == 1)
        current_pass = Pass(notes=notes, fills=fills)
        carry, replies = _answer(carry, answer, ids, current_pass, stack)
        if stack.num_replicas > 1:
            size = current.requests.shape[0]
            start = jax.lax.axis_index(stack.replica_axes) * size
            replies = jax.lax.dynamic_slice_in_dim(replies, start, size)
        replies = exchange(replies, stack)
        positions = current.buffer_positions
        new_answers = replies.at[positions].get(mode="fill", fill_value=_NO_ROW)
        # Ids from other rounds point past the end, and their answers don't change.
        is_asked = positions < sent.size.buffer_size
        answers = jnp.where(is_asked, new_answers, answers)
        # The noting pass ends with its last round.
        return carry, answers, notes & current.is_pending[0]

    def ask_later(state, current: Round):
        _, _, notes = state
        return ask(state, current, ~notes)

    state = ask((carry, answers, jnp.ones((), bool)), sent.first, fills_at_once)
    state, _ = fold_later_rounds(ask_later, state, sent, stack, num_passes)
    carry, answers, _ = state
    return carry, unsort(answers, sent.unique.order)


def _mix(sources: Sequence[SourceIds], stack: StackPlan) -> MixedIds:
    tables = dynamic_tables(stack)
    buckets_per_shard = sum(table.buckets_per_shard for table in tables)
    mixed = []
    for source in sources:
        table = tables[source.table]
        first, second = mix_ids(source.high, source.low)
        bucket = multiply_high(first, table.dynamic.num_buckets)
        # Buckets are numbered owner by owner, as `dedup` expects.
        owner, local = jnp.divmod(bucket, table.buckets_per_shard)
        bucket = owner * buckets_per_shard + table.first_bucket + local
        bucket = jnp.where(source.is_id, bucket, PADDING_ROW_ID)
        mixed.append(MixedIds(bucket, first, second, source.inserts))
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *mixed)


def _send(ids: MixedIds, stack: StackPlan) -> SentIds:
    tables = dynamic_tables(stack)
    unique = dedup(
        (ids.buckets, ids.first, ids.second),
        stack.num_shards,
        sum(table.buckets_per_shard for table in tables),
        keeps_duplicates=False,
    )
    inserts = jnp.zeros(ids.buckets.shape, jnp.uint32)
    inserts = inserts.at[unique.ranks].max(
        ids.may_insert[unique.order].astype(jnp.uint32), mode="promise_in_bounds"
    )
    # The first owner has the most buckets. In small tables, the last owner may have
    # none.
    (num_ids,) = ids.buckets.shape
    mean = num_ids * max(t.buckets_per_shard / t.dynamic.num_buckets for t in tables)
    room = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    capacity = max(room, _MIN_CAPACITY)
    size = round_size(num_ids, stack.num_shards, num_ids, capacity=capacity)
    return send_unique(unique, (inserts[unique.ranks],), size, stack)


def _answer(
    carry: Any, answer: Answer, ids: MixedIds, current_pass: Pass, stack: StackPlan
) -> tuple[Any, UInt32[Array, " ids"]]:
    tables = dynamic_tables(stack)
    carry, lanes, is_known = answer(carry, ids, current_pass)
    on_shard = local_rows(ids.buckets, lanes, tables, first_row=False)
    row = on_shard * stack.num_shards + jax.lax.axis_index(stack.shard_axes)
    # Each reply is one word. Rows are below 2**31 - 1, so no reply equals `_NO_ROW`.
    replies = row.astype(jnp.uint32) << 1 | is_known.astype(jnp.uint32)
    return carry, jnp.where(lanes < 0, _NO_ROW, replies)


def _by_feature(
    answers: UInt32[Array, " ids"],
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
) -> tuple[list[Int[Array, " _"]], list[Int[Array, ""]]]:
    sizes = [source.high.shape[0] for source in sources]
    rows, hits = [], []
    for source, answer in zip(sources, split_by_feature(answers, sizes), strict=True):
        default = tables[source.table].default_row
        missing = PADDING_ROW_ID
        if default is not None:
            # Padding must not train the default row.
            missing = jnp.where(source.is_id, default, PADDING_ROW_ID)
        has_row = answer != _NO_ROW
        rows.append(jnp.where(has_row, (answer >> 1).astype(jnp.int32), missing))
        hits.append(jnp.sum(has_row & (answer & 1 == 1), dtype=jnp.int32))
    return rows, hits
