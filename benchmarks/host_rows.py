"""Times a train step on a table with `te.HostRows`, against other places for its rows.

    python benchmarks/host_rows.py [--devices 1 8] [--json FILE]
    python benchmarks/record.py FILE

The same batches of zipf ids train four tables in turns:

* `device`: all rows are on the devices (`te.Sharded`).
* `host_rows`: `te.HostRows`, whose threads read and write rows while steps run.
* `host_rows_in_line`: the same, but each step waits for its rows to be read, and for
  the rows that left to be written.
* `dynamic`: a `te.Dynamic` table of the size of that cache. It forgets rows,
  so its results differ.

A time runs from one step's end to the next, and includes all work on the host. One step
is always in flight, as in a loop that reads the loss of the step before. The first
steps of a turn don't count: threads have read their rows in the turn of another table.
CPU time is of all threads, and shows what other programs on the machine don't change.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import jax
import numpy as np
from embedding_step import train_step
from host_rows_planner import EXPONENT, Work, zipf_batches
from list_options import AllValues
from measuring import report_results, run_fresh

import tpu_embedding as te
from tpu_embedding.host_rows import feed

SIDES: Final = ("device", "host_rows", "host_rows_in_line", "dynamic")
STACK: Final = "stack_0"
TURN: Final = 20
"""Steps of a turn."""
UNCOUNTED: Final = 5
"""First steps of a turn that don't count: more than are read ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of the table and its batches.

    Attributes:
      rows: of the table.
      dim: elements of a row.
      batch: samples.
      valence: ids of a sample.
      cache: fraction of the rows that the devices cache.
      steps: of each table, whole turns.
      warm_up: first steps that don't count, whole turns: the cache fills.
    """

    rows: int = 2_000_000
    dim: int = 32
    batch: int = 4_096
    valence: int = 8
    cache: float = 0.05
    steps: int = 220
    warm_up: int = 40

    @property
    def cache_rows(self) -> int:
        """Rows that the devices cache together."""
        return int(self.cache * self.rows)


TINY: Final = Shapes(
    rows=20_000, batch=64, cache=0.2, steps=2 * TURN, warm_up=TURN, dim=8
)


class Step(NamedTuple):
    """A step's times, and its unique rows that were not cached."""

    milliseconds: float
    cpu_milliseconds: float
    missing: Any


def plan_of(side: str, shapes: Shapes) -> te.EmbeddingPlan:
    """Plans the table with its rows in one of the places."""
    vocabulary: Any = shapes.rows
    placement = te.Sharded()
    if side == "dynamic":
        evict = te.dynamic.LeastRecentlyUsed()
        vocabulary = te.Dynamic(capacity=shapes.cache_rows, evict=evict)
    elif side != "device":
        placement = te.HostRows(cache_rows=shapes.cache_rows)
    table = te.TableConfig(
        vocabulary_size=vocabulary,
        dim=shapes.dim,
        combiner="sum",
        name="table",
        placement=placement,
    )
    features = {"ids": te.FeatureConfig(table=table)}
    return te.make_plan(features, optimizer=te.optimizers.adagrad(0.1))


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def jit_step(
    tables: Any, slots: Any, ids: Any, cotangents: Any, plan: te.EmbeddingPlan
) -> Any:
    """Looks up and updates, and returns the inserts of a dynamic table."""
    num_inserts = 0
    if not plan.stacks[0].tables[0].config.vocabulary.ids_are_rows:
        found = te.functional.insert_ids(tables, slots, ids, plan)
        tables, slots, ids = found.tables, found.slots, found.features
        num_inserts = found.stats["table"].inserts
    tables, slots, activations = train_step(tables, slots, ids, cotangents, plan)
    return tables, slots, activations, num_inserts


def steps_of(side: str, shapes: Shapes, batches: Sequence[np.ndarray]) -> Iterator[Any]:
    """Trains a table, and yields the `Step` after each of its batches."""
    plan = plan_of(side, shapes)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    size = shapes.batch, shapes.dim
    cotangents = np.random.default_rng(1).standard_normal(size, np.float32)
    cotangents = te.inputs.shard_batch({"ids": cotangents}, plan)
    features: Any = ({"ids": batch} for batch in batches)
    if side == "dynamic":
        features = (te.inputs.prepare_features(x, plan) for x in features)
    host, brought = None, ((ids, lambda *state: state) for ids in features)
    if side.startswith("host_rows"):
        host = tables[STACK].host  # type: ignore[attr-defined]
        brought = te.functional.host_rows(
            features, tables, plan, features_of=lambda ids: ids
        )
    # The number of batches whose rows are read at a time: with 1, the next one only.
    fetched = 1 if side == "host_rows_in_line" else feed.BATCHES_FETCHED
    before, num_fetched, start = None, 0, _now()
    while True:
        with mock.patch.object(feed, "BATCHES_FETCHED", fetched):
            batch = next(brought, None)
        if batch is None:
            return
        ids, bring = batch
        tables, slots = bring(tables, slots)
        tables, slots, *results = jit_step(tables, slots, ids, cotangents, plan)
        if host is not None and fetched == 1:
            jax.block_until_ready(results)
            host.wait_for_writer()
            host.check_error()
        jax.block_until_ready(before)
        times = _now() - start
        before, missing = results, results[1]  # An array waits for this step.
        if host is not None:
            missing, num_fetched = host.num_fetched - num_fetched, host.num_fetched
        yield Step(float(times[0]), float(times[1]), missing)
        start = _now()


def _now() -> np.ndarray:
    """Returns the time, and the CPU time of this process, in milliseconds."""
    return 1e3 * np.array([time.perf_counter(), time.process_time()])


def time_in_turns(shapes: Shapes, num_devices: int) -> list[dict[str, Any]]:
    """Returns the results on some devices. Each process calls it once."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    ids = shapes.batch * shapes.valence
    work = Work(rows=shapes.rows, ids=ids, cache=shapes.cache, warm_up=shapes.warm_up)
    batches = [
        batch.reshape(shapes.batch, shapes.valence)
        for batch in zipf_batches(work, shapes.steps)
    ]
    tables = {side: steps_of(side, shapes, batches) for side in SIDES}
    counted: dict[str, list[Step]] = {side: [] for side in SIDES}
    for turn in range(shapes.steps // TURN):
        for side, steps in tables.items():
            done = list(itertools.islice(steps, TURN))
            if turn * TURN >= shapes.warm_up:
                counted[side] += done[UNCOUNTED:]
    unique = statistics.mean(len(np.unique(batch)) for batch in batches)
    return [
        result_of(side, num_devices, steps, unique, shapes)
        for side, steps in counted.items()
    ]


def result_of(
    side: str, num_devices: int, steps: Sequence[Step], unique: float, shapes: Shapes
) -> dict[str, Any]:
    """Returns the result of a table."""
    milliseconds = [step.milliseconds for step in steps]
    low, median, high = statistics.quantiles(milliseconds, n=4, method="inclusive")
    missing = statistics.mean(int(step.missing) for step in steps)
    # A row and its accumulators come, and another row leaves.
    moved_bytes = (
        2 * missing * 2 * 4 * shapes.dim if side.startswith("host_rows") else 0
    )
    return {
        "side": side,
        "devices": num_devices,
        "median_ms": median,
        "quartiles_ms": (low, high),
        "cpu_ms": statistics.median(step.cpu_milliseconds for step in steps),
        "missing_rows": missing,
        "unique_rows": unique,
        "hit_rate": 1 - missing / (shapes.batch * shapes.valence),
        "unique_hit_rate": 1 - missing / unique,
        "moved_bytes": moved_bytes,
    }


def main() -> None:
    """Times all tables on each number of devices, in a process of its own."""
    parser = argparse.ArgumentParser(description="Times steps with rows on the host.")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a test")
    for field in dataclasses.fields(Shapes):
        text = f"default {field.default}"
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=field.type, help=text
        )
    parser.add_argument(
        "--devices", nargs="+", action=AllValues, type=int, default=[1, 8]
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    given = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Shapes)
    }
    shapes = dataclasses.replace(
        TINY if arguments.tiny else Shapes(),
        **{name: value for name, value in given.items() if value is not None},
    )
    results = []
    for num_devices in arguments.devices:
        found = run_fresh(time_in_turns, shapes, num_devices)
        for row in found:
            row["ratio"] = row["median_ms"] / found[0]["median_ms"]
            row["cpu_ratio"] = row["cpu_ms"] / found[0]["cpu_ms"]
        results += found
    report_results(
        arguments.json,
        "host_rows",
        shapes={"zipf": EXPONENT, **dataclasses.asdict(shapes)},
        results=results,
    )


if __name__ == "__main__":
    main()
