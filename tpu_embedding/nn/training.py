"""Trains a model that owns embedding layers: gradients and updates.

Use `value_and_grad` and `Optimizer` like their namesakes in Flax. optax updates dense
parameters as usual; the row rules of each layer update its tables.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import optax
from flax import nnx

from tpu_embedding import functional
from tpu_embedding.nn.embedding import EmbeddingTables, TPUEmbedding
from tpu_embedding.nn.recording import Gradients, differentiate, replicate_on_mesh
from tpu_embedding.optimizers.hyperparameters import with_hyperparameters

NO_LAYER: Final = (
    "The model has no TPUEmbedding layer. For tables, use te.TPUEmbedding in place of "
    "nnx.bridge.ToNNX(te.linen.TPUEmbedding(...)). For a model without tables, use"
)


class SlotVariables(nnx.Variable):
    """Optimizer state of all tables: layer path to stack name to state."""


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Gradients]]:
    """Returns a function that computes a loss and its gradients.

    Args:
      loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`; the
        model is an `nnx.Module` that owns `TPUEmbedding` layers, and may call each any
        number of times: the gradients of all calls are added row by row. Changes that
        the loss makes to the model (batch statistics, random streams, lookup
        statistics) are kept.
      wrt: filter of the dense parameters.
      has_aux: True if `loss_fn` returns a second value.

    Returns:
      `(model, *args, **kwargs) -> (loss, Gradients)`, or `((loss, aux), Gradients)`.

    Raises:
      ValueError: when called, if the model has no `TPUEmbedding`.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
      ... )
      >>> def loss_fn(model, ids):
      ...     return jnp.sum(model(ids) ** 2)
      >>> loss, gradients = value_and_grad(loss_fn)(layer, jnp.array([1, 2]))
      >>> optimizer = Optimizer(layer, optax.adam(1e-3))
      >>> optimizer.update(layer, gradients)
    """

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        plans = {path: layer.plan for path, layer in embedding_layers(model).items()}
        if not plans:
            raise ValueError(f"{NO_LAYER} nnx.value_and_grad.")
        graph, dense, tables, rest = nnx.split(model, wrt, EmbeddingTables, ...)

        def run(dense, taps):
            copy = nnx.merge(graph, dense, tables, rest, copy=True)
            layers = embedding_layers(copy)
            for path, layer in layers.items():
                layer.start_recording(taps and taps[path])
            result = loss_fn(copy, *args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            calls = {path: layer.stop_recording() for path, layer in layers.items()}
            _, _, _, new_rest = nnx.split(copy, wrt, EmbeddingTables, ...)
            return loss, ((aux, new_rest), calls)

        loss, (aux, new_rest), gradients = differentiate(run, dense, plans)
        nnx.update(model, new_rest)
        return ((loss, aux) if has_aux else loss), gradients

    return compute


class Optimizer(nnx.Module):
    """Updates a model: optax updates dense parameters, row rules update tables.

    Attributes:
      dense: the `nnx.Optimizer` of the dense parameters.
      slots: slot variables and step counts of the tables.
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: nnx.filterlib.Filter = nnx.Param,
    ):
        """Makes the optimizer's state, and puts the model on the mesh.

        Arrays that are not on a mesh yet, such as dense parameters, are replicated
        over the layers' mesh. So the first step has the same shardings as the second,
        and the step compiles once.

        Args:
          model: owns at least one `TPUEmbedding`.
          tx: optimizer of the dense parameters. Tables have the optimizers of their
            layers.
          wrt: filter of the dense parameters.
        """
        layers = embedding_layers(model)
        if not layers:
            raise ValueError(f"{NO_LAYER} nnx.Optimizer.")
        mesh_sharding = next(iter(layers.values())).plan.replicated
        _put_on_mesh(model, mesh_sharding)
        self.dense = nnx.Optimizer(model, tx, wrt=wrt)
        self.slots = SlotVariables(
            {
                path: functional.init_slots(layer.tables.get_value(), layer.plan)
                for path, layer in layers.items()
            }
        )
        _put_on_mesh(self, mesh_sharding)

    def update(self, model: nnx.Module, gradients: Gradients) -> None:
        """Applies gradients to the model in place; donate both under `jit`.

        Args:
          model: the one this optimizer was made for.
          gradients: from `tpu_embedding.value_and_grad`.

        Raises:
          TypeError: if the gradients are those of `nnx.grad`, which lack the tables.
        """
        if not isinstance(gradients, Gradients):
            raise TypeError(
                "Optimizer.update needs the gradients of tpu_embedding.value_and_grad, "
                f"got {type(gradients).__name__}, which lacks those of the tables."
            )
        self.dense.update(model, gradients.dense)
        slots = dict(self.slots.get_value())
        for path, layer in embedding_layers(model).items():
            new_tables, new_slots = functional.apply_gradients(
                layer.tables.get_value(),
                slots[path],
                gradients.tables[path],
                layer.plan,
            )
            layer.tables.set_value(new_tables)
            slots[path] = new_slots
        self.slots.set_value(slots)

    def set_hyperparameters(self, **values: Any) -> None:
        """Changes hyper-parameters of the tables' optimizers without a recompilation.

        Args:
          **values: see `tpu_embedding.optimizers.with_hyperparameters`; those of the
            dense optimizer are in `dense.opt_state`.

        Raises:
          ValueError: if no table's optimizer has one of that name.

        Example:
          >>> import tpu_embedding as te
          >>> rule = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.1)
          >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
          >>> layer = te.TPUEmbedding(
          ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
          ... )
          >>> optimizer = Optimizer(layer, optax.adam(1e-3))
          >>> optimizer.set_hyperparameters(learning_rate=0.01)
        """
        self.slots.set_value(with_hyperparameters(self.slots.get_value(), **values))


def embedding_layers(model: nnx.Module) -> dict[str, TPUEmbedding]:
    """Returns the model's `TPUEmbedding` layers by their path, `"a/b"`."""
    return {
        "/".join(str(part) for part in path): module
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TPUEmbedding)
    }


def _put_on_mesh(module: nnx.Module, sharding: jax.sharding.NamedSharding) -> None:
    """Replicates arrays that lie on one device over the mesh; tables stay."""
    nnx.update(module, replicate_on_mesh(nnx.state(module), sharding))
