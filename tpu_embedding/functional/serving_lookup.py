"""Lookups in exported models: plain gathers from whole tables on one device.

`serve` shares id conversion, out-of-range policies and combiners with the training
lookup, so both follow the same rules. Batch sizes may be symbolic: `jax.export` then
makes one program for all of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt8

from tpu_embedding.inputs.shard_inputs import (
    Batch,
    FeatureShape,
    fill_up,
    to_feature_input,
)
from tpu_embedding.lookup._forward import (
    pool_feature,
    rows_and_poolings,
    scale_samples,
)
from tpu_embedding.lookup._rounds import quantize
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import zeros_unless


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedCall:
    """Inputs of one lookup, which define the signature of an exported program."""

    ids: list[Any]
    plan: EmbeddingPlan = dataclasses.field(metadata={"static": True})


def serve(tables: Mapping[str, Array], batch: Batch) -> tuple[Any, ServedCall]:
    """Looks up a batch in whole tables.

    Args:
      tables: table name to rows in logical order: `[vocabulary_size, dim]` floats, or
        uint8 `[vocabulary_size, dim + 8]` in FBGEMM's layout. If a table's ids are not
        row numbers, the dict also holds the arrays that `served_rows` reads.
      batch: batch on one shard, from `parse_batch(..., serving=True)`.
    """
    plan, activations = batch.plan, []
    for leaf, feature, shape in zip(
        batch.leaves, plan.features, batch.shapes, strict=True
    ):
        name = table_of(feature, plan)
        ids = feature.inputs.served_rows(leaf, feature, tables, name)
        activations.append(_serve_feature(tables[name], ids, feature, shape, plan))
    return plan.unflatten(activations), ServedCall(ids=batch.leaves, plan=plan)


def table_of(feature: FeaturePlan, plan: EmbeddingPlan) -> str:
    # If the user didn't name a table, only the plan knows its name.
    tables = plan.stacks[feature.stack_index].tables
    return next(t.name for t in tables if t.row_offset == feature.row_offset)


def rows_of_table(
    table: Shaped[Array, "rows _"], row_ids: Int[Array, " ids"]
) -> Float[Array, "ids dim"]:
    """Gathers rows as float32. Ids must be in bounds; `PADDING_ROW_ID` gives zeros."""
    rows = gather_lines(table, jnp.minimum(row_ids, table.shape[0] - 1))
    rows = _decode(rows) if table.dtype == jnp.uint8 else rows.astype(jnp.float32)
    return zeros_unless(row_ids != PADDING_ROW_ID, rows)


def _decode(rows: UInt8[Array, "ids bytes"]) -> Float[Array, "ids dim"]:
    """Decodes int8 rows as `scale * code + bias`."""
    codes = rows[:, :-SCALE_AND_BIAS_BYTES].astype(jnp.float32)
    scale, bias = rows[:, -SCALE_AND_BIAS_BYTES:-4], rows[:, -4:]
    return codes * _float_of_bytes(scale) + _float_of_bytes(bias)


def _float_of_bytes(ends: UInt8[Array, "ids 4"]) -> Float[Array, "ids 1"]:
    """Joins four bytes, lowest first, into a float32 number."""
    # StableHLO's bitcast cannot join bytes if an axis has no fixed size.
    ends = ends.astype(jnp.uint32)
    words = ends[:, :1]
    for k in range(1, 4):
        words = words | (ends[:, k : k + 1] << (8 * k))
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def _serve_feature(
    table: Array,
    ids: Any,
    feature: FeaturePlan,
    shape: FeatureShape,
    plan: EmbeddingPlan,
) -> Array:
    feature_input = to_feature_input(fill_up(ids, num_shards=1), shape)
    row_ids, (pooling,), _ = rows_and_poolings([feature_input], [feature])
    quantization = plan.stacks[feature.stack_index].quantization

    def read_rows(row_ids: Array) -> Array:
        rows = rows_of_table(table, row_ids)
        if quantization is None:
            return rows
        # Zero may not be a quantized value, but positions without a row must add zero.
        is_row = row_ids != PADDING_ROW_ID
        return jnp.where(is_row[:, None], quantize(rows, quantization), 0.0)

    pooled = [pool_feature(pooling, row_ids, read_rows)]
    (activations,) = scale_samples(pooled, [pooling])
    return activations.reshape(shape.output_shape)
