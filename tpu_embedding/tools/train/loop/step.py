"""Defines the compiled part of a run: state, train step and evaluation step.

A step is a pure function of the state and a batch. The state is the `nnx.State` of the
pair (model, optimizer); the graph definition that rebuilds the pair from it is fixed.
`training_loop.py` runs the steps. `abstract_train_state` touches no device.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.functional.dynamic_ids import find_ids
from tpu_embedding.functional.finite_rates import finite_rates
from tpu_embedding.gradients import Gradients, all_finite, update_if
from tpu_embedding.metrics import Mean
from tpu_embedding.nn.embedding import EmbeddingTables, TPUEmbedding
from tpu_embedding.nn.training import Optimizer, embedding_layers, value_and_grad
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.data.batch import Batch, Dataset
from tpu_embedding.tools.train.config.run_config import NonFinite, RunConfig
from tpu_embedding.tools.train.errors import ConfigError, as_config_error
from tpu_embedding.tools.train.metrics import (
    LOSSES,
    ClickScores,
    LossName,
    Metrics,
    mean_loss,
)
from tpu_embedding.tools.train.models.model import Outputs
from tpu_embedding.types import DynamicStats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics that a train step returns. Global scalars.

    Attributes:
      loss: loss of the batch before the update, penalty included.
      is_finite: True if the loss, all gradients and the tables' learning rates are.
      rounds: maximum number of rounds that any stack needed.
      out_of_range: number of ids outside their tables, over all features.
      unique_ratio: rows that devices requested from shards, over the ids of the batch;
        0 without ids, None if no ids leave their device.
      hottest_shard_over_mean: rows requested from the hottest shard over the mean one,
        at least 1; 0 without ids, None if no ids leave their device.
      dynamic_tables: counts of `insert_ids` by dynamic table.
    """

    loss: Float[Array, ""]
    is_finite: Bool[Array, ""]
    rounds: Int[Array, ""]
    out_of_range: Int[Array, ""]
    unique_ratio: Float[Array, ""] | None = None
    hottest_shard_over_mean: Float[Array, ""] | None = None
    dynamic_tables: dict[str, DynamicStats] = dataclasses.field(default_factory=dict)


TrainStep = Callable[[nnx.State, Batch], tuple[nnx.State, StepMetrics]]
EvaluationStep = Callable[[nnx.State, Batch], Metrics]


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
    graphdef: nnx.GraphDef,
    loss_name: LossName,
    *,
    loss_weight: float = 1.0,
    max_dense_norm: float | None = None,
    non_finite: NonFinite = "raise",
) -> TrainStep:
    """Returns the train step, `(state, batch) -> (state, StepMetrics)`, uncompiled.

    New ids of dynamic tables get rows first.

    Args:
      graphdef: graph definition from `init_train_state` or `abstract_train_state`.
      loss_name: name of the loss, from `RunConfig.loss`.
      loss_weight: factor of the loss, from `RunConfig.loss_weight`.
      max_dense_norm: largest norm of the dense gradients, from
        `RunConfig.max_dense_norm`.
      non_finite: `"skip_step"`: a step whose loss or gradients are not finite returns
        the state as it was, bit by bit, but for the new ids of dynamic tables, whose
        rows stay. `"raise"`: the caller is to raise an error.
    """
    loss = LOSSES[loss_name]

    def loss_fn(model: Any, batch: Batch) -> jax.Array:
        outputs = _outputs_of(model, batch)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        return loss_weight * mean_loss(loss, outputs, labels, weights)

    def train_step(state: nnx.State, batch: Batch) -> tuple[nnx.State, StepMetrics]:
        # A copy: the state keeps its batch statistics, should the step be skipped.
        model, optimizer = nnx.merge(graphdef, state, copy=True)
        if _dynamic_layer(model) is not None:
            features = optimizer.insert_ids(model, batch.features)
            batch = dataclasses.replace(batch, features=features)
            # A skipped step keeps it: that of before would be a copy of the tables.
            state = jax.tree.map(lambda leaf: leaf, nnx.state((model, optimizer)))
        value, gradients = value_and_grad(loss_fn)(model, batch)
        is_finite = jnp.isfinite(value) & all_finite(gradients)
        slots, has_rates = optimizer.slots.get_value(), is_finite
        for path, plan in optimizer.plans:
            has_rates &= finite_rates(slots[path], plan)
        metrics = _step_metrics(value, has_rates, model)
        if max_dense_norm is not None:
            gradients = _clip_dense(gradients, max_dense_norm)
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


def _dynamic_layer(model: Any) -> TPUEmbedding | None:
    """Returns the layer with dynamic tables; `insert_ids` refuses several of them."""
    layers = embedding_layers(model).values()
    dynamic = (x for x in layers if any(stack.is_dynamic for stack in x.plan.stacks))
    return next(dynamic, None)


def _clip_dense(gradients: Gradients, max_norm: float) -> Gradients:
    """Scales the dense gradients by `min(1, max_norm / (norm + 1e-6))`, as PyTorch."""
    norm = optax.global_norm(gradients.dense)
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    dense = jax.tree.map(lambda gradient: gradient * factor, gradients.dense)
    return dataclasses.replace(gradients, dense=dense)


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


def make_evaluation_step(graphdef: nnx.GraphDef, loss_name: LossName) -> EvaluationStep:
    """Returns the evaluation step, `(state, batch) -> Metrics`, uncompiled.

    The model runs as after `eval()`: without dropout, and by its stored statistics.
    """
    step = make_scored_evaluation_step(graphdef, loss_name)

    def evaluation_step(state: nnx.State, batch: Batch) -> Metrics:
        return step(state, batch)[0]

    return evaluation_step


def make_scored_evaluation_step(
    graphdef: nnx.GraphDef, loss_name: LossName
) -> Callable[[nnx.State, Batch], tuple[Metrics, ClickScores]]:
    """Returns an evaluation step that returns its predictions, too, uncompiled."""
    loss = LOSSES[loss_name]

    def evaluation_step(state: nnx.State, batch: Batch) -> tuple[Metrics, ClickScores]:
        model, _ = nnx.merge(graphdef, state)
        model.eval()
        batch, hits = _find_ids(model, batch)
        outputs = _outputs_of(model, batch)
        labels, weights = jnp.asarray(batch.labels), jnp.asarray(batch.weights)
        scores = ClickScores(
            predictions=outputs.predictions, labels=labels, weights=weights
        )
        metrics = loss.evaluate(outputs, labels, weights)
        metrics.update(hits)
        return metrics, scores

    return evaluation_step


def _find_ids(model: Any, batch: Batch) -> tuple[Batch, Metrics]:
    """Finds the rows of dynamic tables; returns the share of known ids by table."""
    hits: Metrics = collections.OrderedDict()
    layer = _dynamic_layer(model)
    if layer is None:
        return batch, hits
    found = find_ids(layer.tables.get_value(), batch.features, layer.plan)
    for name, stats in found.stats.items():
        share = stats.hits / jnp.maximum(stats.ids, 1)
        hits[f"hits/{name}"] = Mean.from_batch(share[None], stats.ids[None])
    return dataclasses.replace(batch, features=found.features), hits


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
        arrays = leaf.arrays if isinstance(leaf, PackedRows) else [leaf]
        return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()

    return jax.tree.map(
        is_finite, tree, is_leaf=lambda leaf: isinstance(leaf, PackedRows)
    )


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
    dynamic = _dynamic_layer(model)
    metrics = StepMetrics(
        loss=loss,
        is_finite=is_finite,
        rounds=jnp.max(jnp.stack(rounds)),
        out_of_range=jnp.sum(jnp.stack(out_of_range)),
        dynamic_tables=dynamic.dynamic_stats.get_value() if dynamic else {},
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
