"""Retrieves the best rows of a layer's table, in training programs and in exports."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding import functional
from tpu_embedding.argument_checks import ArgumentType, check_type
from tpu_embedding.config import FeatureConfig
from tpu_embedding.functional.serving_lookup import ServedCall
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.best_rows import (
    TopK,
    checked_exclusions,
    find_table,
)

_LAYER = ArgumentType(TPUEmbedding, "a te.TPUEmbedding")


def top_k(
    layer: TPUEmbedding,
    queries: Float[Array, "queries query_dim"],
    k: int,
    *,
    table: str | None = None,
    **options: Any,
) -> TopK:
    """Returns the `k` rows of a table with the largest scalar product with each query.

    It is brute-force retrieval, as in TensorFlow Recommenders and Keras Recommenders:
    exact and sharded over all devices. Of equal scores the lower id comes first. A
    method of a model that calls it can be exported with
    `te.export.save(model, directory, ..., method=...)`.
    `te.metrics.RecallAtK.from_top_k(ids, labels, k=...)` is the recall of the result.
    Outside `jax.jit`, the second call of the same shapes compiles nothing, unless
    `transform` is a plain function.

    Args:
      layer: layer of the table. Its tables get no gradient from this call.
      queries: `[queries, dim]`; converted to float32. Global.
      k: number of rows, from 1 to the vocabulary size.
      table: name of the table; it may be left out if the layer has one table only.
      **options: `transform`, such as an item tower, to compare with another vector of
        each row, and `excluded`, ids not to return; see `te.functional.top_k`.

    Returns:
      `scores`, float32 `[queries, k]`, the largest first, and `ids`, int32. A query
      with fewer than `k` rows left after the exclusions gets `-inf` and
      `te.inputs.PADDING_ROW_ID` after them.

    Raises:
      TypeError: if `layer` is not a layer, such as the model.
      ValueError: if `k`, the table's name or a shape does not fit, or the ids of
        the table are not row numbers.

    Example:
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> movies = te.TableConfig(vocabulary_size=100, dim=8, name="movies")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=movies), rngs=nnx.Rngs(0))
      >>> users = layer(jnp.array([3, 7]))  # users that like one movie each
      >>> best = jax.jit(lambda users: te.nn.top_k(layer, users, k=5))(users)
      >>> best.ids.shape
      (2, 5)
    """
    line = "te.nn.top_k(model.embedding, queries, k), if embedding is its layer"
    check_type("te.nn.top_k: layer", _LAYER, layer, line)
    if layer.recording == "serving":  # An export traces the model with its own tables.
        tables = _recorded_tables(layer, table)
    else:
        tables = jax.lax.stop_gradient(layer.tables.get_value())
    transform = options.get("transform")
    module = getattr(transform, "__self__", transform)
    if not isinstance(module, nnx.Module):
        return functional.top_k(tables, queries, layer.plan, k, table=table, **options)
    if (excluded := options.get("excluded")) is not None:  # jit truncates 64-bit ids.
        options["excluded"] = checked_exclusions(excluded, jnp.shape(queries)[0])
    # A module, or the module of a bound method, enters jit as a static graph and traced
    # weights: new weights do not compile again.
    graph, state = nnx.split(module)
    method = getattr(transform, "__func__", type(module).__call__)
    options |= {"transform": state, "graph": graph, "method": method}
    return _top_k_with_module(
        tables, queries, plan=layer.plan, k=k, table=table, **options
    )


@functools.partial(jax.jit, static_argnames=("graph", "method", "plan", "k", "table"))
def _top_k_with_module(
    tables: Mapping[str, Any],
    queries: Float[Array, "queries query_dim"],
    *,
    graph: nnx.GraphDef[Any],
    method: Callable[..., Array],
    plan: EmbeddingPlan,
    k: int,
    table: str | None,
    transform: nnx.State,
    **options: Any,
) -> TopK:
    """Returns the best rows as a module transforms them; see `top_k`.

    Parameters are arguments: a step of training compiles nothing.

    Args:
      tables: see `functional.top_k`, also for the arguments that follow.
      queries: the queries.
      graph: structure of the module, of `nnx.split`.
      method: method of the module's class.
      plan: plan of the layer.
      k: number of rows.
      table: name of the table.
      transform: state of the module.
      **options: further options of `functional.top_k`.
    """
    by_module = functools.partial(method, nnx.merge(graph, transform))
    return functional.top_k(
        tables, queries, plan, k, table=table, transform=by_module, **options
    )


def _recorded_tables(layer: TPUEmbedding, table: str | None) -> Mapping[str, Array]:
    """Returns whole tables, and records a call, whose tables an export keeps."""
    _, member = find_table(layer.plan, table)
    plan = layer.plan.with_features(FeatureConfig(table=member.config))
    layer.record(ServedCall(ids=[jnp.zeros(0, jnp.int32)], plan=plan))
    given, *_ = layer.recorded.get_value()
    return given
