"""The functional core: lookups and updates on explicit arrays, for your own loop.

A step calls `lookup`, `compute_gradients` and `apply_gradients`, as in
docs/concepts/lookup.md. All take global arrays, sharded over the plan's mesh, and call
`shard_map` themselves. The Flax modules in `tpu_embedding.nn` are built from them.

Users think in features, but a step works on stacks: tables that share an array. So each
function groups features by stack, and returns results by feature.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from tpu_embedding.argument_checks import invalid
from tpu_embedding.gradients import (
    TableGradients,
    global_norm,
    is_whole,
    may_be_partial,
)
from tpu_embedding.inputs.shard_inputs import (
    FeatureShape,
    fill_up,
    parse_batch,
    to_feature_input,
)
from tpu_embedding.lookup._backward import gradient_rounds, stack_gradient
from tpu_embedding.lookup._forward import (
    StackRouting,
    read_stack,
    route_stack,
)
from tpu_embedding.optimizers.probe import rates_are_finite
from tpu_embedding.optimizers.table_rows import model_gradient_context
from tpu_embedding.plan.check_rows import check_slots, check_tables
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.plan.shard_map import (
    in_auto_axes,
    on_plan_mesh,
    on_shards,
    unchecked_values,
)
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import Sealed, empty_gradient
from tpu_embedding.types import LookupStats
from tpu_embedding.update.drivers import state_without_rows, update_stack
from tpu_embedding.update.state import (
    abstract_state,
    init_state,
    rule_state_of,
    state_specs,
    structure_of_state,
    values_of,
    with_values_if,
)
from tpu_embedding.vocabularies import unknown_rows
from tpu_embedding.xla import run_if


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """A batch whose ids have been sent to the owners of their rows.

    Both the forward and the backward pass use it.

    Attributes:
      stacks: stack name to routed ids, without stacks that the batch doesn't use.
      shapes: sizes of each feature.
      plan: plan of the features in the batch.
      raw_feature: the first feature whose rows `lookup` had to find, if any. Its new
        ids lack rows, so you can't train on the batch.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> routing = te.functional.route({"watched": jnp.array([1, 2])}, plan)
      >>> list(routing.stacks)
      ['stack_0']
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
      activations: global float32 arrays, in a nest like the features. Shapes are
        `[batch, dim]`, unless the feature sets `max_sequence_length` or `output_shape`.
      routing: input to `compute_gradients`.
      stats: rounds, ids out of range, and rows requested from each shard.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = {"watched": jnp.array([1, 2])}
      >>> result = te.functional.lookup(tables, ids, plan)
      >>> int(result.stats.rounds["stack_0"])
      1
    """

    activations: Any
    routing: Routing
    stats: LookupStats


def activation_shapes(features: Any, plan: EmbeddingPlan) -> Any:
    """Determines activation shapes without a lookup.

    Args:
      features: see `lookup`; only shapes and dtypes are read.
      plan: plan of the layer.

    Returns:
      Nest of `jax.ShapeDtypeStruct`, with shardings.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ids = {"watched": jnp.array([1, 2])}
      >>> te.functional.activation_shapes(ids, plan)["watched"].shape
      (2, 4)
    """
    batch = parse_batch(features, plan)
    structs = [
        jax.ShapeDtypeStruct(
            shape.output_shape,
            jnp.float32,
            sharding=batch.plan.sharding_of_samples(shape.output_shape),
        )
        for shape in batch.shapes
    ]
    return batch.plan.unflatten(structs)


def lookup(
    tables: dict[str, PackedRows], features: Any, plan: EmbeddingPlan
) -> LookupResult:
    """Looks up a batch in sharded tables.

    Args:
      tables: stack name to packed rows, from `init_tables`.
      features: nest like the plan's `feature_config`; you can omit dict keys. Leaves
        are global int arrays `[batch]` or `[batch, valence]`, `DenseIds`, or
        `ShardedRaggedIds` from `prepare_features`. You can pass any batch size. Batches
        are padded to a multiple of the device count, and the activations are cut back
        to your size.
      plan: plan of the layer.

    Returns:
      Activations, routing and stats. Note that JAX does not differentiate with respect
      to the tables; call `compute_gradients`.

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
    batch = parse_batch(features, plan)
    plan, raw = batch.plan, batch.raw_feature
    if raw is None:
        return read_rows(tables, route(batch, plan), plan)
    # New ids lack rows here. The name of `raw` makes `compute_gradients` raise.
    features = plan.unflatten(batch.leaves)
    for inputs in dict.fromkeys(feature.inputs for feature in plan.features):
        features = inputs.find_rows(tables, features, plan)
    routed = dataclasses.replace(route(features, plan), raw_feature=raw.name)
    return read_rows(tables, routed, plan)


def route(features: Any, plan: EmbeddingPlan) -> Routing:
    """Sends ids to the owners of their rows; the first half of `lookup`.

    It reads no tables, so you can send the next batch while a step runs. For Flax
    models, `tpu_embedding.PipelinedTrainStep` does so.

    Args:
      features: see `lookup`.
      plan: plan of the layer.

    Returns:
      The routed batch, for `read_rows`.

    Raises:
      TypeError, ValueError: if a feature's dtype or shape does not fit its config, or a
        feature holds ids whose rows are not known.

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
    batch = parse_batch(features, plan)
    plan, shapes = batch.plan, batch.shapes
    ids_of_features = on_plan_mesh(batch.row_numbers(), plan)
    for i, ids in enumerate(ids_of_features):
        if not all(isinstance(array, jax.Array) for array in jax.tree.leaves(ids)):
            # `jit` would truncate NumPy's 64-bit ids.
            ids_of_features[i] = fill_up(ids, plan.num_shards)
    with unchecked_values():
        stacks = _route(ids_of_features, shapes, plan)
    return Routing(stacks=stacks, shapes=shapes, plan=plan)


@functools.partial(jax.jit, static_argnames=("shapes", "plan"))
def _route(
    leaves: list[Any], shapes: tuple[FeatureShape, ...], plan: EmbeddingPlan
) -> dict[str, StackRouting]:
    """Routes the features of each stack. It is compiled even if the caller is not."""

    def route_shard(filled):
        inputs = [
            to_feature_input(ids, shape, plan.sample_axes)
            for ids, shape in zip(filled, shapes, strict=True)
        ]
        routings = {}
        for stack in plan.used_stacks:
            numbers = plan.features_of(stack)
            routings[stack.name] = route_stack(
                [inputs[i] for i in numbers],
                [plan.features[i] for i in numbers],
                stack,
            )
        return routings

    def fill_up_and_route(leaves):
        # Ids that `route` has already padded don't change.
        filled = [fill_up(ids, plan.num_shards) for ids in leaves]
        return on_shards(
            route_shard, plan, in_specs=plan.sample_spec, out_specs=plan.sample_spec
        )(filled)

    return in_auto_axes(fill_up_and_route, plan, plan.sample_spec)(leaves)


def read_rows(
    tables: dict[str, PackedRows], routed: Routing, plan: EmbeddingPlan
) -> LookupResult:
    """Reads and combines the rows for a routed batch; the second half of `lookup`.

    Args:
      tables: stack name to packed rows, from `init_tables`.
      routed: from `route`.
      plan: plan of the layer; the batch must have been routed with it.

    Returns:
      The result of `lookup`.

    Raises:
      ValueError: if the tables were made, or the batch was routed, for another plan.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> routed = te.functional.route({"watched": jnp.array([1, 2])}, plan)
      >>> te.functional.read_rows(tables, routed, plan).activations["watched"].shape
      (2, 4)
    """
    if routed.plan.stacks != plan.stacks:
        raise ValueError(
            "read_rows needs a batch routed with the same plan, got a batch of "
            "another plan; call route with this plan."
        )
    check_tables(tables, routed.plan.used_stacks)
    used = {stack.name: tables[stack.name] for stack in routed.plan.used_stacks}
    with unchecked_values():
        return _read_routed(used, routed)


@jax.jit
def _read_routed(tables: dict[str, PackedRows], routed: Routing) -> LookupResult:
    plan = routed.plan

    def read(tables, stacks):
        results = {
            stack.name: on_shards(
                functools.partial(read_stack, stack=stack),
                plan,
                in_specs=(stack.rows_spec, plan.sample_spec),
                out_specs=plan.sample_spec,
                # Not differentiated by JAX: `compute_gradients` makes sparse gradients.
            )(jax.lax.stop_gradient(tables[stack.name]), stacks[stack.name])
            for stack in plan.used_stacks
        }
        activations: list[Any] = [None] * len(plan.features)
        for stack in plan.used_stacks:
            samples_of_features, *_ = results[stack.name]
            pairs = zip(plan.features_of(stack), samples_of_features, strict=True)
            for i, samples in pairs:
                # Samples that only fill up the batch come last, and are cut off.
                shape = routed.shapes[i]
                activations[i] = samples[: shape.num_rows].reshape(shape.output_shape)
        routings = {name: routing for name, (_, routing, _) in results.items()}
        counts = {name: counts for name, (*_, counts) in results.items()}
        stats = _collect_stats(routings, counts, plan)
        return plan.unflatten(activations), routings, stats

    specs = [plan.sharding_of_samples(s.output_shape).spec for s in routed.shapes]
    out_specs = (plan.unflatten(specs), plan.sample_spec, PartitionSpec())
    activations, routings, stats = in_auto_axes(read, plan, out_specs)(
        tables, routed.stacks
    )
    routing = dataclasses.replace(routed, stacks=routings)
    return LookupResult(activations=activations, routing=routing, stats=stats)


def _collect_stats(
    routings: Mapping[str, StackRouting],
    counts: Mapping[str, Mapping[str, Array]],
    plan: EmbeddingPlan,
) -> LookupStats:
    out_of_range = {}
    for stack in plan.used_stacks:
        of_features = routings[stack.name].out_of_range
        for i, count in zip(plan.features_of(stack), of_features, strict=True):
            out_of_range[plan.features[i].name] = jnp.sum(count)

    def total(field: str) -> dict[str, Array]:
        return {
            name: jnp.sum(of_stack[field], axis=0)
            for name, of_stack in counts.items()
            if field in of_stack
        }

    return LookupStats(
        # All devices run the same number of rounds.
        rounds={name: of_stack["rounds"][0] for name, of_stack in counts.items()},
        out_of_range=out_of_range,
        num_ids=total("num_ids"),
        requested_rows=total("requested_rows"),
        missing_rows=total("missing_rows"),
    )


@functools.partial(jax.jit, static_argnames="plan")
def compute_gradients(
    routing: Routing, cotangents: Any, plan: EmbeddingPlan
) -> TableGradients:
    """Computes sparse table gradients.

    The gradients stay sharded like the samples. This call runs only the first exchange
    round, which sends values to the owners of the touched rows. Skewed batches need
    more rounds, which `apply_gradients` runs.

    Args:
      routing: routing from the lookup.
      cotangents: loss derivatives with respect to the activations, in the same nest.
        None for an activation means zeros, as in TensorFlow.
      plan: plan of the layer, or a plan with other features on the same tables.

    Returns:
      The gradients, for `apply_gradients`. A row is touched if it was looked up, even
      if its gradient is zero. To sum the gradients of several lookups, call
      `tpu_embedding.gradients.add`.

    Raises:
      TypeError: if the lookup had to find the rows of a feature.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> result = te.functional.lookup(tables, jnp.array([1, 2]), plan)
      >>> loss, cotangents = jax.value_and_grad(jnp.sum)(result.activations)
      >>> gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
      >>> list(gradients.stacks)
      ['stack_0']
    """
    if routing.plan.stacks != plan.stacks:
        raise ValueError(
            "routing must be from a lookup in the plan's tables, got a lookup with "
            "another plan; use one plan for the whole step."
        )
    if routing.raw_feature is not None:
        features = {feature.name: feature for feature in routing.plan.features}
        raw = features[routing.raw_feature]
        raise unknown_rows(raw)
    # The batch may lack features, so its own plan describes the routing. The gradients
    # carry the caller's plan, which is the one that `apply_gradients` gets.
    layer_plan, plan = plan, routing.plan
    cotangents = plan.flatten(cotangents, "cotangents")

    def compute(routings, cotangents):
        cotangents_by_feature = [
            _cotangent_of_samples(cotangent, shape, feature, plan)
            for cotangent, shape, feature in zip(
                cotangents, routing.shapes, plan.features, strict=True
            )
        ]
        return {
            stack.name: on_shards(
                functools.partial(stack_gradient, stack=stack),
                plan,
                in_specs=plan.sample_spec,
                out_specs=plan.sample_spec,
            )(
                routings[stack.name],
                [cotangents_by_feature[i] for i in plan.features_of(stack)],
            )
            for stack in plan.trained_stacks
            if stack.name in routings
        }

    stacks = in_auto_axes(compute, plan, plan.sample_spec)(routing.stacks, cotangents)
    return TableGradients(stacks, layer_plan)


def _cotangent_of_samples(
    cotangent: jax.Array | None,
    shape: FeatureShape,
    feature: FeaturePlan,
    plan: EmbeddingPlan,
) -> Float[Array, "samples dim"]:
    """Reshapes a cotangent to one row per sample, and pads it for all devices."""
    if cotangent is None:  # TensorFlow also sends zeros, so the rows count as touched.
        cotangent = jnp.zeros(shape.output_shape)
    if getattr(cotangent, "shape", None) != shape.output_shape:
        owner = f"cotangent of feature {feature.name!r}"
        rule = f"have the shape of its activations, {shape.output_shape}"
        fix = "Use zeros for an activation that the loss does not use."
        raise invalid(owner, rule, cotangent, fix)
    dim = shape.output_shape[-1]
    # Later stages take only float32. Pad like `fill_up`: with samples or sequences.
    cotangent = cotangent.astype(jnp.float32).reshape(-1, dim)
    missing = -shape.batch_size % plan.num_shards * max(1, shape.sequence_length)
    return jnp.pad(cotangent, ((0, missing), (0, 0)))


def init_slots(tables: dict[str, PackedRows], plan: EmbeddingPlan) -> dict[str, Any]:
    """Initializes the optimizer state for each stack that has an optimizer.

    Args:
      tables: stack name to packed rows. Initial slot values may depend on the rows.
      plan: plan of the layer.

    Returns:
      Stack name to optimizer state. Slot variables are `PackedRows`, sharded like their
      table; other values are replicated.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> te.functional.slot_values(slots, plan)["movie"]["accumulators"].shape
      (10, 4)
    """
    check_tables(tables, plan.trained_stacks)
    slots = _init_on_devices(tables, plan)
    for stack in plan.trained_stacks:
        if stack.name not in slots:  # Its devices don't hold all rows.
            table = tables[stack.name]
            slots[stack.name] = stack.storage.init_state(table, stack)
    return slots


@functools.partial(jax.jit, static_argnames="plan")
def _init_on_devices(
    tables: dict[str, PackedRows], plan: EmbeddingPlan
) -> dict[str, Any]:
    return {
        stack.name: on_shards(
            functools.partial(init_state, stack=stack),
            plan,
            in_specs=stack.rows_spec,
            out_specs=state_specs(abstract_state(stack), stack),
        )(tables[stack.name])
        for stack in plan.trained_stacks
        if stack.storage.holds_all_rows
    }


@functools.partial(jax.jit, static_argnames="plan")
def apply_gradients(
    tables: dict[str, PackedRows],
    slots: dict[str, Any],
    gradients: TableGradients,
    plan: EmbeddingPlan,
    gradient_norm: Any = None,
    only_if: Any = None,
) -> tuple[dict[str, PackedRows], dict[str, Any]]:
    """Updates the touched rows in tables and slot variables, as one step.

    The update is in place if your `jit` donates tables and slots. Stacks without an
    optimizer don't change.

    Call it once per step, and sum gradients from several lookups with
    `te.gradients.add`. Each call is one step for all trained tables, as in TensorFlow
    and optax. Step counts and schedules advance even for a table that the step did not
    look up. With `every_row`, momentum also changes this table's rows.

    Args:
      tables: stack name to packed rows.
      slots: stack name to optimizer state, from `init_slots`.
      gradients: from `compute_gradients`, or a sum of several.
      plan: plan of the layer.
      gradient_norm: norm over all gradients in the model, a float32 scalar, for
        optimizers with `global_clipnorm`. Defaults to the norm of `gradients`.
      only_if: bool scalar. If it is False, all rows, slot variables and step counts
        keep their values. The same happens if `te.gradients.is_whole(gradients)` is
        False.

    Returns:
      New tables and slots. Rows that the step did not look up keep their bits, except
      with `every_row`.

    Raises:
      TypeError: if the gradients are not from `compute_gradients`.
      ValueError: if tables, slots or gradients belong to another plan.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> result = te.functional.lookup(tables, jnp.array([1, 2]), plan)
      >>> ones = jnp.ones((2, 4))
      >>> gradients = te.functional.compute_gradients(result.routing, ones, plan)
      >>> tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
    """
    _check_gradients(gradients, plan)
    check_tables(tables, plan.trained_stacks)
    check_slots(slots, plan.trained_stacks)
    _check_states(slots, plan)
    # Computing a norm runs the later exchange rounds. The update then repeats them.
    if gradient_norm is None and takes_model_norm(plan):
        gradient_norm = global_norm(gradients)
    if may_be_partial(plan):
        only_if = is_whole(gradients) & (True if only_if is None else only_if)
    new_tables: dict[str, Any] = dict(tables)
    new_slots = dict(slots)
    # Vocabularies count every step, even if a table has no optimizer or `only_if` skips
    # the step.
    for stack in plan.stacks:
        new_tables |= stack.vocabulary.stacks.end_step(tables, stack)
    for stack in plan.trained_stacks:
        gradient, state = gradients.stacks.get(stack.name), slots[stack.name]
        specs = state_specs(state, stack)
        if gradient is None and not stack.optimizer.moves_every_row:

            def step(state: Any, stack: StackPlan = stack) -> Any:
                return with_values_if(only_if, state_without_rows(state, stack), state)

            # The step didn't look up this stack, so no row changes. Only shared values
            # such as step counts advance. They may depend on totals, whose all-reduces
            # need the mesh axes in `on_shards`.
            run = on_shards(step, plan, in_specs=(specs,), out_specs=specs)
            new_slots[stack.name] = run(state)
            continue
        arrays = {name: tables[name] for name in stack.array_names}
        rows_spec = stack.rows_spec
        new_tables[stack.name], new_slots[stack.name] = on_shards(
            functools.partial(_update_shard, stack=stack),
            plan,
            in_specs=(
                *(rows_spec, specs, plan.sample_spec, rows_spec),
                *(PartitionSpec(), PartitionSpec()),
            ),
            out_specs=(rows_spec, specs),
        )(tables[stack.name], state, gradient, arrays, gradient_norm, only_if)
    return new_tables, new_slots


def _update_shard(
    table: PackedRows,
    state: Any,
    gradient: Sealed | None,
    arrays: Mapping[str, Any],
    gradient_norm: Any,
    only_if: Any,
    stack: StackPlan,
) -> tuple[PackedRows, Any]:
    """Updates one shard of a stack. `gradient` is None if no rows were looked up."""
    table_sizes = stack.vocabulary.stacks.table_sizes(arrays, stack)

    def update(table: PackedRows, state: Any) -> tuple[PackedRows, Any]:
        rounds = empty_gradient(stack.dim)
        if gradient is not None:
            rounds = gradient_rounds(gradient, stack)
        return update_stack(table, state, rounds, stack, table_sizes)

    # Rules with `global_clipnorm` read the squared norm from this context.
    squares = None if gradient_norm is None else lambda: jnp.square(gradient_norm)
    with model_gradient_context(squares):
        # Don't wrap this in `run_if`: a backend without a fallback skips a step by
        # passing no ids.
        if gradient is not None and stack.backend.replaces_update:
            return stack.backend.update(table, state, gradient, update, stack, only_if)
        if only_if is None:
            return update(table, state)
        return run_if(only_if, lambda rows: update(*rows), (table, state))


@functools.partial(jax.jit, static_argnames="plan")
def finite_rates(slots: dict[str, Any], plan: EmbeddingPlan) -> Bool[Array, ""]:
    """Checks that all learning rates of the next step are finite.

    If a table's rate is not finite, `apply_gradients` doesn't change the table's rows,
    but advances its step count. So check the rates before each step, as you check
    gradients with `te.gradients.all_finite`.

    Args:
      slots: stack name to optimizer state, from `init_slots`.
      plan: plan of the layer.

    Example:
      >>> import optax
      >>> import tpu_embedding as te
      >>> rule = optax.sgd(lambda step: 0.1 / step)
      >>> table = te.TableConfig(
      ...     vocabulary_size=10, dim=4, name="movie", optimizer=rule)
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> bool(te.functional.finite_rates(slots, plan))
      False
    """
    result = jnp.ones((), bool)
    for stack in plan.trained_stacks:
        values = values_of(rule_state_of(slots[stack.name]))
        # None means a constant rate, which was checked when the rule was made.
        is_finite = rates_are_finite(stack.optimizer, stack.dim, values)
        result &= True if is_finite is None else is_finite
    return result


def _check_states(slots: dict[str, Any], plan: EmbeddingPlan) -> None:
    """Rejects states of other optimizers or storage types."""
    # `check_slots` compares only layouts, which many optimizers share.
    for stack in plan.trained_stacks:
        expected, given = map(
            structure_of_state, (abstract_state(stack), slots[stack.name])
        )
        if expected != given:
            raise ValueError(
                f"slots[{stack.name!r}] must be the state of the plan's optimizer,\n"
                f"  {expected}, got\n  {given}.\nUse the slots that init_slots made "
                "for this plan."
            )


def takes_model_norm(plan: EmbeddingPlan) -> bool:
    return any(stack.optimizer.takes_model_norm for stack in plan.trained_stacks)


def _check_gradients(gradients: TableGradients, plan: EmbeddingPlan) -> None:
    if not isinstance(gradients, TableGradients):
        rule = "be the TableGradients of te.functional.compute_gradients"
        raise invalid("gradients", rule, gradients, kind=TypeError)
    # Only the stacks must be equal, because a lookup may have other features.
    if gradients.plan.stacks != plan.stacks:
        raise ValueError(
            "gradients must be for the plan's tables, got gradients computed with "
            "another plan; use one plan for the whole step."
        )
