"""A click model over histories of events: MLPerf Training's `dlrm_v4_hstu`.

Items, artists and albums are looked up once per device and id. `HSTU` transforms the
rows of different items, and expands the results into the events of the histories.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from hstu import HSTU, HSTUInputs, Samples, longest_sequence
from hstu_layers import HSTUSizes
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

import tpu_embedding as te
from tpu_embedding.tools import train

EVENT_FEATURES: Final = ("item_id", "artist_id", "album_id")
"""Features of each event of a history, and of the candidate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMv4Config:
    """Hyperparameters of `DLRMv4`.

    Attributes:
      hstu: sizes of the dense part, and the dimension of all tables.
    """

    hstu: HSTUSizes

    def feature_config(self, data: Any) -> dict[str, te.FeatureConfig]:
        """Returns a feature per table, by the names in `data.table_sizes`.

        Args:
          data: has `table_sizes`, rows by table. Tables other than those of
            `EVENT_FEATURES` have one id per sample, and make the contextual tokens in
            their order.

        Raises:
          ValueError: if the tables do not fit the number of contextual tokens.
        """
        num_contextual = len(data.table_sizes) - len(EVENT_FEATURES)
        if num_contextual != self.hstu.num_contextual:
            raise ValueError(
                "DLRMv4Config.hstu.num_contextual must be the number of features with "
                f"one id per sample, {num_contextual}, got {self.hstu.num_contextual}."
            )
        return {
            name: te.FeatureConfig(
                table=te.TableConfig(
                    vocabulary_size=size,
                    dim=self.hstu.dim,
                    initializer=te.initializers.uniform(-(size**-0.5), size**-0.5),
                    name=name,
                ),
                output_shape=(-1,) if name in EVENT_FEATURES else None,
            )
            for name, size in data.table_sizes.items()
        }

    def with_inputs(
        self,
        batch: train.Batch,
        plan: te.EmbeddingPlan | te.inputs.InputPlan | None,
        sizes: te.inputs.BufferSizes | None = None,
        *,
        samples: Literal["global", "process"],
    ) -> train.Batch:
        """Names each item, artist and album of a device's samples once.

        The ids of `EVENT_FEATURES` are dicts with a `history` and a `candidate`. Those
        two become dense inputs: indices into the items of the device. So do the artist
        and the album of each item.
        """
        assert isinstance(batch.dense, Mapping)
        item, *attributes = EVENT_FEATURES
        length = batch.dense["action_weight"].shape[1]
        items = te.inputs.unique_ids(
            batch.features[item], plan, item, sizes, length=length, samples=samples
        )
        features, indices = {item: items.ids}, dict(items.index)
        for name in attributes:
            ids = items.attribute_ids(batch.features[name])
            unique = te.inputs.unique_ids(ids, plan, name, sizes, samples=samples)
            features[name], indices[name] = unique.ids, unique.index
        return dataclasses.replace(
            batch,
            features={**batch.features, **features},
            dense={**batch.dense, **indices},
        )

    def build(self, data: Any, plan: te.EmbeddingPlan, *, rngs: nnx.Rngs) -> "DLRMv4":
        """Returns the model with initial parameters."""
        contextual = tuple(n for n in data.table_sizes if n not in EVENT_FEATURES)
        return DLRMv4(self.hstu, contextual, data.history_length, plan, rngs=rngs)


class DLRMv4(nnx.Module):
    """Predicts the click on a candidate by `HSTU` over rows of tables.

    A batch has the unique items, artists and albums of each device, one id per sample
    of each contextual feature, and these dense inputs:

    * `artist_id`, `album_id`: `[items]`, unique artist and album of each unique item.
    * `history`: `[batch, events]`, unique item of each event; `candidate`: `[batch]`.
    * `history_length`: `[batch]`, number of events of each history.
    * `action_weight`, `action_timestamp`: `[batch, events]`, bits of the action of each
      event, and its time in seconds.
    * `query_time`: `[batch]`, time of the candidate in seconds.

    An item has one artist and one album. So HSTU needs the rows of artist and album
    once per different item, and gathers them by `artist_id` and `album_id`.

    HSTU runs on each device for its own samples, by micro-batches of
    `HSTUSizes.micro_batch_size`. Devices exchange nothing until the gradients of the
    dense parameters are added up. The axes of the mesh must have the type `Auto`, as
    `te.device_mesh` makes them. The model is not for export.
    """

    def __init__(
        self,
        sizes: HSTUSizes,
        contextual_features: tuple[str, ...],
        history_length: int,
        plan: te.EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.hstu = HSTU(sizes, rngs=rngs)
        self.contextual_features = contextual_features
        self.longest_sequence = history_length + len(contextual_features) + 1

    def __call__(self, features: dict[str, Any], dense: Any) -> train.Outputs:
        """Returns the logit and the probability of a click on each candidate.

        Attention scores are divided by a number of tokens. In training it is the length
        of the longest sequence of the global batch, as in the benchmark, on any number
        of devices. After `eval()` it is the length of the longest possible sequence. So
        an evaluated score does not depend on the other samples of the batch.

        Args:
          features: inputs of the tables.
          dense: dict of integer arrays; see the class.
        """
        rows = self.embedding(features)
        item, *attributes = EVENT_FEATURES
        artists, albums = (
            self.embedding.expand(rows[name], dense[name]) for name in attributes
        )
        lengths = dense["history_length"]
        if self.hstu.deterministic:
            normalizer = jnp.asarray(self.longest_sequence, lengths.dtype)
        else:
            normalizer = longest_sequence(lengths, len(self.contextual_features))
        inputs = HSTUInputs(
            items=rows[item],
            artists=artists,
            albums=albums,
            samples=Samples(
                numbers=jnp.arange(len(lengths)),
                contextual=jnp.stack(
                    [rows[n] for n in self.contextual_features], axis=1
                ),
                history=dense["history"],
                lengths=lengths,
                candidate=dense["candidate"],
                actions=dense["action_weight"],
                times=dense["action_timestamp"],
                query_times=dense["query_time"],
            ),
        )
        return train.click_outputs(self._logits(inputs, normalizer))

    def _logits(
        self, inputs: HSTUInputs, normalizer: Int[Array, ""]
    ) -> Float[Array, " batch"]:
        """Returns the logit of each sample, from the device that has its rows.

        Args:
          inputs: global arrays.
          normalizer: divisor of the attention's scores.
        """
        graph, state = nnx.split(self.hstu)
        batch = inputs.samples.lengths.shape[0]

        def device_logits(
            inputs: HSTUInputs,
            state: nnx.State,
            normalizer: Int[Array, ""],
            dropout_key: Key[Array, ""] | None,
        ) -> Float[Array, " samples"]:
            hstu = nnx.merge(graph, state)
            return hstu(inputs, normalizer=normalizer, dropout_key=dropout_key)

        plan = self.embedding.plan
        split, whole = plan.batch_sharding.spec, PartitionSpec()
        samples = jax.tree.map(lambda x: _fill_up(x, plan.num_shards), inputs.samples)
        on_mesh = jax.shard_map(
            jax.named_scope("hstu")(device_logits),
            mesh=plan.mesh,
            in_specs=(split, whole, whole, whole),
            out_specs=split,
            check_vma=False,
        )
        inputs = dataclasses.replace(inputs, samples=samples)
        return on_mesh(inputs, state, normalizer, self.hstu.dropout_key())[:batch]


def _fill_up(x: Array, num_parts: int) -> Array:
    """Appends zeros until the parts divide the first axis."""
    return jnp.pad(x, ((0, -len(x) % num_parts), *((0, 0),) * (x.ndim - 1)))
