"""The Flax Linen layer: tables in their own collection, and lookups.

A Linen layer has no state to record calls in. Instead, `value_and_grad` calls the loss
with variables that hold *recording* tables. They answer and record the layer's calls.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import linen as nn

from tpu_embedding import functional
from tpu_embedding.argument_checks import check_type
from tpu_embedding.inputs.shard_inputs import Batch, parse_batch
from tpu_embedding.nn.embedding import warn_of_pooled_ids
from tpu_embedding.nn.linen.variables import TABLES, LayerTables
from tpu_embedding.nn.recording import (
    Recorder,
    answer_call,
    guard_activation,
    without_derivative,
)
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.tables.initial_values import init_tables

USE_VALUE_AND_GRAD: Final = (
    "jax.grad and jax.value_and_grad skip the tables of a te.linen.TPUEmbedding, "
    "so the tables would never train. Change two lines:\n"
    "  loss, gradients = te.linen.value_and_grad(loss_fn)(state.variables, ...)\n"
    "  state = te.linen.TrainState.create(apply_fn=..., variables=..., tx=...)\n"
    "The loss takes all variables: model.apply(variables, ...). To freeze the "
    "tables, make the plan without an optimizer. In an NNX model, use te.TPUEmbedding "
    "instead of nnx.bridge.ToNNX."
)
NO_DERIVATIVE: Final = (
    "The tables of a te.linen.TPUEmbedding have no dense derivative. Use "
    "te.linen.value_and_grad, which returns dense gradients of the collection 'params' "
    "and sparse gradients of the tables."
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordingTables:
    """Tables that record the calls of their layer."""

    tables: LayerTables
    path: str = dataclasses.field(metadata={"static": True})
    recorder: Recorder = dataclasses.field(metadata={"static": True})

    def look_up(self, batch: Batch) -> Any:
        """Answers with activations and stats. Without a lookup, stats are None."""
        if not self.recorder.is_current():
            raise ValueError(
                f"The loss calls the te.linen.TPUEmbedding {self.path!r} inside a "
                "transformation, such as nn.jit, nn.remat, nn.vmap, nn.scan or "
                "jax.vmap, so the gradient of its tables would be lost. Call the layer "
                "outside of it with the whole batch, and transform only the modules "
                "that take its activations. Apply jax.jit to the whole step."
            )
        return answer_call(
            self.recorder.taps_of(self.path, "outer"),
            self.recorder.calls[self.path, "outer"],
            batch,
            lambda: functional.lookup(self.tables.stacks, batch, batch.plan),
        )


class TPUEmbedding(nn.Module):
    """Embedding tables sharded over a mesh, for lookups inside any Linen module.

    Note that the tables are in the collection `embedding_tables`, not in `params`.
    A lookup sows its `LookupStats` as `lookup_stats` into `intermediates`.

    Attributes:
      plan: from `tpu_embedding.make_plan`, with features, optimizers and mesh.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> layer = te.linen.TPUEmbedding(plan)
      >>> ids = {"watched": jnp.array([1, 2, 3])}
      >>> variables = layer.init(jax.random.key(0), ids)
      >>> sorted(variables)
      ['embedding_tables']
      >>> layer.apply(variables, ids)["watched"].shape
      (3, 4)
    """

    plan: EmbeddingPlan

    def __post_init__(self):
        line = (
            "te.linen.TPUEmbedding(te.make_plan(feature_config, optimizer=...)), once, "
            "outside of the modules"
        )
        check_type("te.linen.TPUEmbedding: plan", PLAN, self.plan, line)
        super().__post_init__()

    @nn.compact
    def __call__(
        self, features: Any, weights: Any = None, serving_config: Any = None
    ) -> Any:
        """Looks up a batch.

        Args:
          features: nest like the `feature_config` in your plan; you can omit dict
            keys. See `tpu_embedding.functional.lookup`. Pass ragged features through
            `tpu_embedding.inputs.prepare_features` first.
          weights: the same nest with an array or None per dense feature.
          serving_config: nest of `FeatureConfig` for the same tables, which replaces
            `feature_config` in this call.

        Returns:
          Global float32 activations in the nest of the features. Their shape is
          `[batch, dim]`, unless a feature sets a sequence length or an output shape.

        Raises:
          TypeError, ValueError: if the dtype or shape of a feature does not fit its
            config. Also raised if the variables lack the tables, or hold tables from a
            different plan.
        """
        tables = self._tables()
        plan = self.plan
        if serving_config is not None:
            plan = plan.with_features(serving_config)
        # Plain `jax.grad` differentiates `params`, which lack the tables. The guard is
        # a parameter, so `guard_activation` can then raise an error.
        guard = None
        if plan.trained_stacks:
            guard = self.param("gradient_guard", lambda key: jnp.zeros(()))
        batch = parse_batch(features, plan, weights)
        warn_of_pooled_ids(batch, stacklevel=3)
        if isinstance(tables, RecordingTables):
            activations, stats = tables.look_up(batch)
        else:
            stacks = without_derivative(NO_DERIVATIVE, tables.stacks)
            result = functional.lookup(stacks, batch, plan)
            activations, stats = result.activations, result.stats
            if guard is not None:
                activations = jax.tree.map(
                    lambda x: guard_activation(USE_VALUE_AND_GRAD, x, guard),
                    activations,
                )
        self.sow("intermediates", "lookup_stats", stats)
        return activations

    def _tables(self) -> LayerTables | RecordingTables:
        name = "/".join(self.path)
        if not self.has_variable(TABLES, "tables") and not (
            self.is_initializing() and self.is_mutable_collection(TABLES)
        ):
            raise ValueError(
                f"te.linen.TPUEmbedding {name!r} needs its tables in the collection "
                f"{TABLES!r}, but found none. Pass all variables that model.init "
                "returned, not only 'params': model.apply(variables, ...). With "
                f"nn.vmap, add variable_axes={{{TABLES!r}: None}}; with nn.scan, "
                f"variable_broadcast={TABLES!r}."
            )
        tables = self.variable(TABLES, "tables", self._init_tables).value
        if not isinstance(tables, LayerTables | RecordingTables):
            raise TypeError(
                f"The collection {TABLES!r} must hold LayerTables for layer {name!r}, "
                f"got {type(tables).__name__}. Restore a checkpoint into the structure "
                "of jax.eval_shape(model.init, ...)."
            )
        return tables

    def _init_tables(self) -> LayerTables:
        return LayerTables(init_tables(self.plan, self.make_rng("params")), self.plan)
