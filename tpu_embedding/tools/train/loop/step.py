"""Defines the compiled part of a run: state, train step and evaluation step.

A step is a pure function of the state and a batch. The state is the `nnx.State` of the
pair (model, optimizer); the graph definition that rebuilds the pair from it is fixed.
`training_loop.py` runs the steps. Ahead-of-time compilation uses
`abstract_train_state` and `abstract_batch`, which touch no device.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.gradients import all_finite, update_if
from tpu_embedding.hardware import HardwareInfo, hardware_of_device
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import Samples, prepare_features
from tpu_embedding.nn.embedding import EmbeddingTables
from tpu_embedding.nn.training import Optimizer, embedding_layers, value_and_grad
from tpu_embedding.optimizers.names import optimizer_problem
from tpu_embedding.placement import Sharded
from tpu_embedding.plan.device_mesh import SLICE_AXIS
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.mesh_options import resolve_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.data.batch import Batch, Dataset
from tpu_embedding.tools.train.config.run_config import NonFinite, RunConfig
from tpu_embedding.tools.train.errors import ConfigError, as_config_error
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset
from tpu_embedding.tools.train.loop.kernel_choice import resolve_kernels
from tpu_embedding.tools.train.metrics import LOSSES, LossName, Metrics, mean_loss
from tpu_embedding.tools.train.models.model import Outputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics that a train step returns. Global scalars.

    Attributes:
      loss: loss of the batch before the update, penalty included.
      is_finite: True if the loss and all gradients are finite.
      rounds: maximum number of rounds that any stack needed.
      out_of_range: number of ids outside their tables, over all features.
      unique_ratio: rows that devices requested from shards, over the ids of the batch;
        0 without ids, None if no ids leave their device.
      hottest_shard_over_mean: rows requested from the hottest shard over the mean one,
        at least 1; 0 without ids, None if no ids leave their device.
    """

    loss: Float[Array, ""]
    is_finite: Bool[Array, ""]
    rounds: Int[Array, ""]
    out_of_range: Int[Array, ""]
    unique_ratio: Float[Array, ""] | None = None
    hottest_shard_over_mean: Float[Array, ""] | None = None


TrainStep = Callable[[nnx.State, Batch], tuple[nnx.State, StepMetrics]]
EvaluationStep = Callable[[nnx.State, Batch], Metrics]


def make_run_plan(
    config: RunConfig,
    data: Dataset,
    mesh: Mesh | None = None,
    *,
    hardware: HardwareInfo | None = None,
    compiler_options: Mapping[str, str] | None = None,
) -> EmbeddingPlan:
    """Returns the plan of the model's embedding layer; see `make_plan`.

    Args:
      config: config of the run.
      data: opened data set, or its outline.
      mesh: mesh of the devices; None uses all devices.
      hardware: hardware to plan for; None uses that of the mesh's devices.
      compiler_options: XLA options of the train step, only for TPUs. They are added to
        the hardware's defaults, and override them.

    Raises:
      ConfigError: if a function of the config raises an error or returns a wrong value.
      ValueError: if the configuration contradicts itself, if compiler options are given
        without a TPU, or if XLA does not know them.
    """
    mesh = resolve_mesh(mesh)
    device = mesh.devices.flat[0]
    if hardware is None:
        hardware = hardware_of_device(device)
    hardware = hardware.with_compiler_options(compiler_options or {})
    with as_config_error(f"{type(config.model).__name__}.feature_config"):
        features = config.model.feature_config(data)
    if config.table_dtype is not None:
        features = _with_table_dtype(features, config.table_dtype)
    with as_config_error("RunConfig.make_table_optimizer"):
        optimizer = config.make_table_optimizer(config)
    if optimizer is None or optimizer_problem("optimizer", optimizer):
        raise ConfigError(
            "RunConfig.make_table_optimizer must return an optimizer for tables, got "
            f"{optimizer!r}; tpu_embedding.optimizers has ready ones."
        )
    plan = make_plan(
        features,
        mesh,
        optimizer=optimizer,
        placement=_placement_of(config, mesh),
        capacity=config.capacity,
        kernels=resolve_kernels(config.kernels, device, hardware),
        hardware=hardware,
    )
    if compiler_options:
        _check_compiler_options(plan)
    return plan


def _placement_of(config: RunConfig, mesh: Mesh) -> Sharded | None:
    """Returns the placement of tables without one of their own; None: the default."""
    if config.tables_split_over == "all" or SLICE_AXIS not in mesh.axis_names:
        return None
    axes = tuple(axis for axis in mesh.axis_names if axis != SLICE_AXIS)
    return Sharded(axes=axes)


def _with_table_dtype(
    features: dict[str, FeatureConfig], dtype: str
) -> dict[str, FeatureConfig]:
    """Returns the features with another storage type of their tables."""
    # Unnamed tables are told apart by identity.
    changed: dict[int, TableConfig] = {}

    def change(table: TableConfig) -> TableConfig:
        new = dataclasses.replace(table, dtype=np.dtype(dtype))
        return changed.setdefault(id(table), new)

    return {
        name: dataclasses.replace(
            feature,
            table=tuple(map(change, feature.table))
            if isinstance(feature.table, tuple)
            else change(feature.table),
        )
        for name, feature in features.items()
    }


def init_train_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the state before the first step: parameters, tables, optimizer states.

    The values depend on the seed, never on the number of devices.

    Args:
      config: config of the run.
      data: opened data set, which determines the sizes of the model.
      plan: plan from `make_run_plan`.

    Returns:
      Graph definition of the pair (model, optimizer), and its state on the mesh.
    """
    return nnx.split(_build(config, data, plan))


def abstract_train_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns shapes, dtypes and shardings of the state, without touching devices.

    Arguments and result are those of `init_train_state`, with values of type
    `jax.ShapeDtypeStruct` instead of arrays.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _build(config, data, plan)))
    return graphdef, compile_report.abstract_arrays(state, plan)


def abstract_model_state(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the part of `abstract_train_state` without the optimizer.

    Its tree is that of `(model,)`, so its names are those in a checkpoint of the run.
    """
    abstract = nnx.eval_shape(lambda: (_build_model(config, data, plan),))
    graphdef, state = nnx.split(abstract)
    return graphdef, compile_report.abstract_arrays(state, plan)


def make_train_step(
    graphdef: nnx.GraphDef, loss_name: LossName, *, non_finite: NonFinite = "raise"
) -> TrainStep:
    """Returns the train step, `(state, batch) -> (state, StepMetrics)`, uncompiled.

    Args:
      graphdef: graph definition from `init_train_state` or `abstract_train_state`.
      loss_name: name of the loss, from `RunConfig.loss`.
      non_finite: `"skip_step"`: a step whose loss or gradients are not finite returns
        the state as it was, bit by bit. `"raise"`: the caller is to raise an error.
    """
    loss = LOSSES[loss_name]

    def loss_fn(model: Any, batch: Batch) -> jax.Array:
        outputs = _outputs_of(model, batch)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        return mean_loss(loss, outputs, labels, weights)

    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, StepMetrics]:
        # A copy: the state keeps its batch statistics, should the step be skipped.
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        value, gradients = value_and_grad(loss_fn)(model, batch)
        is_finite = jnp.isfinite(value) & all_finite(gradients)
        metrics = _step_metrics(value, is_finite, model)
        if non_finite == "raise":
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), metrics
        rest = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, EmbeddingTables)))

        def update(state: nnx.State) -> nnx.State:
            model, optimizer = nnx.merge(graphdef, state)
            nnx.update(model, rest)  # such as batch statistics
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer))

        return update_if(is_finite, update, state), metrics

    return train_step


def jit_train_step(step: TrainStep, state: nnx.State, plan: EmbeddingPlan) -> Any:
    """Returns the train step under `jax.jit`, which donates the state.

    Args:
      step: train step from `make_train_step`.
      state: pytree of `jax.Array` or `jax.ShapeDtypeStruct`; the new state keeps their
        shardings.
      plan: plan of the embedding layer.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(shardings, plan.replicated),
        compiler_options=plan.compiler_options,
    )


def abstract_step(
    config: RunConfig, data: Dataset, plan: EmbeddingPlan
) -> tuple[Any, nnx.State, Batch]:
    """Returns the train step and its arguments, to compile it ahead of time.

    Args:
      config: config of the run.
      data: opened data set, or its outline. Its first batch determines the shapes.
      plan: plan from `make_run_plan`.

    Returns:
      The jitted step and its two arguments, the state and the batch. The leaves of the
      arguments are of type `jax.ShapeDtypeStruct`, so nothing is allocated.
    """
    batch = CheckedDataset(data, config).first_batch
    graphdef, state = abstract_train_state(config, data, plan)
    train_step = make_train_step(graphdef, config.loss, non_finite=config.non_finite)
    step = jit_train_step(train_step, state, plan)
    return step, state, abstract_batch(batch, plan)


def make_evaluation_step(graphdef: nnx.GraphDef, loss_name: LossName) -> EvaluationStep:
    """Returns the evaluation step, `(state, batch) -> Metrics`, uncompiled."""
    loss = LOSSES[loss_name]

    def evaluation_step(state: nnx.State, batch: Batch) -> Metrics:
        model, _ = nnx.merge(graphdef, state)
        outputs = _outputs_of(model, batch)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        return loss.evaluate(outputs, labels, weights)

    return evaluation_step


def _outputs_of(model: Any, batch: Batch) -> Outputs:
    """Calls the model, and refuses outputs that the loss cannot take."""
    name = type(model).__name__
    with as_config_error(f"{name}.__call__"):
        outputs = model(batch.features, batch.dense)
    _check_outputs(outputs, name, batch.labels.shape[0])
    return outputs


def names_not_finite(state: nnx.State) -> list[str]:
    """Returns the parameters and tables that hold a NaN or an infinite value.

    Args:
      state: state of the pair (model, optimizer).
    """
    trained = nnx.filter_state(state[0], (nnx.Param, EmbeddingTables))
    leaves, _ = jax.tree_util.tree_flatten_with_path(_are_finite(trained))
    return [
        jax.tree_util.keystr(path, simple=True, separator=".").replace(".value", "")
        for path, is_finite in leaves
        if not is_finite
    ]


@jax.jit
def _are_finite(tree: Any) -> Any:
    def is_finite(leaf: Any) -> jax.Array:
        array = leaf.lines if isinstance(leaf, PackedRows) else leaf
        return jnp.isfinite(array).all()

    return jax.tree.map(
        is_finite, tree, is_leaf=lambda leaf: isinstance(leaf, PackedRows)
    )


def prepare_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Batch:
    """Checks a batch on the host and gives it static shapes; see `prepare_features`."""
    plan.flatten_inputs(batch.features)  # Refuses a batch without all features.
    features = prepare_features(batch.features, plan, sizes=sizes, samples=samples)
    return dataclasses.replace(batch, features=features)


def abstract_batch(batch: Batch, plan: EmbeddingPlan) -> Batch:
    """Returns the shapes, dtypes and shardings of a host batch on the devices."""
    return compile_report.abstract_batch(prepare_batch(batch, plan), plan)


def _check_compiler_options(plan: EmbeddingPlan) -> None:
    """Compiles a tiny program with the options, so that an unknown one fails early."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=plan.replicated)
    step = jax.jit(jnp.negative, compiler_options=plan.compiler_options)
    try:
        step.lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"compiler_options must be known to XLA for {plan.hardware.name}, got "
            f"{plan.compiler_options}: {str(error).splitlines()[0]}"
        ) from error


def _build_model(config: RunConfig, data: Dataset, plan: EmbeddingPlan) -> Any:
    """Returns the model with its initial parameters, after checking it."""
    owner = f"{type(config.model).__name__}.build"
    with as_config_error(owner):
        model = config.model.build(data, plan, rngs=nnx.Rngs(config.seed))
    _check_model(model, owner, plan)
    return model


def _build(config: RunConfig, data: Dataset, plan: EmbeddingPlan) -> tuple[Any, Any]:
    """Returns the model and its optimizer, for tables and dense parameters."""
    model = _build_model(config, data, plan)
    with as_config_error("RunConfig.make_dense_optimizer"):
        tx = config.make_dense_optimizer(config)
    if not isinstance(tx, optax.GradientTransformation):
        raise ConfigError(
            "RunConfig.make_dense_optimizer must return an optax "
            f"GradientTransformation, got {tx!r}."
        )
    with as_config_error("The optimizer of RunConfig.make_dense_optimizer"):
        return model, Optimizer(model, tx)


def _check_model(model: Any, owner: str, plan: EmbeddingPlan) -> None:
    """Refuses a model that the train step cannot train."""
    if not (isinstance(model, nnx.Module) and callable(model)):
        raise ConfigError(
            f"{owner} must return an nnx.Module with a method __call__(features, "
            f"dense), got a {type(model).__name__}."
        )
    name, layers = type(model).__name__, embedding_layers(model)
    if not layers:
        raise ConfigError(
            f"{owner} must return a model that owns a TPUEmbedding, got a {name} "
            "without one; make it with TPUEmbedding(None, plan=plan, rngs=rngs)."
        )
    for path, layer in layers.items():
        if layer.plan != plan:
            raise ConfigError(
                f"{owner}: the TPUEmbedding {path!r} of {name} must have the plan that "
                "build got, because batches are prepared by it; make it with "
                "TPUEmbedding(None, plan=plan, rngs=rngs)."
            )


def _check_outputs(outputs: Any, owner: str, num_samples: int) -> None:
    """Refuses outputs of a model that the loss cannot take.

    Args:
      outputs: return value of the model, with arrays or tracers.
      owner: name of the model's class, for the error.
      num_samples: samples of the batch.

    Raises:
      ConfigError: if the value is no `Outputs`, or a field has a wrong shape or dtype.
    """
    if not isinstance(outputs, Outputs):
        raise ConfigError(
            f"{owner}.__call__ must return tpu_embedding.tools.train.Outputs, got a "
            f"{type(outputs).__name__}."
        )
    for field in dataclasses.fields(outputs):
        array = getattr(outputs, field.name)
        found = type(array).__name__
        is_right = False
        if isinstance(array, jax.Array | np.ndarray):
            found = f"{array.dtype} {list(array.shape)}"
            is_float = jnp.issubdtype(array.dtype, jnp.floating)
            is_right = is_float and array.shape == (num_samples,)
        if not is_right:
            raise ConfigError(
                f"{owner}.__call__ must return Outputs whose {field.name} are floats "
                f"of shape [batch], here [{num_samples}], got {found}."
            )


def _step_metrics(
    loss: jax.Array, is_finite: jax.Array, model: nnx.Module
) -> StepMetrics:
    rounds, out_of_range, num_ids, requested = [], [], [], []
    for layer in embedding_layers(model).values():
        stats = layer.stats.get_value()
        rounds += stats.rounds.values()
        out_of_range += stats.out_of_range.values()
        num_ids += stats.num_ids.values()
        requested += stats.requested_rows.values()
    metrics = StepMetrics(
        loss=loss,
        is_finite=is_finite,
        rounds=jnp.max(jnp.stack(rounds)),
        out_of_range=jnp.sum(jnp.stack(out_of_range)),
    )
    if not requested:
        return metrics
    rows = _total(map(jnp.sum, requested))
    # The exchange of a stack waits for its own hottest shard.
    hottest, mean = _total(map(jnp.max, requested)), _total(map(jnp.mean, requested))
    return dataclasses.replace(
        metrics,
        unique_ratio=rows / jnp.maximum(_total(num_ids), 1),
        hottest_shard_over_mean=jnp.where(rows > 0, hottest / mean, 0.0),
    )


def _total(counts: Iterable[jax.Array]) -> Float[Array, ""]:
    return jnp.sum(jnp.stack([count.astype(jnp.float32) for count in counts]))
