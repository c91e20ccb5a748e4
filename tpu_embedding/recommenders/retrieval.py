"""Retrieves the best rows from a layer, in training programs and in exports."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_embedding import functional
from tpu_embedding.argument_checks import ArgumentType, check_type
from tpu_embedding.config import FeatureConfig
from tpu_embedding.functional.serving_lookup import ServedCall
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.shard_map import replicated_type
from tpu_embedding.recommenders.best_rows import (
    TopK,
    best_of_all,
    check_search,
    checked_exclusions,
    find_table,
)
from tpu_embedding.transfers import moves_arrays

_LAYER = ArgumentType(TPUEmbedding, "a te.TPUEmbedding")


@moves_arrays
def top_k(
    layer: TPUEmbedding,
    queries: Float[Array, "queries query_dim"],
    k: int,
    *,
    table: str | None = None,
    **options: Any,
) -> TopK:
    """Finds the `k` rows whose scalar products with each query are largest.

    This is brute-force retrieval, as in TensorFlow Recommenders and Keras Recommenders.
    It is exact, and sharded over all devices. Rows with equal scores are ordered by id.
    If a method in your model calls `top_k`, export the method with
    `te.export.save(model, directory, ..., method=...)`.
    `te.metrics.RecallAtK.from_top_k(ids, labels, k=...)` measures the recall. Outside
    `jax.jit`, calls with the same shapes compile once, unless `transform` is a plain
    function.

    Args:
      layer: layer with the table. No gradient flows to its tables.
      queries: global `[queries, dim]`, converted to float32.
      k: number of rows, from 1 to the vocabulary size.
      table: table name, optional if the layer has only one.
      **options: `transform` and `excluded`; see `te.functional.top_k`. `transform`,
        such as an item tower, maps rows to the vectors that queries are compared with.
        `excluded` has the ids not to return.

    Returns:
      Two arrays `[queries, k]`: float32 `scores`, the largest first, and int32 `ids`.
      If exclusions leave fewer than `k` rows, the remaining scores are `-inf`, and the
      remaining ids are `te.inputs.PADDING_ROW_ID`.

    Raises:
      TypeError: if `layer` is not a `TPUEmbedding`, but for example a model.
      ValueError: if `k`, the table name or a shape doesn't fit, or if the table's ids
        are not row numbers.

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
    # During an export, the model is traced with the export's tables.
    if layer.recording == "serving":
        tables = _recorded_tables(layer, table)
    else:
        tables = jax.lax.stop_gradient(layer.tables.get_value())
    transform = options.get("transform")
    module = getattr(transform, "__self__", transform)
    if isinstance(module, nnx.Module):
        # A module, or the module of a bound method, is passed to the compiled search as
        # an argument. So new weights don't cause a recompilation.
        method = getattr(transform, "__func__", type(module).__call__)
        options["transform"] = jax.tree_util.Partial(method, module)
    return functional.top_k(tables, queries, layer.plan, k, table=table, **options)


@moves_arrays
def top_k_of_tower(
    tower: Callable[[Int[Array, " n"]], Float[Array, "n dim"]],
    queries: Float[Array, "queries dim"],
    k: int,
    *,
    num_items: int,
    excluded: Any = None,
) -> TopK:
    """Finds the `k` items whose vectors have the largest products with each query.

    Unlike `top_k`, it supports items whose vectors come from several tables, or from
    other features. It is exact: the tower computes all item vectors, a few thousand at
    a time. Call it inside `nnx.jit`, and outside your loss.

    Args:
      tower: maps item numbers, int32 `[n]`, to vectors `[n, dim]`, such as
        `lambda numbers: model.items({"item": numbers, "genre": genres[numbers]})`. It
        must treat each item independently.
      queries: global `[queries, dim]`, converted to float32.
      k: number of items, from 1 to `num_items`.
      num_items: number of items. Items are numbered from 0.
      excluded: integers `[queries, n]`, items not to return for a query; see
        `te.functional.top_k`.

    Returns:
      `scores` and `ids`, as in `top_k`. The ids are item numbers.

    Raises:
      ValueError: if `k`, the query width or `excluded` doesn't fit.

    Example:
      >>> vectors = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.7]])
      >>> queries = jnp.array([[1.0, 0.0]])
      >>> top_k_of_tower(lambda i: vectors[i], queries, k=2, num_items=3).ids.tolist()
      [[0, 2]]
    """
    # The tower may return any sharding, and `Explicit` types must agree in a matmul.
    queries = replicated_type(jnp.asarray(queries, jnp.float32))
    vector = jax.eval_shape(tower, jax.ShapeDtypeStruct((1,), jnp.int32))
    check_search("te.nn.top_k_of_tower", queries, k, num_items, vector.shape)
    excluded = checked_exclusions(excluded, queries.shape[0])

    def vectors_of(numbers: Array) -> Array:
        # Padding in the last block reads a valid item. `best_of_all` ignores its score.
        vectors = tower(jnp.minimum(numbers, num_items - 1)).astype(jnp.float32)
        return replicated_type(vectors)

    return best_of_all(queries, vectors_of, num_items, excluded, k)


def _recorded_tables(layer: TPUEmbedding, table: str | None) -> Mapping[str, Array]:
    """Reads whole tables from the trace of an export."""
    _, member = find_table(layer.plan, table)
    # Exports keep only tables that a lookup reads, so this records an empty lookup.
    plan = layer.plan.with_features(FeatureConfig(table=member.config))
    layer.record(ServedCall(ids=[jnp.zeros(0, jnp.int32)], plan=plan))
    given, *_ = layer.recorded.get_value()
    return given
