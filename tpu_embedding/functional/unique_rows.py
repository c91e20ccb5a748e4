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
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from tpu_embedding.argument_checks import Wanted, check_type, takes
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import PADDING_ROW_ID, AxisSize, IdArray, RowIds, UniqueIds

_UNIQUE_IDS: Final = Wanted(
    UniqueIds, "the prepared ids of a feature with unique_rows, as batch['items']"
)
_PLAN_OR_NONE: Final = Wanted(EmbeddingPlan | None, PLAN.text)

_MAX_SUMMED_PLACES: Final = 2**15
"""Places whose gradients are converted to float32 at a time."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class UniqueRows:
    """The activation of a feature with `FeatureConfig.unique_rows`.

    Attributes:
      rows: `[num_shards * unique_per_shard, dim]`, global, split over all devices. Each
        device has the rows that its samples need, once each. Two devices may have the
        same row. Unused places are zero.
      ids: the prepared ids, with the index of the samples into the rows.
      plan: plan of the lookup; None: all rows are on one device, as in serving.
    """

    rows: Float[Array, "rows dim"]
    ids: UniqueIds
    plan: EmbeddingPlan | None = dataclasses.field(metadata={"static": True})

    def expand(self, values: Float[Array, "rows ..."] | None = None) -> Any:
        """Gathers values into the places of the samples; see `expand`.

        Args:
          values: one per row, such as the output of an MLP; None: the rows.

        Returns:
          `[batch, ...]`, or a dict of them like the ids.
        """
        values = self.rows if values is None else values
        return expand(values, self.ids, self.plan)

    def attribute_rows(self, attribute: "UniqueRows") -> Float[Array, "rows dim"]:
        """Returns the row of an attribute of each unique id, such as an item's artist.

        A model then computes each item once from its own row and its artist's. Both
        features have ids in the same places: the item of each event, and its artist.
        So any place of an item tells where the row of its artist is. Nothing crosses
        the network.

        Each id must have one attribute. This is not checked. An id with several gets
        one of them on each device, which depends on the samples of the device. So the
        result then depends on how samples are split over devices.

        Args:
          attribute: activation of the attribute, whose ids are in the same places. Only
            the shapes of the two indices are compared. So sequences of other lengths
            within equal padded shapes are not noticed.

        Returns:
          One row per row of this feature; zeros for unused rows, and for ids without an
          attribute.

        Raises:
          ValueError: if the indices of the two features differ in shape.

        Example:
          >>> from flax import nnx
          >>> import jax.numpy as jnp
          >>> import tpu_embedding as te
          >>> features = {
          ...     name: te.FeatureConfig(
          ...         table=te.TableConfig(vocabulary_size=10, dim=4, name=name),
          ...         unique_rows=True,
          ...         max_sequence_length=3,
          ...     )
          ...     for name in ("item", "artist")
          ... }
          >>> layer = te.TPUEmbedding(features, "sgd", rngs=nnx.Rngs(0))
          >>> rows = layer(
          ...     layer.prepare(
          ...         {"item": [[7, 8, 7], [2]], "artist": [[3, 3, 3], [1]]}
          ...     )
          ... )
          >>> items, artists = rows["item"], rows["artist"]
          >>> both = [items.rows, items.attribute_rows(artists)]  # for an MLP of items
          >>> items.expand(jnp.concatenate(both, axis=1)).shape
          (2, 3, 8)
        """
        check_type(
            "UniqueRows.attribute_rows: attribute",
            _UNIQUE_ROWS,
            attribute,
            "items.attribute_rows(artists)",
        )
        _refuse_other_places(self.ids, attribute.ids)
        find = functools.partial(_attribute_rows, self.ids.ids.shape[1])
        plan = self.plan
        if plan is None:
            return find(attribute.rows, self.ids.index, attribute.ids.index)

        def run(rows, *ids):
            spec = plan.sample_spec
            on_mesh = on_shards(find, plan, in_specs=(spec,) * 3, out_specs=spec)
            return on_mesh(rows, *(_fill_up(x.index, x, plan) for x in ids))

        on_mesh = in_auto_axes(run, plan, plan.sample_spec)
        return on_mesh(attribute.rows, self.ids, attribute.ids)

    def is_id(self) -> Any:
        """Returns bool `[batch]` or `[batch, places]`, like the ids: False for padding.

        An id outside its table that was dropped is padding, too.
        """
        per_shard = self.ids.ids.shape[1]
        return jax.tree.map(lambda index: index < per_shard, self.ids.index)

    def is_row(self) -> Bool[Array, " rows"]:
        """Returns False for the unused places of `rows`."""
        return jnp.asarray(self.ids.ids).reshape(-1) != PADDING_ROW_ID


_UNIQUE_ROWS: Final = Wanted(UniqueRows, "the activation of a feature with unique_rows")


@takes("te.functional.", ids=_UNIQUE_IDS, plan=_PLAN_OR_NONE)
def expand(
    values: Float[Array, "rows ..."], ids: UniqueIds, plan: EmbeddingPlan | None
) -> Any:
    """Gathers the values of unique rows into the places of the samples.

    Each device has the rows of its samples, so no value crosses the network. Two cases
    differ. If batches are split over some mesh axes only, the devices along the others
    exchange their values, not the expanded ones. If the devices do not divide the
    batch, the samples that filled it up are cut off.

    JAX differentiates it in reverse mode. The gradients of a value are summed in
    float32, and rounded once.

    Args:
      values: `[num_shards * unique_per_shard, ...]`, global; one per unique row, of any
        float type.
      ids: the prepared ids of the feature.
      plan: plan of the lookup; None: all values are on one device.

    Returns:
      Values of each place, of the same type, `[batch, ...]` or `[batch, places, ...]`;
      a dict of them if the ids are a dict. Zeros where there is no id.

    Raises:
      ValueError: if there is not one value per unique row.

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
      >>> te.functional.expand(rows, batch["watched"], plan).shape
      (2, 3, 4)
    """
    num_shards, per_shard = ids.ids.shape
    if values.shape[:1] != (num_shards * per_shard,):
        raise ValueError(
            f"expand needs one value per unique row, {num_shards * per_shard} here, "
            f"got values of shape {values.shape}; transform all rows of the activation."
        )
    # All axes of a value lie side by side.
    flat = values.reshape(values.shape[0], -1)
    if plan is None:
        run = _expand
    else:
        run = functools.partial(_expand_on_mesh, ids=ids, plan=plan)

    def expand_into(index: IdArray) -> Array:
        expanded = run(flat, jnp.asarray(index))
        return expanded.reshape(*index.shape, *values.shape[1:])

    return jax.tree.map(expand_into, ids.index)


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
    leaves = []
    for leaf, ids in zip(
        plan.flatten_activations(activations), plan.flatten(features), strict=True
    ):
        ids = ids.ids if isinstance(ids, RowIds) else ids
        is_unique = isinstance(ids, UniqueIds)
        leaves.append(UniqueRows(rows=leaf, ids=ids, plan=plan) if is_unique else leaf)
    return plan.unflatten(leaves)


def _expand_on_mesh(
    values: Array, index: Array, *, ids: UniqueIds, plan: EmbeddingPlan
) -> Array:
    """Expands values on the devices that hold them."""
    batch_size = index.shape[0]
    per_shard = ids.ids.shape[1]
    other_axes = plan.sample_axes[len(plan.batch_axes) :]

    def expand_shard(values, index):
        if other_axes:
            # The samples of a batch shard are split over these axes.
            first = jax.lax.axis_index(other_axes) * per_shard
            is_id = index < per_shard
            values = jax.lax.all_gather(values, other_axes, tiled=True)
            index = jnp.where(is_id, index + first, values.shape[0])
            index = jax.lax.all_gather(index, other_axes, tiled=True)
        return _expand(values, index)

    def run(values, index):
        on_mesh = on_shards(
            expand_shard,
            plan,
            in_specs=(plan.sample_spec, plan.sample_spec),
            out_specs=plan.batch_sharding.spec,
        )
        return on_mesh(values, _fill_up(index, ids, plan))[:batch_size]

    divides = batch_size % plan.num_batch_shards == 0
    out_spec = plan.batch_sharding.spec if divides else PartitionSpec()
    return in_auto_axes(run, plan, out_spec)(values, index)


def _fill_up(index: Any, ids: UniqueIds, plan: EmbeddingPlan) -> Any:
    """Adds samples without ids, so that the devices divide the batch."""

    def pad(index):
        room = ((0, -index.shape[0] % plan.num_shards), *((0, 0),) * (index.ndim - 1))
        return jnp.pad(index, room, constant_values=ids.ids.shape[1])

    return jax.tree.map(pad, index)


def _refuse_other_places(ids: UniqueIds, attributes: UniqueIds) -> None:
    """Raises ValueError unless each id has an attribute in the same place."""
    shapes, others = (
        (x.ids.shape[0], jax.tree.map(lambda index: index.shape, x.index))
        for x in (ids, attributes)
    )
    if shapes != others:
        raise ValueError(
            "UniqueRows.attribute_rows needs an attribute in each place of an id, but "
            f"the index of the ids has shape {shapes[1]} on {shapes[0]} device(s), and "
            f"that of the attribute {others[1]} on {others[0]}. Prepare both from one "
            "batch, with the same names, lengths and FeatureConfig.max_sequence_length."
        )


@jax.named_scope("attribute_rows")
def _attribute_rows(
    num_unique: AxisSize, rows: Array, index: Any, attribute_index: Any
) -> Array:
    """Gathers the row of the attribute of each unique id. Per shard."""
    of_ids, of_attributes = (
        jnp.concatenate([jnp.reshape(x, -1) for x in jax.tree.leaves(of_feature)])
        for of_feature in (index, attribute_index)
    )
    none = jnp.full((num_unique,), rows.shape[0], of_attributes.dtype)
    found = none.at[of_ids].min(of_attributes, mode="drop", wrap_negative_indices=False)
    return _expand(rows, found)


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
    num_places, sum_dtype = index.shape[0], jnp.promote_types(dtype, jnp.float32)
    at_a_time = num_places
    if dtype != sum_dtype:
        at_a_time = min(num_places, _MAX_SUMMED_PLACES)

    def add(start, size, sums):
        places = jax.lax.dynamic_slice_in_dim(index, start, size)
        summands = jax.lax.dynamic_slice_in_dim(cotangents, start, size)
        return sums.at[places].add(
            summands.astype(sum_dtype), mode="drop", wrap_negative_indices=False
        )

    num_slices = num_places // max(1, at_a_time)
    sums = jax.lax.fori_loop(
        0,
        num_slices,
        lambda i, sums: add(i * at_a_time, at_a_time, sums),
        jnp.zeros((num_values, width), sum_dtype),
    )
    start = num_slices * at_a_time
    sums = add(start, num_places - start, sums)
    return sums.astype(dtype), None


_gather.defvjp(_gather_forward, _gather_backward)
