"""The functional core: the layer on explicit arrays, for your own training loop.

    tables = init_tables(plan, key)
    slots = init_slots(tables, plan)
    # in the jitted step, with tables and slots donated:
    result = lookup(tables, features, plan)
    loss, cotangents = jax.value_and_grad(dense_part)(result.activations)
    gradients = compute_gradients(result.routing, cotangents, plan)
    tables, slots = apply_gradients(tables, slots, gradients, plan)

All functions take global arrays, sharded over the plan's mesh, and run inside
`shard_map`. The Flax modules of `tpu_embedding.nn` consist of these four.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.functional.dynamic_ids import (
    find_ids,
    holds_raw_ids,
    raw_feature,
    refuse_raw_ids,
    row_numbers,
    rows_of_batch,
)
from tpu_embedding.gradients import TableGradients, global_norm, gradient_of_stack
from tpu_embedding.inputs.shard_inputs import (
    FeatureShape,
    ShardableInput,
    feature_shape,
    refuse_unequal_batches,
    to_feature_input,
    to_shardable,
)
from tpu_embedding.lookup._backward import (
    gradient_by_sample,
    gradient_rounds,
    seal_gradient,
    stack_gradient,
)
from tpu_embedding.lookup._forward import (
    StackLookup,
    StackRouting,
    read_stack,
    route_stack,
)
from tpu_embedding.optimizers.table_rows import model_gradient_context
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import gradient_of_no_row
from tpu_embedding.types import LookupStats
from tpu_embedding.update.apply import (
    apply_gradient,
    init_state,
    step_without_gradient,
)
from tpu_embedding.update.lazy_update import values_of, with_values
from tpu_embedding.update.partition_specs import slot_specs, table_specs
from tpu_embedding.update.sparse_cores import apply_on_sparse_cores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """A batch whose ids are at the owners of their rows, for both passes.

    Attributes:
      stacks: stack name to routed ids; stacks that no feature of the batch uses are
        missing.
      shapes: per lookup.
      plan: plan of the batch's features.
      raw_feature: a feature of a dynamic table whose ids `lookup` only found, which
        trains no new id; None: there is none.
    """

    stacks: dict[str, StackRouting]
    shapes: tuple[FeatureShape, ...] = dataclasses.field(metadata={"static": True})
    plan: EmbeddingPlan = dataclasses.field(metadata={"static": True})
    raw_feature: str | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupResult:
    """Result of `lookup`.

    Attributes:
      activations: nest like the batch's features; `[batch, dim]`, or the feature's
        sequence or output shape, float32. Global.
      routing: facts for `compute_gradients`.
      stats: rounds used, ids out of range, and rows requested from each shard.
    """

    activations: Any
    routing: Routing
    stats: LookupStats


def activation_shapes(features: Any, plan: EmbeddingPlan) -> Any:
    """Returns the shapes of the activations of a batch, without a lookup.

    Args:
      features: see `lookup`; only shapes and dtypes are read.
      plan: plan of the layer.

    Returns:
      Nest of `jax.ShapeDtypeStruct`, with shardings.
    """
    plan = plan.for_batch(features)
    leaves = [
        leaf if holds_raw_ids(leaf, feature) else row_numbers(leaf, feature)
        for leaf, feature in zip(plan.flatten(features), plan.features, strict=True)
    ]
    structs = [
        jax.ShapeDtypeStruct(
            shape.output_shape,
            jnp.float32,
            sharding=NamedSharding(plan.mesh, _activation_spec(shape, plan)),
        )
        for shape in _feature_shapes(leaves, plan)
    ]
    return plan.unflatten(structs)


def lookup(
    tables: dict[str, PackedRows], features: Any, plan: EmbeddingPlan
) -> LookupResult:
    """Looks up a batch in sharded tables.

    Args:
      tables: stack name to packed rows, from `init_tables`.
      features: nest like the plan's `feature_config`, whose dicts may lack keys; leaves
        are int arrays `[batch]` or `[batch, valence]`, `DenseIds`, or
        `ShardedRaggedIds` from `prepare_features`. Global. Samples without ids pad a
        batch to a multiple of the devices; their activations are cut off.
      plan: plan of the layer.

    Returns:
      Activations, routing and stats. JAX sees no derivative of the activations by the
      tables: `compute_gradients` computes it.

    Raises:
      TypeError, ValueError: if a feature's dtype or shape does not fit its config, or
        the tables were made for another plan.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = {"watched": jnp.array([1, 2])}
      >>> te.functional.lookup(tables, ids, plan).activations["watched"].shape
      (2, 4)
    """
    raw = raw_feature(features, plan)
    if raw is None:
        return read_rows(tables, route(features, plan), plan)
    routed = route(find_ids(tables, features, plan).features, plan)
    return read_rows(tables, dataclasses.replace(routed, raw_feature=raw), plan)


def route(features: Any, plan: EmbeddingPlan) -> Routing:
    """Sends the ids of a batch to the owners of their rows; the first half of `lookup`.

    It reads no table. So the ids of the next batch can travel while a step computes;
    `tpu_embedding.PipelinedTrainStep` does that for Flax models.

    Args:
      features: see `lookup`.
      plan: plan of the layer.

    Returns:
      The routed batch, for `read_rows`.

    Raises:
      TypeError, ValueError: if a feature's dtype or shape does not fit its config.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> routed = te.functional.route({"watched": jnp.array([1, 2])}, plan)
      >>> te.functional.read_rows(tables, routed, plan).activations["watched"].shape
      (2, 4)
    """
    plan = plan.for_batch(features)
    leaves = rows_of_batch(features, plan)
    shapes = _feature_shapes(leaves, plan)
    shardables = [
        _to_shardable(ids, shape, plan)
        for ids, shape in zip(leaves, shapes, strict=True)
    ]
    stacks = _route(shardables, tuple(shapes), plan)
    return Routing(stacks=stacks, shapes=tuple(shapes), plan=plan)


def read_rows(
    tables: dict[str, PackedRows], routed: Routing, plan: EmbeddingPlan
) -> LookupResult:
    """Reads the rows of a routed batch and combines them; the second half of `lookup`.

    Args:
      tables: stack name to packed rows, from `init_tables`.
      routed: from `route`.
      plan: plan of the layer, the one that routed the batch.

    Returns:
      The result of `lookup`.

    Raises:
      ValueError: if the tables were made, or the batch was routed, for another plan.
    """
    if routed.plan.stacks != plan.stacks:
        raise ValueError(
            "read_rows needs a batch that was routed with its plan, got one of another "
            "plan; call route with this plan."
        )
    check_tables(tables, routed.plan.used_stacks)
    used = {stack.name: tables[stack.name] for stack in routed.plan.used_stacks}
    return _read_routed(used, routed)


@jax.jit
def _read_routed(tables: dict[str, PackedRows], routed: Routing) -> LookupResult:
    plan = routed.plan

    def read(tables, stacks):
        results = _read_stacks(jax.lax.stop_gradient(tables), stacks, plan)
        routings = {name: result.routing for name, result in results.items()}
        activations = _collect_activations(results, routed.shapes, plan)
        return activations, routings, _collect_stats(results, plan)

    specs = [_activation_spec(shape, plan) for shape in routed.shapes]
    out_specs = (plan.unflatten(specs), plan.sample_spec, PartitionSpec())
    activations, routings, stats = in_auto_axes(read, plan, out_specs)(
        tables, routed.stacks
    )
    routing = dataclasses.replace(routed, stacks=routings)
    return LookupResult(activations=activations, routing=routing, stats=stats)


@functools.partial(jax.jit, static_argnames="plan")
def compute_gradients(
    routing: Routing, cotangents: Any, plan: EmbeddingPlan
) -> TableGradients:
    """Returns the tables' sparse gradients.

    They stay on the devices of the samples. The owners of the touched rows get them
    here for round 1, and in `apply_gradients` for later rounds, which only skew needs.

    Args:
      routing: facts that the lookup handed on.
      cotangents: derivatives of the loss by the activations; the same nest. None for
        an activation means zeros, as in TensorFlow.
      plan: plan of the layer, or one with other features on the same tables.

    Returns:
      The gradients, for `apply_gradients`. A row is touched if it was looked up, even
      if its gradient is zero. `tpu_embedding.gradients.add` sums those of several
      lookups.

    Raises:
      TypeError: if the lookup was given ids of a dynamic table in place of rows.
    """
    if routing.plan.stacks != plan.stacks:
        raise ValueError(
            "routing must be that of a lookup in the plan's tables, got one of other "
            "tables; use one plan for the whole step."
        )
    if routing.raw_feature is not None:
        refuse_raw_ids(routing.raw_feature)
    layer_plan, plan = plan, routing.plan
    cotangents = plan.flatten(cotangents, "cotangents")

    def compute_shard(routings, by_feature):
        return {
            stack.name: seal_gradient(
                stack_gradient(
                    routings[stack.name],
                    [by_feature[i] for i in plan.features_of(stack)],
                    stack,
                    plan,
                )
            )
            for stack in plan.trained_stacks
            if stack.name in routings
        }

    def compute(routings, cotangents):
        by_feature = [
            _to_shards(cotangent, shape, feature, plan)
            for cotangent, shape, feature in zip(
                cotangents, routing.shapes, plan.features, strict=True
            )
        ]
        return on_shards(
            compute_shard, plan, in_specs=plan.sample_spec, out_specs=plan.sample_spec
        )(routings, by_feature)

    stacks = in_auto_axes(compute, plan, plan.sample_spec)(routing.stacks, cotangents)
    return TableGradients(stacks, layer_plan)


@functools.partial(jax.jit, static_argnames="plan")
def init_slots(tables: dict[str, PackedRows], plan: EmbeddingPlan) -> dict[str, Any]:
    """Returns the optimizer state of each stack that has an optimizer.

    Args:
      tables: stack name to packed rows; initial values may depend on them.
      plan: plan of the layer.

    Returns:
      Stack name to the optimizer's state. Slot variables are `PackedRows`, sharded
      like their table; other values are replicated.
    """
    check_tables(tables, plan.trained_stacks)
    trained = {stack.name: tables[stack.name] for stack in plan.trained_stacks}

    def init_shard(tables):
        return {
            stack.name: init_state(tables[stack.name], stack, plan)
            for stack in plan.trained_stacks
        }

    in_shards = functools.partial(
        on_shards, init_shard, plan, in_specs=(table_specs(trained, plan),)
    )
    # The structure of the states says which leaves are sharded.
    structure = jax.eval_shape(in_shards(out_specs=PartitionSpec()), trained)
    return in_shards(out_specs=slot_specs(structure, plan))(trained)


@functools.partial(jax.jit, static_argnames="plan")
def apply_gradients(
    tables: dict[str, PackedRows],
    slots: dict[str, Any],
    gradients: TableGradients,
    plan: EmbeddingPlan,
    gradient_norm: Any = None,
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """Updates the touched rows of tables and slot variables: one step.

    The update is in place if the caller's `jit` donates them. Stacks without an
    optimizer stay as they are.

    Every call is one step for all trained tables, as in TensorFlow and optax. Step
    counts and schedules advance also for a table that the step did not look up. With
    `every_row`, such a table moves with its momentum. So call it once per step: `add`
    sums the gradients of several lookups.

    Args:
      tables: stack name to packed rows.
      slots: stack name to optimizer state, from `init_slots`.
      gradients: from `compute_gradients`, or a sum of several.
      plan: plan of the layer.
      gradient_norm: norm of the gradients of the whole model, a float32 scalar, for
        optimizers with `global_clipnorm`. None: that of these tables.

    Returns:
      New tables and slots. Rows that the step did not look up keep their bits, unless
      the optimizer is one for every row.

    Raises:
      TypeError: if the gradients are not those of `compute_gradients`.
      ValueError: if tables, slots or gradients belong to another plan.
    """
    _check_gradients(gradients, plan)
    check_tables(tables, plan.trained_stacks)
    check_slots(slots, plan.trained_stacks)
    _check_states(tables, slots, plan)
    if gradient_norm is None and takes_model_norm(plan):
        gradient_norm = global_norm(gradients)
    tables = _advance_clocks(tables, plan)
    moved, resting = [], []
    for stack in plan.trained_stacks:
        moves = stack.name in gradients.stacks or stack.optimizer.rows == "every"
        (moved if moves else resting).append(stack)
    if resting:
        slots = _step_without_gradients(slots, resting, plan)
    if not moved:
        return tables, slots
    return _move_rows(tables, slots, gradients, gradient_norm, moved, plan)


def _advance_clocks(tables: dict[str, Any], plan: EmbeddingPlan) -> dict[str, Any]:
    """Ends the step of the dynamic tables: ids of the next one may evict its ids."""
    names = [directory_name(s.name) for s in plan.stacks if s.is_dynamic]
    last = np.uint32(2**32 - 2)
    return tables | {
        name: dataclasses.replace(
            tables[name], clock=jnp.minimum(tables[name].clock, last) + np.uint32(1)
        )
        for name in names
    }


def _move_rows(
    tables: dict[str, PackedRows],
    slots: dict[str, Any],
    gradients: TableGradients,
    gradient_norm: Any,
    stacks: list[TrainedStackPlan],
    plan: EmbeddingPlan,
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """Applies the gradients of some stacks; rules for every row need none."""
    old_tables = {stack.name: tables[stack.name] for stack in stacks}
    old_slots = {stack.name: slots[stack.name] for stack in stacks}
    used_rows = {
        stack.name: tables[directory_name(stack.name)].used_rows
        for stack in stacks
        if stack.is_dynamic
    }

    def apply_stack(table, state, gradient, used_rows, stack):
        def apply_rounds(table, state):
            rounds = (
                gradient_of_no_row(stack.dim)
                if gradient is None
                else gradient_rounds(gradient, stack, plan)
            )
            return apply_gradient(table, state, rounds, stack, plan, used_rows)

        if gradient is None or stack.backend.updates == "xla":
            return apply_rounds(table, state)
        ids, of_samples = gradient_by_sample(gradient, stack)
        return apply_on_sparse_cores(table, state, ids, of_samples, apply_rounds, stack)

    def apply_shard(tables, slots, used_rows, gradients, norm):
        squares = None if norm is None else lambda: jnp.square(norm)
        with model_gradient_context(squares):
            return {
                stack.name: apply_stack(
                    tables[stack.name],
                    slots[stack.name],
                    gradient_of_stack(gradients, stack)
                    if stack.name in gradients.stacks
                    else None,
                    used_rows.get(stack.name),
                    stack,
                )
                for stack in stacks
            }

    of_tables = table_specs(old_tables, plan)
    of_slots = slot_specs(old_slots, plan)
    results = on_shards(
        apply_shard,
        plan,
        in_specs=(
            of_tables,
            of_slots,
            {stack.name: stack.rows_spec for stack in stacks if stack.is_dynamic},
            plan.sample_spec,
            PartitionSpec(),
        ),
        out_specs={name: (of_tables[name], of_slots[name]) for name in of_tables},
    )(old_tables, old_slots, used_rows, gradients, gradient_norm)
    new_tables = tables | {name: result[0] for name, result in results.items()}
    return new_tables, slots | {name: result[1] for name, result in results.items()}


def _step_without_gradients(
    slots: dict[str, Any], stacks: list[TrainedStackPlan], plan: EmbeddingPlan
) -> dict[str, Any]:
    """Advances what belongs to no row, in stacks of which no row moves.

    Tables and slot variables take no part, so XLA has nothing to copy.
    """
    shapes = {
        stack.name: jax.eval_shape(lambda x: x, slots[stack.name]) for stack in stacks
    }

    def step_shard(values):
        return {
            stack.name: values_of(
                step_without_gradient(
                    with_values(shapes[stack.name], values[stack.name]), stack, plan
                )
            )
            for stack in stacks
        }

    values = {stack.name: values_of(slots[stack.name]) for stack in stacks}
    everywhere = PartitionSpec()
    new = on_shards(step_shard, plan, in_specs=everywhere, out_specs=everywhere)(values)
    return slots | {
        name: with_values(slots[name], of_stack) for name, of_stack in new.items()
    }


def _check_states(
    tables: dict[str, PackedRows], slots: dict[str, Any], plan: EmbeddingPlan
) -> None:
    """Refuses optimizer states of other optimizers, or of other storage types."""
    expected = jax.eval_shape(functools.partial(init_slots, plan=plan), tables)
    for stack in plan.trained_stacks:
        wanted, found = (jax.tree.structure(s[stack.name]) for s in (expected, slots))
        if wanted != found:
            raise ValueError(
                f"slots[{stack.name!r}] must be the state of the plan's optimizer,\n"
                f"  {wanted}, got\n  {found}.\nUse the slots that init_slots made "
                "for this plan."
            )


def takes_model_norm(plan: EmbeddingPlan) -> bool:
    """Returns True if an optimizer of the plan's tables asks for the model's norm."""
    return any(stack.optimizer.takes_model_norm for stack in plan.trained_stacks)


def _check_gradients(gradients: TableGradients, plan: EmbeddingPlan) -> None:
    """Refuses gradients of another type, and those of another plan."""
    if not isinstance(gradients, TableGradients):
        raise TypeError(
            "gradients must be the TableGradients of te.functional.compute_gradients, "
            f"got {describe_value(gradients)}."
        )
    if gradients.plan.stacks != plan.stacks:
        raise ValueError(
            "gradients must be those of the plan's tables, got gradients that were "
            "computed with another plan; use one plan for the whole step."
        )


@functools.partial(jax.jit, static_argnames=("shapes", "plan"))
def _route(
    shardables: list[ShardableInput],
    shapes: tuple[FeatureShape, ...],
    plan: EmbeddingPlan,
) -> dict[str, StackRouting]:
    """Routes all stacks, compiled even if the caller does not use `jit`."""

    def route_shard(shardables):
        inputs = [
            to_feature_input(shardable, shape)
            for shardable, shape in zip(shardables, shapes, strict=True)
        ]
        return {
            stack.name: route_stack(
                [inputs[i] for i in plan.features_of(stack)], stack, plan
            )
            for stack in plan.used_stacks
        }

    return on_shards(
        route_shard, plan, in_specs=plan.sample_spec, out_specs=plan.sample_spec
    )(shardables)


@functools.partial(jax.jit, static_argnames="plan")
def _read_stacks(
    tables: dict[str, PackedRows], routed: dict[str, StackRouting], plan: EmbeddingPlan
) -> dict[str, StackLookup]:
    """Reads the rows of all stacks, compiled even if the caller does not use `jit`."""

    def read_shard(tables, routed):
        return {
            stack.name: read_stack(tables[stack.name], routed[stack.name], stack, plan)
            for stack in plan.used_stacks
        }

    return on_shards(
        read_shard,
        plan,
        in_specs=(table_specs(tables, plan), plan.sample_spec),
        out_specs=plan.sample_spec,
    )(tables, routed)


def _feature_shapes(leaves: list[Any], plan: EmbeddingPlan) -> list[FeatureShape]:
    shapes = [
        feature_shape(ids, feature, plan)
        for ids, feature in zip(leaves, plan.features, strict=True)
    ]
    refuse_unequal_batches(
        (feature, shape.batch_size)
        for shape, feature in zip(shapes, plan.features, strict=True)
    )
    return shapes


def _collect_activations(
    results: dict[str, StackLookup],
    shapes: tuple[FeatureShape, ...],
    plan: EmbeddingPlan,
) -> Any:
    activations: list[Any] = [None] * len(plan.features)
    for stack in plan.used_stacks:
        for i, of_feature in zip(
            plan.features_of(stack), results[stack.name].activations, strict=True
        ):
            per_sample = max(1, shapes[i].sequence_length)
            used = of_feature[: shapes[i].batch_size * per_sample]
            activations[i] = used.reshape(shapes[i].output_shape)
    return plan.unflatten(activations)


def _activation_spec(shape: FeatureShape, plan: EmbeddingPlan) -> PartitionSpec:
    """Returns the partition of activations; whole if the devices do not divide."""
    divides = shape.output_shape[0] % plan.num_shards == 0
    return plan.batch_sharding.spec if divides else PartitionSpec()


def _to_shardable(ids: Any, shape: FeatureShape, plan: EmbeddingPlan) -> ShardableInput:
    """Fills up a batch; NumPy arrays are converted before JAX sees them."""
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(ids)):
        return _fill_up(ids, shape, plan)
    return to_shardable(ids, shape=shape, plan=plan)


@functools.partial(jax.jit, static_argnames=("shape", "plan"))
def _fill_up(ids: Any, shape: FeatureShape, plan: EmbeddingPlan) -> ShardableInput:
    """Fills up a batch on its devices, without a scalar from the host."""
    fill_up = functools.partial(to_shardable, shape=shape, plan=plan)
    return in_auto_axes(fill_up, plan, plan.sample_spec)(ids)


def _collect_stats(results: dict[str, StackLookup], plan: EmbeddingPlan) -> LookupStats:
    out_of_range = {}
    for stack in plan.used_stacks:
        counts = results[stack.name].routing.out_of_range
        for i, count in zip(plan.features_of(stack), counts, strict=True):
            out_of_range[plan.features[i].name] = jnp.sum(count)
    num_ids, requested_rows = {}, {}
    for name, result in results.items():
        if result.num_ids is not None and result.requested_rows is not None:
            num_ids[name] = jnp.sum(result.num_ids)
            requested_rows[name] = jnp.sum(result.requested_rows, axis=0)
    return LookupStats(
        rounds={name: result.rounds[0] for name, result in results.items()},
        out_of_range=out_of_range,
        num_ids=num_ids,
        requested_rows=requested_rows,
    )


def _to_shards(
    cotangent: jax.Array | None,
    shape: FeatureShape,
    feature: FeaturePlan,
    plan: EmbeddingPlan,
) -> jax.Array:
    """Reshapes a cotangent to its feature's samples over all shards, and pads it."""
    if cotangent is None:
        cotangent = jnp.zeros(shape.output_shape)
    if getattr(cotangent, "shape", None) != shape.output_shape:
        raise ValueError(
            f"The cotangent of feature {feature.name!r} must have the shape of its "
            f"activations, {shape.output_shape}, got "
            f"{getattr(cotangent, 'shape', cotangent)}; zeros are for an activation "
            "that the loss does not use."
        )
    per_sample = max(1, shape.sequence_length)
    dim = shape.output_shape[-1]
    cotangent = cotangent.astype(jnp.float32).reshape(-1, dim)
    num_samples = plan.num_shards * shape.samples_per_shard * per_sample
    return jnp.pad(cotangent, ((0, num_samples - cotangent.shape[0]), (0, 0)))
