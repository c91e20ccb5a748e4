"""Counts the ids of dynamic tables that find no place, and that none is mixed up.

    python benchmarks/dynamic_ids.py [--ids N] [--load SHARE ...] [--json FILE]
    python benchmarks/record.py FILE

For each load, a table without eviction has `ids / load` places. Random 64-bit ids, all
different, are inserted in batches. Then all are looked up: each id that was not counted
as without a place must have a row, and no two ids the same one. Ids that were never
inserted must have none. 10^8 ids take 10 GB of memory.
"""

import argparse
import functools
import pathlib
import sys
import time
from typing import Any, Final

import jax
import numpy as np
from list_options import AllValues
from measuring import write_document

import tpu_embedding as te
from tpu_embedding.plan.dynamic_rows import share_without_place

BATCH: Final = 2**21
TABLE: Final = "table"


def different_ids(first: int, count: int) -> np.ndarray:
    """Returns some of the values of a bijection of 64-bit words: SplitMix64."""
    words = np.arange(first, first + count, dtype=np.uint64)
    words = words * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def batches(first: int, count: int) -> Any:
    """Yields the ids of each batch; the last one is shorter."""
    for start in range(0, count, BATCH):
        yield different_ids(first + start, min(BATCH, count - start))


def measure(num_ids: int, load: float) -> dict[str, Any]:
    """Fills a table.

    Raises:
      RuntimeError: if two ids share a row, an id has lost its row, or an unknown id has
        one.
    """
    capacity = round(num_ids / load)
    vocabulary = te.Dynamic(capacity=capacity, evict=None)
    table = te.TableConfig(vocabulary_size=vocabulary, dim=1, name=TABLE)
    plan = te.make_plan(
        {"id": te.FeatureConfig(table=table)}, optimizer=te.optimizers.sgd(0.1)
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    insert = jax.jit(
        functools.partial(te.functional.insert_ids, plan=plan), donate_argnums=(0, 1)
    )
    find = jax.jit(functools.partial(te.functional.find_ids, plan=plan))
    without_place = 0
    start = time.perf_counter()
    for number, ids in enumerate(batches(0, num_ids)):
        result = insert(tables, slots, _padded(ids))
        tables, slots = result.tables, result.slots
        stats = result.stats[TABLE]
        if int(stats.hits) or int(stats.evictions):
            raise RuntimeError(f"Batch {number}: an unknown id was found: {stats}.")
        without_place += int(stats.no_place)
        if number % 8 == 0:
            seconds = time.perf_counter() - start
            done = number * BATCH + len(ids)
            print(f"  {done:,} ids inserted, {seconds:.0f} s", file=sys.stderr)
    is_taken = np.zeros(plan.stacks[0].tables[0].num_rows, bool)
    found = 0
    for ids in batches(0, num_ids):
        rows = np.asarray(find(tables, _padded(ids)).features["id"].ids)[: len(ids)]
        rows = rows[rows < len(is_taken)]
        if is_taken[rows].any() or len(np.unique(rows)) != len(rows):
            raise RuntimeError("Two ids have the same row.")
        is_taken[rows] = True
        found += len(rows)
    if found + without_place != num_ids:
        raise RuntimeError(
            f"All ids but the {without_place:,} without a place must have a row, got "
            f"{found:,} of {num_ids:,}."
        )
    for ids in batches(num_ids, max(1, num_ids // 10)):
        if int(find(tables, _padded(ids)).stats[TABLE].hits):
            raise RuntimeError("An id that was never inserted has a row.")
    return {
        "ids": num_ids,
        "load": load,
        "without_place": without_place / num_ids,
        "expected_without_place": share_without_place(load),
        "seconds": time.perf_counter() - start,
    }


def _padded(ids: np.ndarray) -> dict[str, Any]:
    """Returns a batch of one size; the padding is no id."""
    padded = np.full(BATCH, np.iinfo(np.uint64).max)
    padded[: len(ids)] = ids
    return {"id": te.types.Ids64.of_array(padded)}


def main() -> None:
    """Fills tables; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Fills dynamic tables.")
    parser.add_argument("--ids", type=float, default=1e7, help="ids of each table")
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        action=AllValues,
        default=[0.5, 0.75, 0.9],
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for load in arguments.load:
        row = measure(int(arguments.ids), load)
        results.append(row)
        print(
            f"{row['ids']:,} ids, load {load}: {row['without_place']:.4%} without a "
            f"place, expected {row['expected_without_place']:.4%}; none mixed up"
        )
    write_document(
        arguments.json,
        "dynamic_ids",
        shapes={"ids": int(arguments.ids), "loads": arguments.load, "batch": BATCH},
        results=results,
    )


if __name__ == "__main__":
    main()
