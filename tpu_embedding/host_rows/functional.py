"""`te.functional.host_rows`, for tables and slots in your own variables."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tpu_embedding.host_rows.bringing import Batch, open_feed, rows_brought
from tpu_embedding.host_rows.feed import Key
from tpu_embedding.host_rows.stack import FetchedRows
from tpu_embedding.nn.model_tables import LayerTables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows


def host_rows(
    batches: Iterable[Batch],
    tables: dict[str, PackedRows],
    plan: EmbeddingPlan,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[tuple[Batch, Callable[..., tuple[Any, Any]]]]:
    """Yields each batch with a function that brings its rows into tables and slots.

    Before each step, call `tables, slots = bring(tables, slots)`. Note that `bring`
    donates its arguments, so use only its results afterwards. See `te.host_rows`.

    Args:
      batches: see `te.host_rows`.
      tables: packed rows by stack name, from `init_tables`.
      plan: the layer's plan.
      features_of: returns the features in a batch, in the form that `lookup` accepts.

    Yields:
      A batch and its `bring` function.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(
      ...     vocabulary_size=1000, dim=4, name="user",
      ...     placement=te.HostRows(cache_rows=100))
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> batches = [np.arange(i, i + 8, dtype=np.int32) for i in range(5)]
      >>> for ids, bring in te.functional.host_rows(
      ...     batches, tables, plan, features_of=lambda ids: ids
      ... ):
      ...     tables, slots = bring(tables, slots)
      ...     result = te.functional.lookup(tables, ids, plan)
      >>> int(result.stats.missing_rows["stack_0"])
      0
    """

    def bring(
        fetched: Mapping[Key, FetchedRows],
        tables: dict[str, PackedRows],
        slots: dict[str, Any],
    ) -> tuple[Any, Any]:
        layers = {"": LayerTables(tables, plan)}
        stacks, new_slots = rows_brought(layers, {"": slots}, fetched)
        return stacks[""], new_slots[""]

    with open_feed(batches, {"": LayerTables(tables, plan)}, features_of) as feed:
        for batch, fetched in feed:
            yield batch, functools.partial(bring, fetched)
