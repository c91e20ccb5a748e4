"""`te.linen.host_rows`, for Linen train states."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tpu_embedding.host_rows.bringing import Batch, open_feed, rows_brought
from tpu_embedding.host_rows.feed import Key
from tpu_embedding.host_rows.stack import FetchedRows
from tpu_embedding.nn.linen.training import TrainState
from tpu_embedding.nn.linen.variables import LayerTables, layer_tables, with_tables


def host_rows(
    batches: Iterable[Batch],
    state: TrainState,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[tuple[Batch, Callable[[TrainState], TrainState]]]:
    """Yields each batch with a function that brings its rows into a Linen state.

    Before each step, call `state = bring(state)`. `bring` donates the tables and slot
    variables in your state. See `te.host_rows`.

    Args:
      batches: see `te.host_rows`.
      state: initial state, which provides the plan for each layer.
      features_of: see `te.host_rows`.

    Yields:
      A batch and its `bring` function.

    Example:
      >>> import tpu_embedding as te
      >>> for batch, bring in te.linen.host_rows(
      ...     batches, state, features_of=lambda b: b["ids"]):  # doctest: +SKIP
      ...     state, loss = train_step(bring(state), batch)
    """

    def bring(fetched: Mapping[Key, FetchedRows], state: TrainState) -> TrainState:
        layers = layer_tables(state.variables)
        stacks, slots = rows_brought(layers, state.slots, fetched)
        tables = {
            path: LayerTables(stacks[path], layer.plan)
            for path, layer in layers.items()
        }
        variables = with_tables(state.variables, tables)
        return state.replace(variables=variables, slots=slots)

    with open_feed(batches, layer_tables(state.variables), features_of) as feed:
        for batch, fetched in feed:
            yield batch, functools.partial(bring, fetched)
