"""Computes a loss of an NNX model and its gradients, those of tables among them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from flax import nnx

from tpu_embedding.argument_checks import ArgumentType, check_type
from tpu_embedding.gradients import Gradients
from tpu_embedding.nn.embedding import (
    CALL_OUTSIDE,
    EmbeddingTables,
    GradientGuard,
    TPUEmbedding,
)
from tpu_embedding.nn.recording import (
    differentiate,
    loss_and_aux,
    replicate_on_mesh,
)
from tpu_embedding.plan.plan import EmbeddingPlan

IN_A_LOSS: Final = (
    "te.value_and_grad takes a loss that calls no te.value_and_grad, got one that "
    "calls it for the same model. Add the losses, and differentiate once: "
    "te.value_and_grad(lambda model: first(model) + second(model))(model)."
)
NO_LAYER: Final = (
    "The model has no TPUEmbedding layer. For tables, use te.TPUEmbedding in place of "
    "nnx.bridge.ToNNX(te.linen.TPUEmbedding(...)). For a model without tables, use"
)


MODEL: Final = ArgumentType(nnx.Module, "an nnx.Module that owns a te.TPUEmbedding")
RECORDED: Final = "['recorded']"
"""The record of a layer's calls, in the paths of JAX's errors."""


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
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), te.optimizers.sgd(0.1), rngs=nnx.Rngs(0)
      ... )
      >>> def loss_fn(model, ids):
      ...     return jnp.sum(model(ids) ** 2)
      >>> loss, gradients = value_and_grad(loss_fn)(layer, jnp.array([1, 2]))
      >>> optimizer = te.Optimizer(layer, optax.adam(1e-3))
      >>> optimizer.update(layer, gradients)
    """
    filters = (trained(wrt), EmbeddingTables, ...)

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        layers = checked_layers(
            "te.value_and_grad",
            model,
            "te.value_and_grad(loss_fn)(model, ...), or, for variables of a Linen "
            "model, te.linen.value_and_grad(loss_fn)(variables, ...)",
        )
        if any(layer.recording != "off" for layer in layers.values()):
            raise ValueError(IN_A_LOSS)
        graph, dense, *others = nnx.split(model, *filters)

        def run(dense: nnx.State, taps: dict[str, Any] | None) -> tuple[Any, Any]:
            copy = nnx.merge(graph, dense, *others, copy=True)
            with _recorded_calls(copy, taps) as calls:
                result = loss_fn(copy, *args, **kwargs)
            loss, aux = loss_and_aux(result, has_aux)
            *_, rest = nnx.split(copy, *filters)
            return loss, ((aux, rest), calls)

        plans = {path: layer.plan for path, layer in layers.items()}
        loss, (aux, new_rest), gradients = differentiate(run, dense, plans)
        nnx.update(model, new_rest)
        return ((loss, aux) if has_aux else loss), gradients

    return compute


@contextlib.contextmanager
def _recorded_calls(
    model: nnx.Module, taps: dict[str, Any] | None
) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Records the calls of a model's layers in the block.

    Args:
      model: a copy of the user's model.
      taps: path of each layer to the taps of its calls, see `recording.answer_call`.

    Yields:
      A dict. After the block, it has the records of each layer's calls by its path.
    """
    layers = embedding_layers(model)
    for path, layer in layers.items():
        layer.start_recording("recording", taps and taps[path])
    calls: dict[str, tuple[Any, ...]] = {}
    try:
        yield calls
    except TypeError as error:
        # nnx.cond and nnx.scan compare a model's variables before and after.
        if RECORDED not in str(error):
            raise
        raise ValueError(CALL_OUTSIDE) from error
    calls |= {path: layer.stop_recording() for path, layer in layers.items()}


def trained(wrt: nnx.filterlib.Filter) -> nnx.filterlib.Filter:
    """Returns the filter without guards, which have no derivative.

    Gradients of `value_and_grad` then lack a parameter that an `nnx.Optimizer` has, so
    it fails on them. It would train the dense parameters, and leave the tables.
    """
    return nnx.All(wrt, nnx.Not(GradientGuard))


def checked_layers(owner: str, model: nnx.Module, line: str) -> dict[str, TPUEmbedding]:
    """Returns the model's `TPUEmbedding` layers by their path, at least one.

    Args:
      owner: name of the function that takes the model, which Flax has, too.
      model: the value that the user gives as model.
      line: the line to write if it is no model.

    Raises:
      TypeError: if it is no Flax module.
      ValueError: if it has no layer.
    """
    layers = embedding_layers(model)
    if not layers:
        check_type(f"{owner}: model", MODEL, model, line)
        raise ValueError(f"{NO_LAYER} {owner.replace('te.', 'nnx.')}.")
    return layers


def embedding_layers(model: nnx.Module) -> dict[str, TPUEmbedding]:
    """Returns the model's `TPUEmbedding` layers by their path, `"a/b"`.

    Raises:
      ValueError: if two layers have the same path, as a key holds a slash.
    """
    layers: dict[str, TPUEmbedding] = {}
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, TPUEmbedding):
            path = "/".join(map(str, keys))
            if path in layers:
                raise ValueError(
                    f"Two TPUEmbedding layers of the {type(model).__name__} have the "
                    f"path {path!r}; rename the attribute whose name holds a slash."
                )
            layers[path] = module
    return layers


def put_on_mesh(module: nnx.Module, plan: EmbeddingPlan) -> None:
    """Replicates arrays that lie on one device over the mesh; tables stay."""
    nnx.update(module, replicate_on_mesh(nnx.state(module), plan))
