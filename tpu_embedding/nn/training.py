"""Computes a loss and its gradients for an NNX model, tables included.

`value_and_grad` lets copied layers record their calls while `recording.differentiate`
runs the loss.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding.argument_checks import ArgumentType, about, check_type, right_names
from tpu_embedding.gradients import Gradients, is_whole, may_be_partial
from tpu_embedding.nn.embedding import (
    LAYER_VARIABLES,
    EmbeddingTables,
    TPUEmbedding,
)
from tpu_embedding.nn.model_tables import LayerTables, keep_if
from tpu_embedding.nn.recording import (
    CALL_OUTSIDE,
    Recorder,
    differentiate,
    replicate_on_mesh,
)
from tpu_embedding.plan.plan import EmbeddingPlan

IN_A_LOSS: Final = (
    "te.value_and_grad must not be called inside the loss of another te.value_and_grad "
    "for the same model. Add the losses and differentiate once: "
    "te.value_and_grad(lambda model: first(model) + second(model))(model)."
)
NO_LAYER: Final = (
    "The model has no TPUEmbedding layer. For tables, use te.TPUEmbedding instead of "
    "nnx.bridge.ToNNX(te.linen.TPUEmbedding(...)). For a model without tables, use"
)


FILTER: Final = ArgumentType(
    str | list | tuple, "a Flax filter of variables such as nnx.PathContains('linear')"
)
LOSS_FN: Final = ArgumentType(Callable, "a function of the model")
MODEL: Final = ArgumentType(nnx.Module, "an nnx.Module that owns a te.TPUEmbedding")
RECORDED: Final = "['recorded']"
"""Name of a layer's records in JAX's errors."""


_OF_JAX: Final = {
    "argnums": "wrt=filter; gradients are always for the first argument, the model",
    "holomorphic": "a loss of real numbers",
}


@right_names(**_OF_JAX)
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Gradients]]:
    """Makes a function that computes a loss and its gradients, tables included.

    Use it instead of `nnx.value_and_grad`, which would leave out the tables.

    Args:
      loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`. The
        model is an `nnx.Module` with `TPUEmbedding` layers. You can call each layer any
        number of times. Gradients from all calls are added row by row. Changes to the
        model in the loss (batch statistics, random streams, lookup statistics) are
        kept. The exception is batch statistics if `te.gradients.is_whole` is False.
      wrt: selects the dense parameters, as in Flax. Pass False to compute only table
        gradients.
      has_aux: whether `loss_fn` returns a second value.

    Returns:
      `(model, *args, **kwargs) -> (loss, Gradients)`, or `((loss, aux), Gradients)`.

    Raises:
      TypeError: if `wrt` is not a filter.
      ValueError: from the returned function, if the model has no `TPUEmbedding`, or
        if `wrt` selects tables or integers.

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
    filters = (wrt, EmbeddingTables, ...)

    line = "te.value_and_grad(loss_fn)(model, ...)"
    check_type("te.value_and_grad: loss_fn", LOSS_FN, loss_fn, line)

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        layers = checked_layers(
            "te.value_and_grad",
            model,
            "te.value_and_grad(loss_fn)(model, ...), or, for variables of a Linen "
            "model, te.linen.value_and_grad(loss_fn)(variables, ...)",
        )
        if any(layer.recording != "off" for layer in layers.values()):
            raise ValueError(IN_A_LOSS)
        check_filter("te.value_and_grad", wrt, model)
        graph, dense, tables, others = nnx.split(model, *filters)

        def call_loss(
            dense: nnx.State, tables: nnx.State, recorder: Recorder
        ) -> tuple[Any, nnx.State]:
            # The loss gets a copy of the model, because it runs twice, and its traces
            # must not leave values in the user's variables.
            copy = nnx.merge(graph, dense, tables, others, copy=True)
            copied_layers = embedding_layers(copy)
            for path, layer in copied_layers.items():
                taps = recorder.taps_of(path, "inner")
                layer.start_recording("recording", path, recorder, taps)
            try:
                result = loss_fn(copy, *args, **kwargs)
            except TypeError as error:
                # nnx.cond and nnx.scan raise if a call changes `recorded`.
                if RECORDED not in str(error):
                    raise
                raise ValueError(CALL_OUTSIDE) from error
            for layer in copied_layers.values():
                layer.stop_recording(recorder)
            *_, rest = nnx.split(copy, *filters)
            return result, rest

        plans = {path: layer.plan for path, layer in layers.items()}
        result, new_rest, gradients = differentiate(
            call_loss, dense, tables, plans, has_aux
        )
        if any(may_be_partial(plan) for plan in plans.values()):
            # A failed lookup makes the running statistics NaN. The optimizer then skips
            # the step, but can't restore the statistics.
            stats = (nnx.filter_state(x, nnx.BatchStat) for x in (new_rest, others))
            new_rest = nnx.merge_state(new_rest, keep_if(is_whole(gradients), *stats))
        nnx.update(model, new_rest)
        return result, gradients

    return compute


@right_names(**_OF_JAX)
def grad(
    loss_fn: Callable[..., Any],
    *,
    wrt: nnx.filterlib.Filter = nnx.Param,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Makes a function that computes gradients without the value of the loss.

    Args:
      loss_fn: see `value_and_grad`.
      wrt: see `value_and_grad`.
      has_aux: whether `loss_fn` returns a second value.

    Returns:
      `(model, *args, **kwargs) -> Gradients`, or `(Gradients, aux)`.

    Raises:
      TypeError, ValueError: see `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> gradients = grad(lambda model: jnp.sum(model(jnp.array([1, 2]))))(layer)
    """
    compute = value_and_grad(loss_fn, wrt=wrt, has_aux=has_aux)

    def compute_gradients(*args: Any, **kwargs: Any) -> Any:
        result, gradients = compute(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return compute_gradients


def check_filter(owner: str, wrt: Any, model: nnx.Module) -> None:
    """Rejects a `wrt` that is not a filter, or selects tables or integers."""
    # FILTER leaves out the type bool, because True would pass and select everything.
    if not (wrt is None or wrt is False or callable(wrt)):
        check_type(f"{owner}: wrt", FILTER, wrt, "wrt=nnx.Param, or leave it out")
    names = [
        "/".join(map(str, path))
        for path, variable in nnx.to_flat_state(nnx.state(model, cast(Any, wrt)))
        if isinstance(variable, LAYER_VARIABLES)
        or any(
            not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)
            for leaf in jax.tree.leaves(variable)
        )
    ]
    if names:
        text = f"{owner}: wrt must select only dense float parameters, got {wrt}, which"
        text += f" selects {reprlib.repr(names)}. Tables always get sparse gradients, "
        text += "so leave wrt out. To train only tables, write wrt=False."
        raise about(ValueError(text), f"{owner}: wrt", wrt)


def checked_layers(owner: str, model: nnx.Module, line: str) -> dict[str, TPUEmbedding]:
    """Finds the `TPUEmbedding` layers by path. Raises ValueError without a layer.

    The errors show `line`, the correct call. They also suggest Flax's function with the
    same name as `owner`.
    """
    layers = embedding_layers(model)
    if not layers:
        check_type(f"{owner}: model", MODEL, model, line)
        raise ValueError(f"{NO_LAYER} plain Flax instead of {owner}.")
    return layers


def embedding_layers(model: nnx.Module) -> dict[str, TPUEmbedding]:
    """Finds the `TPUEmbedding` layers by path, `"a/b"`."""
    layers: dict[str, TPUEmbedding] = {}
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, TPUEmbedding):
            path = "/".join(map(str, keys))
            if path in layers:
                raise ValueError(
                    f"Two TPUEmbedding layers of the {type(model).__name__} have the "
                    f"path {path!r}; rename the attribute whose name contains a slash."
                )
            layers[path] = module
    return layers


def tables_of_layers(layers: Mapping[str, TPUEmbedding]) -> dict[str, LayerTables]:
    return {
        path: LayerTables(layer.tables.get_value(), layer.plan)
        for path, layer in layers.items()
    }


def put_on_mesh(module: nnx.Module, plan: EmbeddingPlan | None = None) -> None:
    """Replicates single-device arrays over the mesh, except tables.

    `te.Optimizer` does this for you. Call it for a model without an optimizer, for
    example a restored model in evaluation. Otherwise the first compiled call moves the
    arrays to the mesh, and the second recompiles.

    Args:
      module: a model, which changes in place.
      plan: plan of a layer. Defaults to the plan of the first layer in the model.

    Raises:
      ValueError: if there is neither a plan nor a layer.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> put_on_mesh(nnx.Dict(layer=layer, head=nnx.Linear(4, 1, rngs=nnx.Rngs(0))))
    """
    if plan is None:
        layers = checked_layers("te.nn.put_on_mesh", module, "te.nn.put_on_mesh(model)")
        plan = next(iter(layers.values())).plan
    nnx.update(module, replicate_on_mesh(nnx.state(module), plan))
