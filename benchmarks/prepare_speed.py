"""Times `prepare` on the host, in ids per second, for each form of input.

    python benchmarks/prepare_speed.py [--seconds S] [--json FILE]
    python benchmarks/record.py FILE

26 features of a million rows, 4,096 samples, 4 ids each on average. Strings are hashed
to ids first, as `prepare` takes only ids.
"""

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from embedding_step import make_plan
from measuring import write_document

import tpu_embedding as te

NUM_TABLES, NUM_ROWS, DIM = 26, 1_000_000, 16
BATCH_SIZE, VALENCE = 4096, 4
NUM_IDS: Final = NUM_TABLES * BATCH_SIZE * VALENCE


def make_forms(plan: te.EmbeddingPlan) -> dict[str, Callable[[], Any]]:
    """Returns, by name, a function that prepares a batch of each form."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, NUM_ROWS, (NUM_TABLES, BATCH_SIZE, VALENCE))
    lengths = generator.integers(0, 2 * VALENCE + 1, (NUM_TABLES, BATCH_SIZE))
    # As many ids as in the dense forms, on average.
    splits = [np.concatenate([[0], np.cumsum(of_table)]) for of_table in lengths]
    values = [generator.integers(0, NUM_ROWS, each[-1]) for each in splits]
    sizes = te.inputs.BufferSizes()

    def prepare(leaves: Any) -> Any:
        names = (feature.name for feature in plan.features)
        batch = dict(zip(names, leaves, strict=True))
        return te.inputs.prepare_features(batch, plan, sizes=sizes)

    narrow = list(ids.astype(np.int32))
    wide = list(ids.astype(np.int64))
    ragged = [
        te.RaggedIds(values=v, row_splits=s)
        for v, s in zip(values, splits, strict=True)
    ]
    sparse = [_to_sparse(v, s) for v, s in zip(values, splits, strict=True)]
    lists = [each.tolist() for each in ids]
    strings = [each.astype(str) for each in ids]
    return {
        "dense int32": lambda: prepare(narrow),
        "dense int64": lambda: prepare(wide),
        "ragged": lambda: prepare(ragged),
        "sparse": lambda: prepare(sparse),
        "lists": lambda: prepare(lists),
        "strings": lambda: prepare([te.inputs.hash_ids(s, NUM_ROWS) for s in strings]),
    }


def _to_sparse(values: np.ndarray, splits: np.ndarray) -> te.SparseIds:
    samples = np.repeat(np.arange(BATCH_SIZE), np.diff(splits))
    places = np.arange(len(values)) - splits[samples]
    return te.SparseIds(
        indices=np.stack([samples, places], axis=1),
        values=values,
        dense_shape=np.array([BATCH_SIZE, 2 * VALENCE]),
    )


def main() -> None:
    """Measures all forms in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times the preparation of batches.")
    parser.add_argument("--seconds", type=float, default=2.0, help="per form, about")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    plan = make_plan(
        None, num_tables=NUM_TABLES, vocabulary_size=NUM_ROWS, dim=DIM, optimizer=None
    )
    forms = make_forms(plan)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for prepare in forms.values():
        prepare()
    due = list(forms)
    while due:
        for name in due:
            start = time.perf_counter()
            forms[name]()
            seconds[name].append(time.perf_counter() - start)
        due = [name for name in due if sum(seconds[name]) < arguments.seconds]
    results = []
    for name, found in seconds.items():
        median = statistics.median(found)
        rate = NUM_IDS / median
        results.append(
            {"form": name, "median_ms": 1e3 * median, "ids_per_second": rate}
        )
        print(f"{name:12} {1e3 * median:8.2f} ms {rate / 1e6:8.1f} million ids/s")
    write_document(
        arguments.json,
        "prepare_speed",
        shapes={"tables": NUM_TABLES, "batch": BATCH_SIZE, "valence": VALENCE},
        results=results,
    )


if __name__ == "__main__":
    main()
