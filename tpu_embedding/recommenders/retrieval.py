"""Retrieves the best rows of a layer's table, in training programs and in exports."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding import functional
from tpu_embedding.argument_checks import ArgumentType, check_type
from tpu_embedding.config import FeatureConfig
from tpu_embedding.functional.serving_lookup import ServedCall
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.recommenders.best_rows import TopK, find_table

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

    It is brute-force retrieval, as of TensorFlow Recommenders and Keras Recommenders,
    on the rows where they lie: exact, sharded over all devices, and inside `jax.jit`.
    Of equal scores the lower id comes first. A method of a model that calls it can be
    exported, by `te.export.save(model, directory, ..., method=...)`.
    `te.metrics.RecallAtK.from_top_k(ids, labels, k=...)` is the recall of the result.

    Args:
      layer: layer of the table. Its tables get no gradient from this call.
      queries: float32 `[queries, dim]`. Global.
      k: number of rows, from 1 to the vocabulary size.
      table: name of the table; None: the only one of the layer.
      **options: `transform`, for another vector of each row, as of an item tower, and
        `excluded`, for ids that must not be returned; see `te.functional.top_k`.

    Returns:
      `scores`, float32 `[queries, k]`, the largest first, and `ids`, int32. A query
      that has fewer than `k` rows left, as others are excluded, gets `-inf` and
      `te.inputs.PADDING_ROW_ID` behind them.

    Raises:
      TypeError: if `layer` is no layer, such as the model.
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
    if layer.recording == "serving":
        tables = _recorded_tables(layer, table)
    else:
        tables = jax.lax.stop_gradient(layer.tables.get_value())
    return functional.top_k(tables, queries, layer.plan, k, table=table, **options)


def _recorded_tables(layer: TPUEmbedding, table: str | None) -> Mapping[str, Array]:
    """Returns whole tables, and records a call, whose tables an export keeps."""
    _, member = find_table(layer.plan, table)
    plan = layer.plan.with_features(FeatureConfig(table=member.config))
    given, *calls = layer.recorded.get_value()
    no_ids = ServedCall(ids=[jnp.zeros(0, jnp.int32)], plan=plan)
    layer.recorded.set_value((given, *calls, no_ids))
    return given
