"""The compiled part of a run: its plan, its state and its two steps.

A step is a pure function of the state and a batch. The state is the `nnx.State` of the
pair (model, optimizer). A fixed graph definition rebuilds the pair from it.

Batches are read, prepared and transferred ahead of the loop.
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
"""Batches that are prepared or on the devices before the loop needs them."""


class ReadyBatch(NamedTuple):
    """A training batch that was read ahead.

    Attributes:
      step: number of the step.
      batch: the batch on the devices.
      sizes_so_far: `BufferSizes.to_json` after this batch. Checkpoints store it because
        later batches are already prepared.
      features: prepared features of the batch on the host.
    """

    step: int
    batch: Batch
    sizes_so_far: Any
    features: Any


def train_batches(
    config: RunConfig,
    data: Dataset,
    plan: EmbeddingPlan,
    steps: range,
    sizes: BufferSizes | None = None,
) -> Generator[ReadyBatch, None, None]:
    """Yields the batch of each step.

    A thread prepares the next batches while the caller uses the current one. In a job
    of several processes, each process reads the samples of its own devices if the data
    set has a method `train_part`, and otherwise whole batches. `sizes` are the buffer
    sizes after earlier steps; by default, the first batch sets them.

    Raises:
      DataError: if the data are damaged, or ids are out of range.
    """
    sizes = sizes or BufferSizes()
    process_samples = plan.process_samples(config.batch_size)
    # An output shape describes the whole batch, so every process must read all of it.
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
    """Yields the held-out batches of a `Dataset` on the host, checked and prepared."""
    # New buffer sizes each time, so a resumed run sums in the same order.
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
    """Returns a batch on the host with static shapes, ready for the steps.

    Labels, weights and dense inputs become float32. In a dict of dense inputs, integers
    become int32.

    Args:
      batch: batch of a data set.
      plan: plan of the embedding layer.
      sizes: buffer sizes of ragged features. By default, the batch determines them.
      samples: samples of the batch, as in `prepare_features`.
      model: config of the model, which may change the batch; see `ModelConfig`.

    Raises:
      DataError: if the features do not match the plan, or ids are out of range.
    """
    try:
        with_inputs = getattr(model, "with_inputs", None)
        if with_inputs is not None:
            batch = with_inputs(batch, plan, sizes, samples=samples)
        features = prepare_features(batch.features, plan, sizes=sizes, samples=samples)
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
    """Converts integers to int32 and other numbers to float32."""
    array = np.asarray(array)
    return array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)


def check_values(batch: Batch, config: RunConfig, owner: str) -> None:
    """Rejects labels and weights that make the loss meaningless.

    For example, the `log_loss` of a label of 4 has no lower bound.

    Raises:
      DataError: if any does; the message names the batch and the sample in it.
    """
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

* `loss`.
* `is_finite`: if the loss, all gradients and the tables' learning rates are finite.
* `rounds`: maximum number of rounds over the stacks.
* `out_of_range`: number of ids out of range.
* `beyond_limit`: only if a backend replaces the exchange. 1 if one of its stacks needed
  the exchange nevertheless, else 0.
* `not_run`: only if a program lacks the exchange. 1 if one of its stacks needed it.
* `table/count`: counts of dynamic tables."""


def make_run_plan(
    config: RunConfig, data: Dataset, mesh: Mesh | None = None
) -> EmbeddingPlan:
    """Returns the plan of the model's embedding layer; see `make_plan`.

    `data` can be an outline. `mesh` defaults to all devices.
    """
    mesh = choose_mesh(mesh)
    features = config.model.feature_config(data)
    placement = None
    if config.cache_rows:
        directory = config.rows_directory
        placement = HostRows(cache_rows=config.cache_rows, directory=directory)
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
    """Returns the initial state: parameters, tables and optimizer states.

    The values depend on the seed, never on the number of devices.

    Returns:
      The graph definition of the pair (model, optimizer), and its state on the mesh.
    """
    if not all(stack.storage.holds_all_rows for stack in plan.stacks):
        return nnx.split(_build(config, data, plan))
    graphdef, abstract = abstract_train_state(config, data, plan)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    # A single program, because each small one takes about 30 ms to compile.
    init = jax.jit(
        lambda: nnx.state(_build(config, data, plan)), out_shardings=shardings
    )
    return graphdef, init()


def abstract_train_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns shapes, dtypes and shardings of the state, without using devices.

    Like `init_train_state`, but with `jax.ShapeDtypeStruct` instead of arrays.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _build(config, data, plan)))
    return graphdef, abstract_arrays(state, plan)


def _build(config: RunConfig, data: Dataset, plan: EmbeddingPlan) -> tuple[Any, Any]:
    """Returns the model, and the optimizer of its tables and dense parameters."""
    model = config.model.build(data, plan, rngs=nnx.Rngs(config.seed))
    return model, Optimizer(model, config.make_dense_optimizer(config))


def abstract_model_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the part of `abstract_train_state` without the optimizer.

    It is the state of the tuple `(model,)`, so its names match a checkpoint of the run.
    """
    model = nnx.eval_shape(lambda: _build(config, data, plan)[:1])
    graphdef, state = nnx.split(model)
    return graphdef, abstract_arrays(state, plan)


def make_train_step(
    graphdef: nnx.GraphDef, state: nnx.State, config: RunConfig, plan: EmbeddingPlan
) -> Any:
    """Returns the train step, `(state, batch) -> (state, StepMetrics)`.

    The step is jitted and donates the state. New ids of dynamic tables get rows first.

    Args:
      graphdef: graph definition from `init_train_state` or `abstract_train_state`.
      state: pytree of `jax.Array` or `jax.ShapeDtypeStruct`, whose shardings the new
        state keeps.
      config: config with the loss, `loss_weight` and `max_dense_norm`.
      plan: plan of the embedding layer.
    """
    loss = LOSSES[config.loss]

    def loss_fn(model: Any, batch: Batch) -> jax.Array:
        outputs = _call_model(model, batch, config.loss)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        total = jnp.sum(weights * loss.per_sample(outputs, labels))
        return config.loss_weight * (total / jnp.sum(weights))

    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, StepMetrics]:
        model, optimizer = nnx.merge(graphdef, state)
        if _dynamic_layer(model) is not None:
            features = optimizer.insert_ids(model, batch.features)
            batch = dataclasses.replace(batch, features=features)
        value, gradients = value_and_grad(loss_fn)(model, batch)
        is_finite = jnp.isfinite(value) & all_finite(gradients)
        for path, plan in optimizer.plans:
            is_finite &= finite_rates(optimizer.slots.get_value()[path], plan)
        metrics = {"loss": value, "is_finite": is_finite, **_layer_counts(model)}
        if config.max_dense_norm is not None:
            clip = optax.clip_by_global_norm(config.max_dense_norm)
            dense, _ = clip.update(gradients.dense, clip.init(gradients.dense))
            gradients = dataclasses.replace(gradients, dense=dense)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), metrics

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
    """Returns a run's train step and arguments to compile it ahead of time.

    `data` can be an outline. Its first batch determines the shapes.

    Returns:
      The jitted step, the state and the batch. The leaves of state and batch are
      `jax.ShapeDtypeStruct`s, so nothing is allocated.
    """
    graphdef, state = abstract_train_state(config, data, plan)
    batch = prepare_batch(data.train_batch(0), plan, model=config.model)
    batch = abstract_batch(batch, plan)
    return make_train_step(graphdef, state, config, plan), state, batch


def make_evaluation_step(
    graphdef: nnx.GraphDef, loss_name: LossName
) -> Callable[[nnx.State, Batch], Metrics]:
    """Returns the evaluation step, `(state, batch) -> Metrics`.

    The model runs in `eval()` mode: without dropout, and with its stored statistics.
    `graphdef` must describe a tuple whose first item is the model.
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
    """Finds rows of dynamic tables; also returns each table's share of known ids."""
    hits: Metrics = collections.OrderedDict()
    layer = _dynamic_layer(model)
    if layer is None:
        return batch, hits
    result = find_ids(layer.tables.get_value(), batch.features, layer.plan)
    for name, stats in result.stats.items():
        share = stats.hits / jnp.maximum(stats.ids, 1)
        hits[f"hits/{name}"] = Mean.from_batch(share[None], stats.ids[None])
    return dataclasses.replace(batch, features=result.features), hits


def _dynamic_layer(model: Any) -> TPUEmbedding | None:
    """Returns the layer with dynamic tables; `insert_ids` rejects more than one."""
    layers = embedding_layers(model).values()
    return next((layer for layer in layers if hasattr(layer, "dynamic_stats")), None)


def _call_model(model: Any, batch: Batch, loss_name: LossName) -> Outputs:
    """Calls the model, and rejects outputs that the loss would broadcast."""
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
