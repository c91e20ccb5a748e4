"""The parts of processes, prepared apart, are the parts of the prepared batch."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding import distributed

BATCH = 16
TABLE = te.TableConfig(vocabulary_size=50, dim=4, name="table")
PLAN = te.make_plan(
    {name: te.FeatureConfig(table=TABLE) for name in ("one", "bags", "sparse")},
    mesh_of(8),
)


def loader_plan(num_parts):
    return dataclasses.replace(PLAN.for_loaders(), num_process_parts=num_parts)


def features_of(seed, skew=1):
    """Returns a batch whose last samples have `skew` times as many ids."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 4, BATCH)
    lengths[-4:] *= skew
    bags = [generator.integers(0, 50, length).tolist() for length in lengths]
    places = np.argwhere(generator.random((BATCH, 3)) < 0.4)
    return {
        "one": generator.integers(0, 50, BATCH),
        "bags": te.RaggedIds.from_lists(bags, bags),
        "sparse": te.SparseIds(
            indices=places,
            values=generator.integers(0, 50, len(places)),
            dense_shape=np.array([BATCH, 3]),
        ),
    }


def part_of(features, samples):
    """Returns the given samples of `features_of`."""
    kept = slice(samples.start, samples.stop)
    bags, sparse = features["bags"], features["sparse"]
    splits = bags.row_splits[samples.start : samples.stop + 1]
    in_bags = slice(splits[0], splits[-1])
    is_kept = np.isin(sparse.indices[:, 0], samples)
    return {
        "one": features["one"][kept],
        "bags": te.RaggedIds(
            values=bags.values[in_bags],
            row_splits=splits - splits[0],
            weights=bags.weights[in_bags],
        ),
        "sparse": te.SparseIds(
            indices=sparse.indices[is_kept] - [samples.start, 0],
            values=sparse.values[is_kept],
            dense_shape=np.array([len(samples), 3]),
        ),
    }


def prepare_parts(monkeypatch, num_parts, batches, with_sizes):
    """Returns the prepared batches of each process, which a thread plays."""
    size, numbers = BATCH // num_parts, threading.local()
    values, barrier = [None] * num_parts, threading.Barrier(num_parts, timeout=60)

    def exchange(name, value):
        values[numbers.own] = value
        barrier.wait()
        exchanged = list(values)
        barrier.wait()
        return exchanged

    def run(process):
        numbers.own = process
        sizes = te.inputs.BufferSizes() if with_sizes else None
        own = range(process * size, (process + 1) * size)
        return [
            te.inputs.prepare_features(
                part_of(features, own),
                loader_plan(num_parts),
                sizes=sizes,
                samples="process",
            )
            for features in batches
        ]

    monkeypatch.setattr(distributed, "exchange", exchange)
    monkeypatch.setattr(distributed, "num_processes", lambda: num_parts)
    with ThreadPoolExecutor(num_parts) as threads:
        return list(threads.map(run, range(num_parts)))


@pytest.mark.parametrize(
    ("num_parts", "with_sizes"), [(2, True), (4, True), (2, False)]
)
def test_parts_join_to_the_prepared_batch(num_parts, with_sizes, monkeypatch):
    # The last process alone outgrows its buffer.
    batches = [features_of(seed, skew) for seed, skew in enumerate([1, 1, 9, 1, 30])]
    parts = prepare_parts(monkeypatch, num_parts, batches, with_sizes)
    sizes = te.inputs.BufferSizes() if with_sizes else None
    for step, features in enumerate(batches):
        whole = te.inputs.prepare_features(features, PLAN, sizes=sizes)
        found = [part[step] for part in parts]
        assert len({jax.tree.structure(part) for part in found}) == 1
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *found)
        assert jax.tree.structure(joined) == jax.tree.structure(whole)
        jax.tree.map(np.testing.assert_array_equal, joined, whole)


def test_different_features_raise_on_all(monkeypatch):
    def without_bags(name, demands):
        return [demands, [each for each in demands if each.feature_name != "bags"]]

    monkeypatch.setattr(distributed, "exchange", without_bags)
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    features = part_of(features_of(0), range(8))
    with rejects():
        te.inputs.prepare_features(features, loader_plan(2), samples="process")


@pytest.mark.parametrize(("size", "num_parts"), [(8, None), (6, 2)])
def test_wrong_parts(size, num_parts):
    with rejects():
        features = {"one": np.arange(size)}
        te.inputs.prepare_features(features, loader_plan(num_parts), samples="process")
