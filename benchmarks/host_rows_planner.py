"""Times the host's work per id for tables larger than the cache on the devices.

    python benchmarks/host_rows_planner.py [--steps N] [--json FILE]

For each batch of zipf ids, the host deduplicates the ids (`unique_rows`), lets the
batch enter the window (`Planner.enter`), and plans the batch that leaves it
(`Planner.plan`). With 1 thread, these run one after the other. With 2, a second thread
deduplicates the ids of later batches, as a loader does. All times are divided by the
ids of a batch before deduplication, and are taken after the cache is full.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import numpy as np
from measuring import report_results

from tpu_embedding.host_rows.planner import Planner, unique_rows

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
    """

    rows: int
    ids: int
    cache: float
    warm_up: int


WORKS: Final = (
    Work(rows=2_000_000, ids=32_768, cache=0.05, warm_up=40),
    # The rows of three batches need 5.4 %.
    Work(rows=20_000_000, ids=65_536 * 26, cache=0.06, warm_up=10),
)
TINY: Final = (Work(rows=20_000, ids=512, cache=0.2, warm_up=5),)


def zipf_batches(work: Work, count: int) -> list[np.ndarray]:
    """Returns batches of ids; the frequent ones are anywhere in the table."""
    random, power = np.random.default_rng(0), 1 - EXPONENT
    names = random.permutation(work.rows).astype(np.int32)

    def draw() -> np.ndarray:
        ranks = (work.rows**power - 1) * random.random(work.ids) + 1
        ranks **= 1 / power
        return names[np.minimum(ranks.astype(np.int64) - 1, work.rows - 1)]

    return [draw() for _ in range(count)]


def time_batches(
    work: Work, batches: list[np.ndarray], num_shards: int, num_threads: int
) -> dict[str, Any]:
    """Plans all batches, and returns the times of those after the warm-up."""
    slots = int(work.cache * work.rows) // num_shards
    planner = Planner(work.rows, num_shards, slots)
    times: dict[str, list[float]] = collections.defaultdict(list)

    def timed(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        times[name].append(1e9 * (time.perf_counter() - start) / work.ids)
        return result

    def unique_of(batch: np.ndarray) -> np.ndarray:
        return timed("deduplicate", unique_rows, [batch])

    coming: collections.deque[np.ndarray] = collections.deque()
    plans, last = [], time.perf_counter()
    with contextlib.ExitStack() as ends:
        sources = map(unique_of, batches)
        if num_threads > 1:
            threads = ends.enter_context(ThreadPoolExecutor(num_threads - 1))
            sources = _ahead(threads, unique_of, batches)
        for batch, rows in enumerate(sources):
            timed("enter", planner.enter, batch, rows)
            coming.append(rows)
            if len(coming) > WINDOW:
                plans.append(timed("plan", planner.plan, coming.popleft()))
            now = time.perf_counter()
            times["all"].append(1e9 * (now - last) / work.ids)
            last = now
    measured = {name: values[work.warm_up :] for name, values in times.items()}
    medians = {f"{k}_ns": statistics.median(v) for k, v in measured.items()}
    low, _, high = statistics.quantiles(measured["all"], n=4, method="inclusive")
    plans = plans[work.warm_up :]
    return {
        "rows": work.rows,
        "ids": work.ids,
        "cache": work.cache,
        "shards": num_shards,
        "threads": num_threads,
        **medians,
        "all_quartiles_ns": (low, high),
        "million_ids_per_second": 1e3 / medians["all_ns"],
        "unique": statistics.mean(plan.num_rows for plan in plans) / work.ids,
        "fetched": statistics.mean(plan.num_fetched for plan in plans) / work.ids,
    }


def _ahead(
    threads: ThreadPoolExecutor,
    unique_of: Callable[[np.ndarray], np.ndarray],
    batches: list[np.ndarray],
) -> Iterator[np.ndarray]:
    """Yields the unique rows of batches, and starts on two later batches."""
    started = (threads.submit(unique_of, batch) for batch in batches)
    waiting = collections.deque(itertools.islice(started, 2))
    while waiting:
        waiting.extend(itertools.islice(started, 1))
        yield waiting.popleft().result()


def main() -> None:
    """Times each work on 1 and 8 shards, with 1 and 2 threads."""
    parser = argparse.ArgumentParser(description="Times the planner of cached rows.")
    parser.add_argument("--steps", type=int, default=30, help="timed batches")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a test")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for work in TINY if arguments.tiny else WORKS:
        batches = zipf_batches(work, work.warm_up + WINDOW + arguments.steps)
        for num_shards, num_threads in itertools.product((1, 8), (1, 2)):
            results.append(time_batches(work, batches, num_shards, num_threads))
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
