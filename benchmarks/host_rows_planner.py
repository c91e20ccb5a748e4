"""Times the host's work per batch for tables larger than the cache on the devices.

    python benchmarks/host_rows_planner.py [--steps N] [--json FILE]

For each batch of zipf ids, the host finds the rows of each shard (`rows_of_batch`),
lets the batch enter the window (`Planner.enter`), and plans the batch that leaves it
(`Planner.plan`), as a loop over `te.host_rows` does. Features and shards are divided
among the cores; the rows of the next batch are found while a batch is planned. Each
number of cores gets a process of its own. All times are taken after the cache is full.

`modelled_16_ms` is a model for a host of 16 cores, from the times of one core: features
are divided among all cores, and shards among as many as there are shards.
"""

import argparse
import collections
import dataclasses
import itertools
import os
import pathlib
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from measuring import report_results, run_fresh

import tpu_embedding as te
from tpu_embedding.host_rows.batch_rows import rows_of_batch
from tpu_embedding.host_rows.planner import Planner
from tpu_embedding.host_rows.store import in_threads

EXPONENT: Final = 1.05
WINDOW: Final = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Shapes of a stack and of its batches.

    Attributes:
      rows: of the stack.
      ids: of a batch.
      cache: fraction of the rows that the devices cache.
      warm_up: batches until the cache is full, at least.
      features: of a batch, each with a table of its own and as many ids.
    """

    rows: int
    ids: int
    cache: float
    warm_up: int
    features: int = 1


WORKS: Final = (
    Work(rows=2_000_000, ids=32_768, cache=0.05, warm_up=40),
    # The rows of three batches need 7.2 %.
    Work(rows=20_000_000, ids=65_536 * 26, cache=0.1, warm_up=10, features=26),
)
TINY: Final = (Work(rows=20_000, ids=512, cache=0.2, warm_up=5, features=2),)


def zipf_batches(work: Work, count: int) -> list[np.ndarray]:
    """Returns batches of ids of a table; the frequent ones are anywhere in it."""
    random, power = np.random.default_rng(0), 1 - EXPONENT
    num_rows, num_ids = work.rows // work.features, work.ids // work.features
    names = random.permutation(num_rows).astype(np.int32)

    def draw() -> np.ndarray:
        ranks = (num_rows**power - 1) * random.random(num_ids) + 1
        ranks **= 1 / power
        return names[np.minimum(ranks.astype(np.int64) - 1, num_rows - 1)]

    return [draw() for _ in range(count)]


def time_batches(
    work: Work, steps: int, num_shards: int, num_cores: int
) -> dict[str, Any]:
    """Plans all batches, and returns the times of those after the warm-up, in ms.

    Each process calls it once.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_cores])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_shards)
    tables = [
        te.TableConfig(
            vocabulary_size=work.rows // work.features,
            dim=16,
            name=f"table_{i}",
            placement=te.HostRows(cache_rows=work.rows),
        )
        for i in range(work.features)
    ]
    plan = te.make_plan({x.name: te.FeatureConfig(table=x) for x in tables})
    (stack,) = plan.stacks
    num_slots = int(work.cache * work.rows) // num_shards
    planners = [Planner(stack.rows_per_shard, num_slots) for _ in range(num_shards)]
    count = work.warm_up + WINDOW + steps
    ids = zipf_batches(work, count + work.features)
    batches = [
        {f"table_{i}": ids[batch + i] for i in range(work.features)}
        for batch in range(count)
    ]
    times: dict[str, list[float]] = collections.defaultdict(list)

    def find(batch: Any) -> list[np.ndarray]:
        start = time.perf_counter()
        rows = rows_of_batch(batch, plan, [stack.name])[stack.name]
        times["find"].append(1e3 * (time.perf_counter() - start))
        return rows

    coming: collections.deque[list[np.ndarray]] = collections.deque()
    num_rows = num_fetched = 0
    with ThreadPoolExecutor(1) as finder:
        found = (finder.submit(find, batch) for batch in batches)
        ahead = collections.deque(itertools.islice(found, 2))
        last = time.perf_counter()
        for number in range(count):
            rows = ahead.popleft().result()
            # With one core, nothing overlaps, and each time is of one stage.
            if num_cores > 1:
                ahead.extend(itertools.islice(found, 1))
            start = time.perf_counter()
            list(in_threads(Planner.enter, planners, [number] * num_shards, rows))
            coming.append(rows)
            if len(coming) > WINDOW:
                plans = list(in_threads(Planner.plan, planners, coming.popleft()))
                if number >= work.warm_up + WINDOW:
                    num_rows += sum(plan.num_rows for plan in plans)
                    num_fetched += sum(len(plan.fetched) for plan in plans)
            times["plan"].append(1e3 * (time.perf_counter() - start))
            if num_cores == 1:
                ahead.extend(itertools.islice(found, 1))
                for future in ahead:
                    future.exception()
            now = time.perf_counter()
            times["all"].append(1e3 * (now - last))
            last = now
    counted = {name: values[work.warm_up + WINDOW :] for name, values in times.items()}
    medians = {f"{k}_ms": statistics.median(v) for k, v in counted.items()}
    low, _, high = statistics.quantiles(counted["all"], n=4, method="inclusive")
    model = {}
    if num_cores == 1:
        find_ms, plan_ms = medians["find_ms"], medians["plan_ms"]
        modelled = find_ms / min(16, work.features) + plan_ms / min(16, num_shards)
        model = {"modelled_16_ms": modelled}
    return {
        **dataclasses.asdict(work),
        "shards": num_shards,
        "cores": num_cores,
        **medians,
        "all_quartiles_ms": (low, high),
        "ns_per_id": 1e6 * medians["all_ms"] / work.ids,
        **model,
        "unique": num_rows / work.ids / steps,
        "fetched": num_fetched / work.ids / steps,
    }


def main() -> None:
    """Times each work on 1 and 8 shards, with 1 and 2 cores."""
    parser = argparse.ArgumentParser(description="Times the planner of cached rows.")
    parser.add_argument("--steps", type=int, default=30, help="timed batches")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a test")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for work in TINY if arguments.tiny else WORKS:
        for num_shards, num_cores in itertools.product((1, 8), (1, 2)):
            results.append(
                run_fresh(time_batches, work, arguments.steps, num_shards, num_cores)
            )
    report_results(
        arguments.json,
        "host_rows_planner",
        shapes={"zipf": EXPONENT, "window": WINDOW, "steps": arguments.steps},
        results=results,
        versions={
            "jax": jax.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    )


if __name__ == "__main__":
    main()
