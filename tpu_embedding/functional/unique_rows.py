"""The rows of a feature with `FeatureConfig.unique_rows`, and their expansion.

The batches of a sequence model repeat most of their ids. Such a model transforms each
unique row once, and then *expands* the result: it gathers it into the places of the
samples. The gradient of an expansion sums over the places of each row.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.argument_checks import Wanted, takes
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.plan.shard_map import constrain, in_auto_axes, on_shards
from tpu_embedding.types import AxisSize, IdArray, UniqueIds

_PLAN_OR_NONE: Final = Wanted(EmbeddingPlan | None, PLAN.text)

_MAX_SUMMED_PLACES: Final = 2**15
"""Places whose gradients are converted to float32 at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UniqueRows:
    """The activation of a feature with `FeatureConfig.unique_rows`.

    Attributes:
      rows: `[num_shards * unique_per_shard, dim]`, global, split over all devices. Each
        device has the rows that its samples need, once each; unused ones are zero.
      index: int32 `[batch, ...]`, or a dict of such arrays like the ids. The place of
        each id's row among the rows of its device; `unique_per_shard` where there is no
        id.
      plan: plan of the lookup; None: all rows are on one device, as in serving.
    """

    rows: Float[Array, "rows dim"]
    index: Any
    plan: EmbeddingPlan | None = dataclasses.field(metadata={"static": True})

    def expand(self, values: Float[Array, "rows width"] | None = None) -> Any:
        """Gathers values into the places of the samples; see `expand`.

        Args:
          values: one per row, such as the output of an MLP; None: the rows.

        Returns:
          `[batch, ..., width]`, or a dict of them like `index`.
        """
        values = self.rows if values is None else values
        return jax.tree.map(lambda index: expand(values, index, self.plan), self.index)

    def is_id(self) -> Any:
        """Returns bool arrays like `index`: False for padding."""
        num_shards = 1 if self.plan is None else self.plan.num_shards
        per_shard = self.rows.shape[0] // num_shards
        return jax.tree.map(lambda index: index < per_shard, self.index)


@takes("te.functional.", plan=_PLAN_OR_NONE)
def expand(
    values: Float[Array, "rows width"],
    index: IdArray,
    plan: EmbeddingPlan | None,
) -> Float[Array, "batch *places width"]:
    """Gathers the values of unique rows into the places of the samples.

    No value crosses the network: each device has the rows of its samples.

    Args:
      values: `[num_shards * unique_per_shard, width]`, global; one per unique row, of
        any float type.
      index: int32 `[batch]` or `[batch, places]`, global; an array of
        `UniqueIds.index` of the prepared batch.
      plan: plan of the lookup; None: all values are on one device.

    Returns:
      Values of each place, of the same type; zeros where there is no id. Their
      gradients are summed in float32, and rounded once.

    Raises:
      ValueError: if the values are not split evenly over the devices.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> watched = te.FeatureConfig(
      ...     table=table, unique_rows=True, max_sequence_length=3
      ... )
      >>> plan = te.make_plan({"watched": watched})
      >>> batch = te.inputs.prepare_features({"watched": [[7, 7, 2], [2]]}, plan)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> rows = te.functional.lookup(tables, batch, plan).activations["watched"]
      >>> te.functional.expand(rows, batch["watched"].index, plan).shape
      (2, 3, 4)
    """
    if plan is None:
        return _expand(values, jnp.asarray(index))
    if values.shape[0] % plan.num_shards:
        raise ValueError(
            f"expand needs values [num_shards * unique_per_shard, width] for "
            f"{plan.num_shards} shards, got shape {values.shape}; give one value per "
            "row of the activation."
        )
    batch_size = index.shape[0]
    per_shard = values.shape[0] // plan.num_shards
    missing = -batch_size % plan.num_shards
    spec = plan.sample_spec
    local = on_shards(_expand, plan, in_specs=(spec, spec), out_specs=spec)

    def run(values, index):
        room = ((0, missing), *((0, 0),) * (index.ndim - 1))
        index = jnp.pad(index, room, constant_values=per_shard)
        expanded = local(values, index)
        if len(plan.batch_axes) < len(plan.sample_axes):
            expanded = constrain(expanded, plan, plan.batch_sharding.spec)
        return expanded[:batch_size]

    divides = batch_size % plan.num_batch_shards == 0
    out_spec = plan.batch_sharding.spec if divides else jax.sharding.PartitionSpec()
    return in_auto_axes(run, plan, out_spec)(values, index)


def with_index(activations: Any, features: Any, plan: EmbeddingPlan) -> Any:
    """Returns the activations, with `UniqueRows` for features that have unique rows.

    Args:
      activations: nest of a lookup.
      features: the batch that was looked up.
      plan: plan of the layer.
    """
    plan = plan.for_batch(features)
    if not any(feature.config.unique_rows for feature in plan.features):
        return activations
    leaves = [
        UniqueRows(rows=leaf, index=ids.index, plan=plan)
        if isinstance(ids, UniqueIds)
        else leaf
        for leaf, ids in zip(
            plan.flatten_activations(activations), plan.flatten(features), strict=True
        )
    ]
    return plan.unflatten(leaves)


@jax.named_scope("expand")
def _expand(values: Array, index: Array) -> Array:
    """Gathers values; zeros for an index behind the last. Per shard."""
    return _gather(values.shape[0], values, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_values: AxisSize, values: Array, index: Array) -> Array:
    del num_values
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_forward(num_values, values, index):
    return _gather(num_values, values, index), index


def _gather_backward(num_values, index, cotangents):
    """Sums the cotangents of each value in float32.

    Narrow cotangents are converted some places at a time: a float32 copy of all would
    take more memory than anything else in the step of a sequence model.
    """
    width, dtype = cotangents.shape[-1], cotangents.dtype
    index, cotangents = index.reshape(-1), cotangents.reshape(-1, width)
    num_places = index.shape[0]
    at_a_time = num_places
    if dtype != jnp.float32:
        at_a_time = min(num_places, _MAX_SUMMED_PLACES)

    def add(start, size, sums):
        places = jax.lax.dynamic_slice_in_dim(index, start, size)
        summands = jax.lax.dynamic_slice_in_dim(cotangents, start, size)
        return sums.at[places].add(
            summands.astype(jnp.float32), mode="drop", wrap_negative_indices=False
        )

    num_slices = num_places // max(1, at_a_time)
    sums = jax.lax.fori_loop(
        0,
        num_slices,
        lambda i, sums: add(i * at_a_time, at_a_time, sums),
        jnp.zeros((num_values, width), jnp.float32),
    )
    start = num_slices * at_a_time
    sums = add(start, num_places - start, sums)
    return sums.astype(dtype), None


_gather.defvjp(_gather_forward, _gather_backward)
