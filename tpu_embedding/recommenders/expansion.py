"""Gathers values of unique ids into the positions of the samples, within each device.

`tpu_embedding.inputs.unique_ids` makes the ids and the index. The gradient of a value
sums over its positions.
"""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import AxisSize, IdArray

_MAX_SUMMED_POSITIONS: Final = 2**15
"""Positions whose gradients are converted to float32 at a time."""


def expand(
    values: Float[Array, "rows ..."], index: Any, plan: EmbeddingPlan | None
) -> Any:
    """Gathers the values of unique ids into the positions of the samples.

    Each device has the values of its samples, so nothing crosses the network. JAX
    differentiates it in reverse mode. The gradients of a value are summed in float32,
    and rounded once.

    Args:
      values: `[num_devices * size, ...]`, global, of any float type; one per unique id,
        such as the output of an MLP of its row.
      index: from `tpu_embedding.inputs.unique_ids`, or a nest of such arrays.
      plan: plan of the lookup; None: all values are on one device.

    Returns:
      Values of each position, of the same type: `[batch, ...]` or `[batch, positions,
      ...]`, like the index. Zeros where there is no id.

    Raises:
      ValueError: if the devices do not divide the values.

    Example:
      >>> values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> expand(values, jnp.array([[1, 1, 0], [2, 0, 2]]), None)[:, :, 0].tolist()
      [[3.0, 3.0, 1.0], [0.0, 1.0, 0.0]]
    """
    num_parts = 1 if plan is None else plan.num_shards
    if values.shape[0] % num_parts:
        raise ValueError(
            "expand needs one value per unique id, with as many ids on each of "
            f"{num_parts} devices, got values of shape {values.shape}; transform all "
            "rows of the activation."
        )
    # All axes of a value lie side by side.
    flat = values.reshape(values.shape[0], -1)

    def expand_into(index: IdArray) -> Array:
        positions = jnp.asarray(index)
        if plan is None:
            expanded = _expand(flat, positions)
        else:
            expanded = _expand_on_mesh(flat, positions, plan)
        return expanded.reshape(*index.shape, *values.shape[1:])

    return jax.tree.map(expand_into, index)


def _expand_on_mesh(values: Array, index: Array, plan: EmbeddingPlan) -> Array:
    """Expands values on the devices that hold them."""
    spec, num_parts = plan.batch_sharding.spec, plan.num_shards
    batch_size, per_part = index.shape[0], values.shape[0] // num_parts

    def run(values: Array, index: Array) -> Array:
        # Samples without ids fill up the batch, so that the devices divide it.
        room = ((0, -batch_size % num_parts), *((0, 0),) * (index.ndim - 1))
        index = jnp.pad(index, room, constant_values=per_part)
        on_mesh = on_shards(_expand, plan, in_specs=(spec, spec), out_specs=spec)
        return on_mesh(values, index)[:batch_size]

    out_spec = plan.sharding_of_samples(index.shape).spec
    return in_auto_axes(run, plan, out_spec)(values, index)


@jax.named_scope("expand")
def _expand(values: Array, index: Array) -> Array:
    """Gathers values; zeros for an index behind the last. Per device."""
    return _gather(values.shape[0], values, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_values: AxisSize, values: Array, index: Array) -> Array:
    del num_values
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_forward(num_values, values, index):
    return _gather(num_values, values, index), index


def _gather_backward(num_values, index, cotangents):
    """Sums the cotangents of each value in float32.

    Narrow cotangents are converted some positions at a time: a float32 copy of all
    would take more memory than anything else in the step of a sequence model.
    """
    width, dtype = cotangents.shape[-1], cotangents.dtype
    index, cotangents = index.reshape(-1), cotangents.reshape(-1, width)
    num_positions, sum_dtype = index.shape[0], jnp.promote_types(dtype, jnp.float32)
    at_a_time = num_positions
    if dtype != sum_dtype:
        at_a_time = min(num_positions, _MAX_SUMMED_POSITIONS)

    def add(start, size, sums):
        positions = jax.lax.dynamic_slice_in_dim(index, start, size)
        summands = jax.lax.dynamic_slice_in_dim(cotangents, start, size)
        return sums.at[positions].add(
            summands.astype(sum_dtype), mode="drop", wrap_negative_indices=False
        )

    num_slices = num_positions // max(1, at_a_time)
    sums = jax.lax.fori_loop(
        0,
        num_slices,
        lambda i, sums: add(i * at_a_time, at_a_time, sums),
        jnp.zeros((num_values, width), sum_dtype),
    )
    start = num_slices * at_a_time
    sums = add(start, num_positions - start, sums)
    return sums.astype(dtype), None


_gather.defvjp(_gather_forward, _gather_backward)
