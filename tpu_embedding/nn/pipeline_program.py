"""The compiled part of a pipelined train step: pure functions of states and batches.

The state is that of the pair (model, optimizer). `pipeline.py` keeps it, and what is in
flight, between calls.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
from flax import nnx

from tpu_embedding import functional
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import embedding_layers, value_and_grad
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import constrain_first_axis
from tpu_embedding.xla import read_before_write

PipelineMode = Literal["exact", "stale"]
InFlight = dict[str, Any]
"""Path of each layer to its routed ids (`"exact"`), or to its lookup (`"stale"`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineProgram:
    """The functions that begin the lookup of a batch, and train on it.

    Attributes:
      loss_fn: see `PipelinedTrainStep`, as for all attributes.
      features_of: the features of a batch.
      mode: `"exact"` or `"stale"`.
      wrt: filter of the dense parameters.
      has_aux: True if the loss returns a second value.
      transform_gradients: applied before the update, or None.
    """

    loss_fn: Callable[..., Any]
    features_of: Callable[[Any], Any]
    mode: PipelineMode
    wrt: nnx.filterlib.Filter
    has_aux: bool
    transform_gradients: Callable[[Gradients], Gradients] | None = None

    def begin(self, graph: nnx.GraphDef, state: nnx.State, batch: Any) -> InFlight:
        """Begins the lookup of a batch, without a step."""
        model, _ = nnx.merge(graph, state)
        routed = self._route(model, batch)
        return routed if self.mode == "exact" else _read(model, routed)

    def advance(
        self,
        graph: nnx.GraphDef,
        state: nnx.State,
        in_flight: InFlight,
        batch: Any,
        next_batch: Any,
    ) -> tuple[nnx.State, InFlight, Any]:
        """Trains on a batch, and begins the lookup of the next one.

        Args:
          graph: graph of (model, optimizer).
          state: state of (model, optimizer).
          in_flight: what is in flight for the batch.
          batch: to train on.
          next_batch: to look up; None: none.

        Returns:
          New state; what is in flight for the next batch; and the loss, or
          `(loss, aux)`.
        """
        model, optimizer = nnx.merge(graph, state)
        begun = {} if next_batch is None else self._route(model, next_batch)
        if self.mode == "exact":
            in_flight = _read(model, in_flight)
        else:
            begun = _read_before_update(model, begun)
        self._prefetch(model, batch, in_flight)
        compute = value_and_grad(self.loss_fn, wrt=self.wrt, has_aux=self.has_aux)
        result, gradients = compute(model, batch)
        if self.transform_gradients is not None:
            gradients = self.transform_gradients(gradients)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), begun, result

    def features_agree(
        self, graph: nnx.GraphDef, state: nnx.State, batch: Any
    ) -> dict[str, Any]:
        """Returns for each layer if the loss calls it with `features_of(batch)`.

        XLA removes all of the loss that leads to no features. Only its prints run.
        """
        model, _ = nnx.merge(graph, state)
        lookups = _read(model, self._route(model, batch))
        self._prefetch(model, batch, lookups)
        self.loss_fn(model, batch)
        layers = embedding_layers(model)
        found = {path: layers[path].prefetched.get_value() for path in lookups}
        # The result that no call has taken is still there.
        return {path: len(x) == 1 and x[0] for path, x in found.items()}

    def _prefetch(self, model: nnx.Module, batch: Any, lookups: InFlight) -> None:
        """Gives the layers the lookups of a batch."""
        layers = embedding_layers(model)
        for path, features in self._features(model, batch).items():
            layers[path].prefetched.set_value((features, lookups[path]))

    def _features(self, model: nnx.Module, batch: Any) -> dict[str, Any]:
        """Returns the features that are looked up early, by the path of the layer."""
        layers, features = embedding_layers(model), self.features_of(batch)
        if len(layers) == 1:
            return dict.fromkeys(layers, features)
        if not isinstance(features, Mapping) or not set(features) <= set(layers):
            got = list(features) if isinstance(features, Mapping) else type(features)
            raise ValueError(
                "PipelinedTrainStep's features_of must return a dict by the path of "
                f"each layer that the loss calls, some of {sorted(layers)}, because "
                f"the model has several layers, got {got}."
            )
        return dict(features)

    def _route(self, model: nnx.Module, batch: Any) -> InFlight:
        """Sends the ids of a batch to the owners of their rows."""
        layers = embedding_layers(model)

        def route(plan: EmbeddingPlan, features: Any) -> functional.Routing:
            return jax.tree.map(
                lambda leaf: constrain_first_axis(leaf, plan, plan.sample_axes),
                functional.route(features, plan),
            )

        return {
            path: route(layers[path].plan, features)
            for path, features in self._features(model, batch).items()
        }


def _read(model: nnx.Module, routed: InFlight) -> InFlight:
    """Reads the rows of routed ids from the model's tables."""
    layers = embedding_layers(model)

    def read(
        layer: TPUEmbedding, routed: functional.Routing
    ) -> functional.LookupResult:
        plan = layer.plan
        return jax.tree.map(
            lambda leaf: constrain_first_axis(leaf, plan, plan.sample_axes),
            functional.read_rows(layer.tables.get_value(), routed, plan),
        )

    return {path: read(layers[path], each) for path, each in routed.items()}


def _read_before_update(model: nnx.Module, routed: InFlight) -> InFlight:
    """Reads rows; an update of the model's tables waits for it.

    Without this order, XLA may write rows before it reads them, into a copy of the
    whole table.
    """
    layers = embedding_layers(model)
    tables = {path: layers[path].tables.get_value() for path in routed}
    tables, lookups = read_before_write((tables, _read(model, routed)))
    for path, of_layer in tables.items():
        layers[path].tables.set_value(of_layer)
    return lookups
