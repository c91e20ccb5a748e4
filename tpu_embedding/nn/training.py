"""Computes a loss of an NNX model and its gradients, those of tables among them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from flax import nnx

from tpu_embedding.argument_checks import Wanted, check_type
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


MODEL: Final = Wanted(nnx.Module, "an nnx.Module that owns a te.TPUEmbedding")
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

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        loss = ModelLoss(loss_fn, model, wrt=wrt, has_aux=has_aux)

        value, (aux, new_rest), gradients = differentiate(
            lambda dense, taps: loss.run(dense, taps, *args, **kwargs),
            loss.dense,
            loss.plans,
        )
        nnx.update(model, new_rest)
        return ((value, aux) if has_aux else value), gradients

    return compute


class ModelLoss:
    """A loss of a model, as a function of the model's dense parameters.

    Attributes:
      dense: variables that the loss is differentiated by.
      plans: path of each `TPUEmbedding` to its plan.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        model: nnx.Module,
        *,
        wrt: nnx.filterlib.Filter,
        has_aux: bool,
    ):
        layers = checked_layers(
            "te.value_and_grad",
            model,
            "te.value_and_grad(loss_fn)(model, ...), or, for variables of a Linen "
            "model, te.linen.value_and_grad(loss_fn)(variables, ...)",
        )
        if any(layer.recording != "off" for layer in layers.values()):
            raise ValueError(IN_A_LOSS)
        self.plans = {path: layer.plan for path, layer in layers.items()}
        self._loss_fn, self._wrt, self._has_aux = loss_fn, trained(wrt), has_aux
        self._graph, self.dense, self._tables, self._rest = nnx.split(
            model, self._wrt, EmbeddingTables, ...
        )

    def run(
        self,
        dense: nnx.State,
        given: dict[str, Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, tuple[tuple[Any, nnx.State], dict[str, tuple[Any, ...]]]]:
        """Computes the loss on a copy of the model.

        Args:
          dense: dense parameters of the copy.
          given: path of each layer to a value per call, see `recording.answer_call`.
          *args: of the loss.
          **kwargs: of the loss.

        Returns:
          The loss, and `((aux, rest), calls)`: the new values of the variables without
          a gradient, and the records of each layer's calls.
        """
        copy = nnx.merge(self._graph, dense, self._tables, self._rest, copy=True)
        layers = embedding_layers(copy)
        for path, layer in layers.items():
            layer.start_recording("recording", given and given[path])
        with explain_branches():
            result = self._loss_fn(copy, *args, **kwargs)
        loss, aux = loss_and_aux(result, self._has_aux)
        calls = {path: layer.stop_recording() for path, layer in layers.items()}
        _, _, _, rest = nnx.split(copy, self._wrt, EmbeddingTables, ...)
        return loss, ((aux, rest), calls)


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


@contextlib.contextmanager
def explain_branches() -> Iterator[None]:
    """Explains the error of `nnx.cond` and `nnx.scan` around the call of a layer.

    Flax compares the variables of a model before and after, among them the record of
    the calls.
    """
    try:
        yield
    except TypeError as error:
        if RECORDED not in str(error):
            raise
        raise ValueError(CALL_OUTSIDE) from error


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
