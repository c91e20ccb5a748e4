"""DLRM v4: a click model over histories of events, as in MLPerf's `dlrm_v4_hstu`.

Items, artists and albums are looked up once per device and id. `HSTU` transforms the
rows of different items, and expands the results into the events of the histories.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_embedding import initializers
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.functional.unique_rows import UniqueRows, expand
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.tools.train.models.hstu import (
    HSTU,
    HSTUInputs,
    HSTUSizes,
    longest_sequence,
)
from tpu_embedding.tools.train.models.model import Outputs, click_outputs

EVENT_FEATURES: Final = ("item_id", "artist_id", "album_id")
"""Features of each event of a history, and of the candidate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMv4Config:
    """Hyperparameters of `DLRMv4`.

    Attributes:
      hstu: sizes of the dense part, and the dimension of all tables.
    """

    hstu: HSTUSizes

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns a feature per table, by the names in `data.table_sizes`.

        Args:
          data: has `table_sizes`, rows by table, and `history_length`, the events of
            the longest history. Tables other than those of `EVENT_FEATURES` have one id
            per sample, and make the contextual tokens in their order.

        Raises:
          ValueError: if the number of tables is not that of the contextual tokens.
        """
        num_contextual = len(data.table_sizes) - len(EVENT_FEATURES)
        if num_contextual != self.hstu.num_contextual:
            raise ValueError(
                "DLRMv4Config.hstu.num_contextual must be the number of features with "
                f"one id per sample, {num_contextual}, got {self.hstu.num_contextual}."
            )
        return {
            name: FeatureConfig(
                table=TableConfig(
                    vocabulary_size=size,
                    dim=self.hstu.dim,
                    initializer=initializers.uniform(-(size**-0.5), size**-0.5),
                    name=name,
                ),
                unique_rows=name in EVENT_FEATURES,
                max_sequence_length=data.history_length
                if name in EVENT_FEATURES
                else 0,
            )
            for name, size in data.table_sizes.items()
        }

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "DLRMv4":
        """Returns the model with initial parameters."""
        contextual = tuple(n for n in data.table_sizes if n not in EVENT_FEATURES)
        return DLRMv4(self.hstu, contextual, data.history_length, plan, rngs=rngs)


class DLRMv4(nnx.Module):
    """Predicts the click on a candidate by `HSTU` over rows of tables.

    A batch has the ids `history` and `candidate` of each of `EVENT_FEATURES`, one id
    per sample of each contextual feature, and these dense inputs:

    * `history_length`: `[batch]`, number of events of each history.
    * `action_weight`, `action_timestamp`: `[batch, events]`, bits of the action of each
      event, and its time in seconds.
    * `query_time`: `[batch]`, time of the candidate in seconds.

    An item has one artist and one album. So HSTU needs the rows of artist and album
    once per different item. `rows_of_items` takes them from the two other lookups by
    the indices of all events: no further ids travel, shapes do not depend on the data,
    and each table is looked up once per device and id.
    """

    def __init__(
        self,
        sizes: HSTUSizes,
        contextual_features: tuple[str, ...],
        history_length: int,
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.hstu = HSTU(sizes, rngs=rngs)
        self.contextual_features = contextual_features
        self.longest_sequence = history_length + len(contextual_features) + 1

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        """Returns the logit and the probability of a click on each candidate.

        Attention scores are divided by a number of tokens. In training it is that of
        the longest sequence of the global batch, as in the benchmark, on any number of
        devices. After `eval()` it is that of the longest possible sequence. So a score
        that is evaluated or served does not depend on the other samples of the batch.

        Args:
          features: inputs of the tables.
          dense: dict of integer arrays; see the class.
        """
        rows = self.embedding(features)
        items, artists, albums = (rows[name] for name in EVENT_FEATURES)
        lengths = dense["history_length"]
        if self.hstu.deterministic:
            normalizer = jnp.asarray(self.longest_sequence, lengths.dtype)
        else:
            normalizer = longest_sequence(lengths, len(self.contextual_features))
        inputs = HSTUInputs(
            items=items.rows,
            artists=rows_of_items(artists, items),
            albums=rows_of_items(albums, items),
            contextual=jnp.stack([rows[n] for n in self.contextual_features], axis=1),
            history=items.ids.index["history"],
            lengths=lengths,
            candidate=items.ids.index["candidate"],
            actions=dense["action_weight"],
            times=dense["action_timestamp"],
            query_times=dense["query_time"],
        )
        logits = self.hstu(
            inputs,
            lambda values, index: _expand_at(values, items, index),
            normalizer=normalizer,
        )
        return click_outputs(logits)


def rows_of_items(
    attributes: UniqueRows, items: UniqueRows
) -> Float[Array, "unique_items dim"]:
    """Returns the row of an attribute of each unique item, such as its artist.

    Both features have the same places: the events of the same samples. Each place of an
    item tells where the row of its attribute is. Nothing crosses the network.

    Args:
      attributes: rows of the attribute, one per different id of a device.
      items: rows of the items. Items with one id have one attribute; if they had more,
        the one with the smallest id would count.

    Returns:
      One row per row of the items; zeros where that is unused.
    """
    find = functools.partial(
        _attribute_of_items, items.ids.ids.shape[1], attributes.ids.ids.shape[1]
    )
    places = jax.tree.leaves(items.ids.index), jax.tree.leaves(attributes.ids.index)
    plan = items.plan
    if plan is None:
        return _expand_at(attributes.rows, attributes, find(*places))
    spec = plan.sample_spec
    missing = -places[0][0].shape[0] % plan.num_shards

    def find_on_mesh(
        *places: list[Int[Array, "batch ..."]],
    ) -> Int[Array, " unique_items"]:
        filled = [
            [
                jnp.pad(
                    index,
                    ((0, missing), *((0, 0),) * (index.ndim - 1)),
                    constant_values=num_unique,
                )
                for index in of_feature
            ]
            for of_feature, num_unique in zip(places, find.args, strict=True)
        ]
        local = on_shards(find, plan, in_specs=(spec, spec), out_specs=spec)
        return local(*filled)

    index = in_auto_axes(find_on_mesh, plan, spec)(*places)
    return _expand_at(attributes.rows, attributes, index)


def _expand_at(values: Array, rows: UniqueRows, index: Int[Array, "..."]) -> Array:
    """Expands one value per row into other places than those of the samples' ids."""
    return expand(values, dataclasses.replace(rows.ids, index=index), rows.plan)


def _attribute_of_items(
    num_items: int,
    num_attributes: int,
    items: list[Int[Array, "samples ..."]],
    attributes: list[Int[Array, "samples ..."]],
) -> Int[Array, " items"]:
    """Returns the index of the attribute of each unique item of a device."""
    of_items, of_attributes = (
        jnp.concatenate([index.reshape(-1) for index in of_feature])
        for of_feature in (items, attributes)
    )
    none = jnp.full((num_items,), num_attributes, of_attributes.dtype)
    return none.at[of_items].min(
        of_attributes, mode="drop", wrap_negative_indices=False
    )
