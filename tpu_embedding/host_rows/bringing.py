"""Opens feeds and brings rows, for the NNX, Linen and functional `host_rows`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from tpu_embedding.host_rows.batch_rows import RowsOfShards, rows_of_batch
from tpu_embedding.host_rows.cached_rows import MappedRows
from tpu_embedding.host_rows.feed import Feed, Key
from tpu_embedding.host_rows.stack import FetchedRows, HostStack
from tpu_embedding.nn.model_tables import ModelTables, features_by_layer
from tpu_embedding.transfers import moves_arrays

Batch = TypeVar("Batch")


@contextlib.contextmanager
def open_feed(
    batches: Iterable[Batch], layers: ModelTables, features_of: Callable[[Batch], Any]
) -> Iterator[Iterable[tuple[Batch, Mapping[Key, FetchedRows]]]]:
    """Opens a feed for the model's host rows, and closes it on exit."""
    hosts: dict[Key, HostStack] = {
        (path, name): rows.host
        for path, tables in layers.items()
        for name, rows in tables.stacks.items()
        if isinstance(rows, MappedRows)
    }
    if not hosts:
        yield ((batch, {}) for batch in batches)
        return
    plans = {path: tables.plan for path, tables in layers.items()}

    def rows_of(batch: Batch) -> dict[Key, RowsOfShards]:
        features = features_by_layer(features_of(batch), plans, "host_rows")
        rows = {}
        for path in features:
            names = [name for key, name in hosts if key == path]
            found = rows_of_batch(features[path], plans[path], names)
            rows |= {(path, name): found[name] for name in names}
        return rows

    feed = Feed(batches, hosts, rows_of)
    try:
        yield feed
        # Only after the last batch, because `check_end` waits for messages from all
        # processes, and an exception or a `break` may happen in just one process.
        feed.check_end()
    finally:
        feed.close()


@moves_arrays
def rows_brought(
    layers: ModelTables,
    slots: Mapping[str, Any],
    fetched: Mapping[Key, FetchedRows] | None,
    lost_reads: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Brings fetched rows into tables and slot variables, which are donated.

    `slots` may omit layers. If `fetched` is None, the function brings nothing. It only
    checks whether the steps so far used stale copies or uncached rows. `lost_reads`
    counts uncached rows that the latest lookup read, by layer and stack.
    """
    stacks = {path: dict(tables.stacks) for path, tables in layers.items()}
    new_slots = {path: dict(states) for path, states in slots.items()}
    on_host = [
        (path, name, rows, new_slots.get(path, {}).get(name))
        for path, tables in layers.items()
        for name, rows in tables.stacks.items()
        if isinstance(rows, MappedRows)
    ]
    # All checks come before the first exchange, because an exchange donates its arrays.
    for path, name, rows, state in on_host:
        lost = ((lost_reads or {}).get(path) or {}).get(name, np.int32(0))
        coming = None if fetched is None else fetched[path, name]
        rows.host.check(rows, state, lost, coming)
    for path, name, rows, state in on_host:
        if fetched is None:
            break
        brought, state = rows.host.exchange(rows, state, fetched[path, name])
        stacks[path][name] = brought
        if state is not None:
            new_slots[path][name] = state
    return stacks, new_slots
