"""`te.host_rows`, for NNX models."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding.host_rows.bringing import Batch, open_feed, rows_brought
from tpu_embedding.host_rows.feed import Key
from tpu_embedding.host_rows.stack import FetchedRows
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import checked_layers, tables_of_layers
from tpu_embedding.transfers import moves_arrays


def host_rows(
    batches: Iterable[Batch],
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[Batch]:
    """Yields batches after bringing their `te.HostRows` rows to the devices.

    Updates `model` and `optimizer` in place before yielding each batch. Train on each
    batch before you draw the third batch after it. Evaluation batches also need this
    function. You can run an evaluation loop in the middle of a training loop.

    Args:
      batches: batches on the host. They must not depend on the model state, because
        each batch is drawn `HostRows.window + 4` batches early.
      model: model with at least one `TPUEmbedding`. If no table uses `te.HostRows`, the
        loop only yields your batches.
      optimizer: the model's optimizer, or None if it has none.
      features_of: returns the features in a batch, prepared for the layer. If the model
        has several layers, it returns features by layer path.

    Yields:
      The batches.

    Raises:
      ValueError: if a batch's rows don't fit in the cache, raised at that batch. Also
        if a step used rows that were not on their device, raised at the next batch or
        at the end of the loop.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(
      ...     vocabulary_size=1000, dim=4, name="user",
      ...     placement=te.HostRows(cache_rows=100))
      >>> model = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0))
      >>> optimizer = te.Optimizer(model, optax.adam(1e-3))
      >>> @nnx.jit
      ... def train_step(model, optimizer, ids):
      ...     loss, gradients = te.value_and_grad(lambda m: jnp.sum(m(ids) ** 2))(model)
      ...     optimizer.update(model, gradients)
      ...     return loss
      >>> batches = [np.arange(i, i + 8, dtype=np.int32) for i in range(5)]
      >>> losses = [
      ...     train_step(model, optimizer, batch)
      ...     for batch in te.host_rows(
      ...         batches, model, optimizer, features_of=lambda batch: batch)
      ... ]
    """
    layers = checked_layers(
        "te.host_rows",
        model,
        "te.host_rows(batches, model, optimizer, features_of=...)",
    )

    @moves_arrays
    def taken_lost_reads() -> dict[str, Any]:
        lost_reads = {}
        for path, layer in layers.items():
            stats = layer.stats.get_value()
            lost_reads[path] = stats.missing_rows
            zeros = jax.tree.map(jnp.zeros_like, stats.missing_rows)
            layer.stats.set_value(dataclasses.replace(stats, missing_rows=zeros))
        return lost_reads

    @moves_arrays
    def bring(fetched: Mapping[Key, FetchedRows] | None) -> None:
        slots = {} if optimizer is None else optimizer.slots.get_value()
        tables, lost_reads = tables_of_layers(layers), taken_lost_reads()
        stacks, slots = rows_brought(tables, slots, fetched, lost_reads)
        for path, layer in layers.items():
            layer.tables.set_value(stacks[path])
        if optimizer is not None:
            optimizer.slots.set_value(slots)

    with open_feed(batches, tables_of_layers(layers), features_of) as feed:
        try:
            for batch, fetched in feed:
                bring(fetched)
                yield batch
            bring(None)
        except Exception:
            taken_lost_reads()  # Lost reads must not make the next loop raise.
            raise
