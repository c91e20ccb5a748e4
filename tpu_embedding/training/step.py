"""Defines the compiled part of a run: state, train step and evaluation step.

A step is a pure function of the state and a batch. The state is the `nnx.State` of the
pair (model, optimizer); the graph definition that rebuilds the pair from it is fixed.
`loop.py` runs the steps. Ahead-of-time compilation uses `abstract_train_state` and
`abstract_batch`, which touch no device.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tpu_embedding import aot
from tpu_embedding.data.batch import Batch, Dataset
from tpu_embedding.hardware import HardwareInfo, hardware_of_device
from tpu_embedding.lookup.prepare import prepare_features
from tpu_embedding.nn.training import Optimizer, embedding_layers, value_and_grad
from tpu_embedding.plan.make_plan import make_plan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import Backend
from tpu_embedding.training.metrics import LOSSES, Sums, mean_loss
from tpu_embedding.training.run_config import LossName, RunConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics that a train step returns. Global scalars.

    Attributes:
      loss: loss of the batch before the update, penalty included.
      rounds: maximum number of rounds that any stack needed.
      out_of_range: number of ids outside their tables, over all features.
    """

    loss: Float[Array, ""]
    rounds: Int[Array, ""]
    out_of_range: Int[Array, ""]


TrainStep = Callable[[nnx.State, Batch], tuple[nnx.State, StepMetrics]]
EvaluationStep = Callable[[nnx.State, Batch], Sums]


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
      ValueError: if the configuration contradicts itself, if compiler options are given
        without a TPU, or if XLA does not know them.
    """
    if hardware is None:
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        hardware = hardware_of_device(device)
    hardware = hardware.with_compiler_options(compiler_options or {})
    plan = make_plan(
        config.model.feature_config(data),
        mesh,
        optimizer=config.make_table_optimizer(config),
        capacity=config.capacity,
        kernels=cast(Backend, config.kernels),
        hardware=hardware,
    )
    if compiler_options:
        _check_compiler_options(plan)
    return plan


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

    Arguments and result are those of `init_train_state`, with `jax.ShapeDtypeStruct`s
    instead of arrays.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _build(config, data, plan)))
    return graphdef, aot.abstract_arrays(state, plan)


def make_train_step(graphdef: nnx.GraphDef, loss_name: LossName) -> TrainStep:
    """Returns the train step, `(state, batch) -> (state, StepMetrics)`, uncompiled.

    Args:
      graphdef: graph definition from `init_train_state` or `abstract_train_state`.
      loss_name: name of the loss, from `RunConfig.loss`.
    """
    loss = LOSSES[loss_name]

    def loss_fn(model: Any, batch: Batch) -> jax.Array:
        outputs = model(batch.features, batch.dense)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        return mean_loss(loss, outputs, labels, weights)

    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, StepMetrics]:
        model, optimizer = nnx.merge(graphdef, state)
        value, gradients = value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        metrics = _step_metrics(value, model)
        return nnx.state((model, optimizer)), metrics

    return train_step


def jit_train_step(step: TrainStep, state: nnx.State, plan: EmbeddingPlan) -> Any:
    """Returns the train step under `jax.jit`, which donates the state.

    Args:
      step: train step from `make_train_step`.
      state: arrays or `jax.ShapeDtypeStruct`s; the new state keeps their shardings.
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
      The jitted step and its two arguments, the state and the batch. The arguments are
      `jax.ShapeDtypeStruct`s, so nothing is allocated.
    """
    graphdef, state = abstract_train_state(config, data, plan)
    step = jit_train_step(make_train_step(graphdef, config.loss), state, plan)
    return step, state, abstract_batch(data.train_batch(0), plan)


def make_evaluation_step(graphdef: nnx.GraphDef, loss_name: LossName) -> EvaluationStep:
    """Returns the evaluation step, `(state, batch) -> Sums`, uncompiled."""
    loss = LOSSES[loss_name]

    def evaluation_step(state: nnx.State, batch: Batch) -> Sums:
        model, _ = nnx.merge(graphdef, state)
        outputs = model(batch.features, batch.dense)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        return loss.sums(outputs, labels, weights)

    return evaluation_step


def prepare_batch(batch: Batch, plan: EmbeddingPlan) -> Batch:
    """Checks a batch on the host and gives it static shapes."""
    return dataclasses.replace(batch, features=prepare_features(batch.features, plan))


def abstract_batch(batch: Batch, plan: EmbeddingPlan) -> Batch:
    """Returns the shapes, dtypes and shardings of a host batch on the devices."""
    return aot.abstract_batch(prepare_batch(batch, plan), plan)


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


def _build(config: RunConfig, data: Dataset, plan: EmbeddingPlan) -> tuple[Any, Any]:
    """Returns the model and its optimizer, for tables and dense parameters."""
    model = config.model.build(data, plan, rngs=nnx.Rngs(config.seed))
    tx: optax.GradientTransformation = config.make_dense_optimizer(config)
    return model, Optimizer(model, tx)


def _step_metrics(loss: jax.Array, model: nnx.Module) -> StepMetrics:
    rounds, out_of_range = [], []
    for layer in embedding_layers(model).values():
        stats = layer.stats.get_value()
        rounds += stats.rounds.values()
        out_of_range += stats.out_of_range.values()
    return StepMetrics(
        loss=loss,
        rounds=jnp.max(jnp.stack(rounds)),
        out_of_range=jnp.sum(jnp.stack(out_of_range)),
    )
