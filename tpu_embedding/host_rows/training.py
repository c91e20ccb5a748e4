"""Iterators over batches whose rows are brought to the devices: `te.host_rows`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.host_rows.batch_rows import rows_of_batch
from tpu_embedding.host_rows.cached_rows import MappedRows
from tpu_embedding.host_rows.feed import Feed, Key, RowsOfStacks
from tpu_embedding.host_rows.planner import unique_rows
from tpu_embedding.host_rows.stack import FetchedRows, HostStack
from tpu_embedding.nn.linen.training import TrainState
from tpu_embedding.nn.linen.variables import layer_tables, with_stacks
from tpu_embedding.nn.model_tables import LayerTables, ModelTables
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import checked_layers
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows

Batch = TypeVar("Batch")
_NO_ROWS: Final = np.zeros(0, np.int32)


def host_rows(
    batches: Iterable[Batch],
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[Batch]:
    """Yields batches whose rows of tables with `te.HostRows` are on the devices.

    Rows are brought into `model` and `optimizer` in place, before each batch is
    yielded. Train on a batch before the next but two is drawn. Batches of evaluation
    also need their rows. A loop over them may run while a loop of training waits.

    Args:
      batches: batches on the host, as the step takes them. They must not depend on the
        model's state: a batch is drawn `HostRows.window + 2` batches early.
      model: owns at least one `TPUEmbedding`. Without a table with `te.HostRows`, the
        batches are yielded as they are.
      optimizer: the optimizer of the model; leave it out if the model has none.
      features_of: returns the features that a batch looks up, prepared for the layer.
        For a model with several layers, a dict of features by the path of the layer.

    Yields:
      The batches.

    Raises:
      ValueError: at the batch, if its rows do not fit in the cache; at the next batch
        or the end, if a step has used rows that were not on their device.

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

    def tables() -> ModelTables:
        return {
            path: LayerTables(layer.tables.get_value(), layer.plan)
            for path, layer in layers.items()
        }

    def bring(fetched: Mapping[Key, FetchedRows] | None) -> None:
        slots = {} if optimizer is None else optimizer.slots.get_value()
        lost_reads = {}
        for path, layer in layers.items():
            stats = layer.stats.get_value()
            lost_reads[path] = stats.missing_rows
            zeros = jax.tree.map(jnp.zeros_like, stats.missing_rows)
            layer.stats.set_value(dataclasses.replace(stats, missing_rows=zeros))
        stacks, slots = _brought(tables(), slots, fetched, lost_reads)
        for path, layer in layers.items():
            layer.tables.set_value(stacks[path])
        if optimizer is not None:
            optimizer.slots.set_value(slots)

    with _feed(batches, tables(), features_of) as feed:
        for batch, fetched in feed:
            bring(fetched)
            yield batch
        bring(None)


def linen_host_rows(
    batches: Iterable[Batch],
    state: TrainState,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[tuple[Batch, Callable[[TrainState], TrainState]]]:
    """Yields batches, and functions that bring their rows into a Linen state.

    `state = bring(state)` comes before the step of the batch, and donates the tables
    and slot variables of the state. See `te.host_rows`.

    Args:
      batches: see `te.host_rows`.
      state: the first state; its plans are read.
      features_of: see `te.host_rows`.

    Yields:
      A batch and its function.

    Example:
      >>> import tpu_embedding as te
      >>> for batch, bring in te.linen.host_rows(
      ...     batches, state, features_of=lambda b: b["ids"]):  # doctest: +SKIP
      ...     state, loss = train_step(bring(state), batch)
    """

    def bring(fetched: Mapping[Key, FetchedRows], state: TrainState) -> TrainState:
        layers = layer_tables(state.variables)
        stacks, slots = _brought(layers, state.slots, fetched)
        return state.replace(
            variables=with_stacks(state.variables, stacks), slots=slots
        )

    with _feed(batches, layer_tables(state.variables), features_of) as feed:
        for batch, fetched in feed:
            yield batch, functools.partial(bring, fetched)


def functional_host_rows(
    batches: Iterable[Batch],
    tables: dict[str, PackedRows],
    plan: EmbeddingPlan,
    *,
    features_of: Callable[[Batch], Any],
) -> Iterator[tuple[Batch, Callable[..., tuple[Any, Any]]]]:
    """Yields batches, and functions that bring their rows into tables and slots.

    `tables, slots = bring(tables, slots)` comes before the step of the batch, and
    donates both. See `te.host_rows`.

    Args:
      batches: see `te.host_rows`.
      tables: stack name to packed rows, from `init_tables`.
      plan: plan of the layer.
      features_of: returns the features that a batch looks up, as `lookup` takes them.

    Yields:
      A batch and its function.

    Example:
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
        stacks, new_slots = _brought(layers, {"": slots}, fetched)
        return stacks[""], new_slots[""]

    with _feed(batches, {"": LayerTables(tables, plan)}, features_of) as feed:
        for batch, fetched in feed:
            yield batch, functools.partial(bring, fetched)


@contextlib.contextmanager
def _feed(
    batches: Iterable[Batch], layers: ModelTables, features_of: Callable[[Batch], Any]
) -> Iterator[Iterable[tuple[Batch, Mapping[Key, FetchedRows]]]]:
    """Opens a feed of the model's rows on the host, and closes it at the end."""
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

    def rows_of(batch: Batch) -> RowsOfStacks:
        features = features_of(batch)
        if len(plans) == 1:
            features = dict.fromkeys(plans, features)
        rows = dict.fromkeys(hosts, _NO_ROWS)
        for path, plan in plans.items():
            names = [name for key, name in hosts if key == path]
            if names and path in features:
                found = rows_of_batch(features[path], plan, names)
                rows |= {(path, x): unique_rows(found[x]) for x in names}
        return rows

    feed = Feed(batches, hosts, rows_of)
    try:
        yield feed
        for host in hosts.values():
            host.check_error(wait=True)
    finally:
        feed.close()


def _brought(
    layers: ModelTables,
    slots: Mapping[str, Any],
    fetched: Mapping[Key, FetchedRows] | None,
    lost_reads: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns tables and slots by layer, with fetched rows; both are donated.

    Args:
      layers: tables of the model.
      slots: slot variables by layer; layers may be missing.
      fetched: exchanges by stack. None only checks the steps so far.
      lost_reads: reads of missing rows in the latest lookup, by layer and stack.
    """
    stacks = {path: dict(tables.stacks) for path, tables in layers.items()}
    new_slots = {path: dict(states) for path, states in slots.items()}
    for path, tables in layers.items():
        for name, rows in tables.stacks.items():
            if not isinstance(rows, MappedRows):
                continue
            lost = ((lost_reads or {}).get(path) or {}).get(name, jnp.int32(0))
            if fetched is None:
                rows.host.check(rows, lost)
                continue
            state = new_slots.get(path, {}).get(name)
            stacks[path][name], state = rows.host.exchange(
                rows, state, fetched[path, name], lost
            )
            if state is not None:
                new_slots[path][name] = state
    return stacks, new_slots
