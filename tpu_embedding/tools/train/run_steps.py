"""Builds the plan, state and steps of a run, and reads its batches ahead.

A step is a pure function of the state and a batch. The state is the `nnx.State` of the
pair (model, optimizer), which the step rebuilds with a fixed graph definition.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from tpu_embedding.argument_checks import invalid
from tpu_embedding.config import Sharded
from tpu_embedding.functional import find_ids
from tpu_embedding.functional.steps import finite_rates
from tpu_embedding.gradients import all_finite
from tpu_embedding.host_rows.placement import HostRows
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import Samples, prepare_features, shard_batch
from tpu_embedding.metrics import Mean
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import embedding_layers, value_and_grad
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.mesh_options import SLICE_AXIS, choose_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.compile_report.topology import abstract_arrays, abstract_batch
from tpu_embedding.tools.data.batch import Batch, DataError, Dataset
from tpu_embedding.tools.train.losses import LOSSES, LossName, Metrics
from tpu_embedding.tools.train.models.click import ModelConfig, Outputs
from tpu_embedding.tools.train.run_config import ConfigError, RunConfig

READ_AHEAD: Final = 2
"""Number of batches that a thread prepares before the loop needs them."""


class ReadyBatch(NamedTuple):
    """A training batch on the devices, and its prepared features on the host."""

    step: int
    batch: Batch
    # `BufferSizes.to_json` after this batch. Checkpoints store this value, because the
    # `BufferSizes` may already include later batches.
    sizes_so_far: Any
    features: Any


def train_batches(
    config: RunConfig,
    data: Dataset,
    plan: EmbeddingPlan,
    steps: range,
    sizes: BufferSizes | None = None,
) -> Generator[ReadyBatch, None, None]:
    """Yields each step's batch, while a thread prepares the next ones.

    `sizes` are the buffer sizes after earlier steps.
    """
    sizes = sizes or BufferSizes()
    process_samples = plan.process_samples(config.batch_size)
    # An output shape describes the whole batch, so it makes every process read all of
    # the batch.
    can_split = all(
        feature.config.output_shape is None or feature.config.has_own_batch
        for feature in plan.features
    )
    can_split = can_split and len(process_samples) < config.batch_size
    train_part = getattr(data, "train_part", None)

    def make(step: int) -> ReadyBatch:
        if can_split and train_part is not None:
            batch, samples = train_part(step, process_samples), "process"
        else:
            batch, samples = data.train_batch(step), "global"
        check_values(batch, config, f"Training batch {step}")
        options = {"samples": samples, "model": config.model}
        prepared = prepare_batch(batch, plan, sizes, **options)
        on_devices = shard_batch(prepared, plan, samples=samples)
        return ReadyBatch(step, on_devices, sizes.to_json(), prepared.features)

    # One thread, because buffer sizes depend on the batch order.
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    pending: collections.deque[Any] = collections.deque()
    try:
        for step in steps:
            pending.append(thread.submit(make, step))
            if len(pending) > READ_AHEAD:
                yield pending.popleft().result()
        for made in pending:
            yield made.result()
    finally:
        # Processes agree on buffer sizes, so all must prepare the same batches.
        thread.shutdown(cancel_futures=jax.process_count() == 1)


def evaluation_batches(
    config: RunConfig, data: Any, plan: EmbeddingPlan
) -> Iterator[Batch]:
    """Checks and prepares held-out batches, and yields them on the host."""
    # Each evaluation starts with new buffer sizes, so that a resumed run adds numbers
    # in the same order.
    sizes = BufferSizes()
    for number, batch in enumerate(data.evaluation_batches()):
        check_values(batch, config, f"Evaluation batch {number}")
        yield prepare_batch(batch, plan, sizes, model=config.model)


def prepare_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
    model: ModelConfig | None = None,
) -> Batch:
    """Converts a host batch to static shapes, and to float32 or int32 values.

    Before that, `model.with_inputs` may change the batch; see `ModelConfig`.
    """
    try:
        with_inputs = getattr(model, "with_inputs", None)
        if with_inputs is not None:
            batch = with_inputs(batch, plan, sizes, samples=samples)
        features = prepare_features(batch.features, plan, sizes=sizes, samples=samples)
    # The command prints a DataError on one line, but these errors with a traceback.
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from error
    dense = batch.dense
    if isinstance(dense, Mapping):
        dense = {name: _narrow(array) for name, array in dense.items()}
    elif dense is not None:
        dense = np.asarray(dense, np.float32)
    return dataclasses.replace(
        batch,
        features=features,
        dense=dense,
        labels=np.asarray(batch.labels, np.float32),
        weights=np.asarray(batch.weights, np.float32),
    )


def _narrow(array: Any) -> np.ndarray:
    # Float32 would round integers beyond 2**24.
    array = np.asarray(array)
    return array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)


def check_values(batch: Batch, config: RunConfig, owner: str) -> None:
    """Rejects labels and weights that make the loss meaningless."""
    # For example, a `log_loss` with the label 4 has no lower bound.
    label_range = LOSSES[config.loss].label_range or (-np.inf, np.inf)
    for name, values, (low, high) in (
        ("labels", np.asarray(batch.labels), label_range),
        ("weights", np.asarray(batch.weights), (0.0, np.inf)),
    ):
        is_wrong = ~(np.isfinite(values) & (values >= low) & (values <= high))
        if not is_wrong.any():
            continue
        sample = int(np.argmax(is_wrong))
        rule = f"be finite and in [{low:g}, {high:g}] for the loss {config.loss!r}"
        value, fix = float(values[sample]), f"Correct sample {sample}."
        raise invalid(f"{owner}: {name}", rule, value, fix, DataError)


StepMetrics = dict[str, jax.Array]
"""Global scalars of a train step.

* `loss`: the training loss.
* `is_finite`: whether the loss, all gradients and all learning rates of tables are
  finite.
* `rounds`: number of exchange rounds, the maximum over all stacks.
* `out_of_range`: number of ids out of range.
* `beyond_limit`: 1 if a stack needed the exchange, although its backend replaces the
  exchange, else 0. Missing if no backend replaces the exchange.
* `not_run`: 1 if a stack needed the exchange, but its program lacks it, else 0. Missing
  if all programs have the exchange.
* `table/count`: counts of dynamic tables."""


def make_run_plan(
    config: RunConfig, data: Dataset, mesh: Mesh | None = None
) -> EmbeddingPlan:
    """Plans the embedding layer. `data` can come from `DataSource.outline`."""
    mesh = choose_mesh(mesh)
    features = config.model.feature_config(data)
    placement = None
    if config.cache_rows:
        directory = config.rows_directory
        placement = HostRows(cache_rows=config.cache_rows, directory=directory)
    # On a mesh without slices, "slice" is ignored, so the config still runs.
    elif config.tables_split_over == "slice" and SLICE_AXIS in mesh.axis_names:
        axes = tuple(axis for axis in mesh.axis_names if axis != SLICE_AXIS)
        placement = Sharded(axes=axes)
    return make_plan(
        features,
        mesh,
        optimizer=config.make_table_optimizer(config),
        placement=placement,
        capacity=config.capacity,
        backend=config.backend,
    )


def init_train_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Initializes the state. Its values depend on the seed, but not on the devices."""
    # A jitted function can't write rows into host memory.
    if not all(stack.storage.holds_all_rows for stack in plan.stacks):
        return nnx.split(_build(config, data, plan))
    graphdef, abstract = abstract_train_state(config, data, plan)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # Runs as one program, because each small program takes about 30 ms to compile.
    init = jax.jit(
        lambda: nnx.state(_build(config, data, plan)), out_shardings=shardings
    )
    return graphdef, init()


def abstract_train_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes the shapes of `init_train_state`'s result, without using devices."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _build(config, data, plan)))
    return graphdef, abstract_arrays(state, plan)


def _build(config: RunConfig, data: Dataset, plan: EmbeddingPlan) -> tuple[Any, Any]:
    model = config.model.build(data, plan, rngs=nnx.Rngs(config.seed))
    return model, Optimizer(model, config.make_dense_optimizer(config))


def abstract_model_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Makes the result of `abstract_train_state`, but without the optimizer."""
    # `[:1]` keeps a tuple, so that names match the pair (model, optimizer) in a
    # checkpoint.
    model = nnx.eval_shape(lambda: _build(config, data, plan)[:1])
    graphdef, state = nnx.split(model)
    return graphdef, abstract_arrays(state, plan)


def make_train_step(
    graphdef: nnx.GraphDef, state: nnx.State, config: RunConfig, plan: EmbeddingPlan
) -> Any:
    """Jits the train step, `(state, batch) -> (state, StepMetrics)`.

    Only the shardings of `state` are used, so it can be abstract.
    """
    loss = LOSSES[config.loss]

    def loss_fn(model: Any, batch: Batch) -> jax.Array:
        outputs = _call_model(model, batch, config.loss)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        total = jnp.sum(weights * loss.per_sample(outputs, labels))
        return config.loss_weight * (total / jnp.sum(weights))

    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, StepMetrics]:
        model, optimizer = nnx.merge(graphdef, state)
        # New ids get rows before the lookup, so that the step also trains these rows.
        if _dynamic_layer(model) is not None:
            features = optimizer.insert_ids(model, batch.features)
            batch = dataclasses.replace(batch, features=features)
        value, gradients = value_and_grad(loss_fn)(model, batch)
        is_finite = jnp.isfinite(value) & all_finite(gradients)
        for path, plan in optimizer.plans:
            # A rate that is not finite leaves its table unchanged, and the loss may not
            # show this.
            is_finite &= finite_rates(optimizer.slots.get_value()[path], plan)
        metrics = {"loss": value, "is_finite": is_finite, **_layer_counts(model)}
        # This clipping has no state, so `init` can run in every step.
        if config.max_dense_norm is not None:
            clip = optax.clip_by_global_norm(config.max_dense_norm)
            dense, _ = clip.update(gradients.dense, clip.init(gradients.dense))
            gradients = dataclasses.replace(gradients, dense=dense)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), metrics

    # Without `out_shardings`, XLA could choose other shardings, and the second step
    # would recompile.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, plan.replicated),
        compiler_options=plan.compiler_options,
    )


def abstract_step(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[Any, nnx.State, Batch]:
    """Makes a train step, and the abstract state and batch to compile it for."""
    graphdef, state = abstract_train_state(config, data, plan)
    # The first batch determines the shapes, also if `data` is an outline.
    batch = prepare_batch(data.train_batch(0), plan, model=config.model)
    batch = abstract_batch(batch, plan)
    return make_train_step(graphdef, state, config, plan), state, batch


def make_evaluation_step(
    graphdef: nnx.GraphDef, loss_name: LossName
) -> Callable[[nnx.State, Batch], Metrics]:
    """Makes the evaluation step, `(state, batch) -> Metrics`.

    `graphdef` describes a tuple whose first item is the model.
    """
    loss = LOSSES[loss_name]

    def evaluation_step(state: nnx.State, batch: Batch) -> Metrics:
        model, *_ = nnx.merge(graphdef, state)
        model.eval()
        batch, hits = _find_ids(model, batch)
        outputs = _call_model(model, batch, loss_name)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        metrics = loss.evaluate(outputs, labels, weights)
        metrics.update(hits)
        return metrics

    return evaluation_step


def _find_ids(model: Any, batch: Batch) -> tuple[Batch, Metrics]:
    """Finds the rows of dynamic ids, and computes each table's share of known ids."""
    # Unlike in training, unknown ids don't get rows, so evaluating changes nothing.
    hits: Metrics = collections.OrderedDict()
    layer = _dynamic_layer(model)
    if layer is None:
        return batch, hits
    result = find_ids(layer.tables.get_value(), batch.features, layer.plan)
    for name, stats in result.stats.items():
        # Shares are weighted by id counts, so their mean is the share of all ids.
        share = stats.hits / jnp.maximum(stats.ids, 1)
        hits[f"hits/{name}"] = Mean.from_batch(share[None], stats.ids[None])
    return dataclasses.replace(batch, features=result.features), hits


def _dynamic_layer(model: Any) -> TPUEmbedding | None:
    # At most one layer is dynamic, because `insert_ids` rejects models with more.
    layers = embedding_layers(model).values()
    return next((layer for layer in layers if hasattr(layer, "dynamic_stats")), None)


def _call_model(model: Any, batch: Batch, loss_name: LossName) -> Outputs:
    # For example, scores `[batch, 1]` and labels `[batch]` would result in a loss of
    # shape `[batch, batch]`, and the step would train without an error.
    outputs = model(batch.features, batch.dense)
    shapes = [np.shape(array) for array in jax.tree.leaves(outputs)]
    wanted = batch.labels.shape
    if isinstance(outputs, Outputs) and loss_name == "softmax":
        wanted += np.shape(outputs.scores)[1:2] or (2,)
    if not isinstance(outputs, Outputs) or set(shapes) != {wanted}:
        raise ConfigError(
            f"{type(model).__name__}.__call__ must return Outputs with two arrays of "
            f"shape {list(wanted)}, got {type(outputs).__name__} with shapes {shapes}."
        )
    return outputs


def _layer_counts(model: nnx.Module) -> StepMetrics:
    out_of_range, by_name = [], collections.defaultdict(list)
    for layer in embedding_layers(model).values():
        stats = layer.stats.get_value()
        by_name["rounds"] += stats.rounds.values()
        out_of_range += stats.out_of_range.values()
        for stack in layer.plan.stacks:
            # A backend that replaces the exchange counts 0 rounds, unless it needed the
            # exchange.
            is_beyond = (stats.rounds[stack.name] > 0).astype(jnp.float32)
            if stack.backend.replaces_lookup:
                by_name["beyond_limit"].append(is_beyond)
            if stack.backend.must_run_all:
                by_name["not_run"].append(is_beyond)
    counts = {name: jnp.max(jnp.stack(x)) for name, x in by_name.items()}
    counts["out_of_range"] = jnp.sum(jnp.stack(out_of_range))
    dynamic = _dynamic_layer(model)
    for name, stats in (dynamic.dynamic_stats.get_value() if dynamic else {}).items():
        for field in dataclasses.fields(stats):
            counts[f"{name}/{field.name}"] = getattr(stats, field.name)
    return counts
