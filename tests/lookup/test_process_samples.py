"""The parts of processes, prepared apart, are the parts of the prepared batch."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.distributed.job import Job
from tpu_embedding.inputs import agreed_sizes
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.batch_part import slice_batch

BATCH = 16
TABLE = te.TableConfig(vocabulary_size=50, dim=4, name="table")
PLAN = te.make_plan(
    {name: te.FeatureConfig(table=TABLE) for name in ("one", "many", "bags", "sparse")},
    mesh_of(8),
)


def loader_plan(num_parts, plan=PLAN):
    return dataclasses.replace(plan.for_loaders(), num_process_parts=num_parts)


def features_of(seed, skew=1):
    """Returns a batch whose last samples have `skew` times as many ids."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 4, BATCH)
    lengths[-4:] *= skew
    bags = [generator.integers(0, 50, length).tolist() for length in lengths]
    places = np.argwhere(generator.random((BATCH, 3)) < 0.4)
    return {
        "one": generator.integers(0, 50, BATCH),
        "many": te.DenseIds(
            ids=generator.integers(0, 50, (BATCH, 2)),
            weights=generator.random((BATCH, 2)),
        ),
        "bags": te.RaggedIds.from_lists(bags, bags),
        "sparse": te.SparseIds(
            indices=places,
            values=generator.integers(0, 50, len(places)),
            dense_shape=np.array([BATCH, 3]),
        ),
    }


def part_of(features, samples):
    zeros = np.zeros(BATCH)
    batch = Batch(features=features, labels=zeros, weights=zeros)
    return slice_batch(batch, samples).features


@pytest.fixture
def job_of_thread(monkeypatch):
    """Lets each thread play a process: its job is the one that it sets."""
    local = threading.local()
    monkeypatch.setattr(
        agreed_sizes, "current_job", lambda: getattr(local, "job", make_jobs(1)[0])
    )
    monkeypatch.setattr(agreed_sizes, "_name_of", lambda sizes: "sizes")
    return local


def prepare_parts(job_of_thread, num_parts, batches, with_sizes, plan=PLAN):
    """Returns the prepared batches of each process."""
    size = BATCH // num_parts

    def run(job: Job):
        job_of_thread.job = job
        sizes = te.inputs.BufferSizes() if with_sizes else None
        own = range(job.process_index * size, (job.process_index + 1) * size)
        return [
            te.inputs.prepare_features(
                part_of(features, own),
                loader_plan(num_parts, plan),
                sizes=sizes,
                samples="process",
            )
            for features in batches
        ]

    return on_each(make_jobs(num_parts), run)


@pytest.mark.parametrize(
    ("num_parts", "with_sizes"), [(2, True), (4, True), (2, False)]
)
def test_parts_join_to_the_prepared_batch(num_parts, with_sizes, job_of_thread):
    # The last process alone outgrows its buffer.
    batches = [features_of(seed, skew) for seed, skew in enumerate([1, 1, 9, 1, 30])]
    parts = prepare_parts(job_of_thread, num_parts, batches, with_sizes)
    sizes = te.inputs.BufferSizes() if with_sizes else None
    for step, features in enumerate(batches):
        whole = te.inputs.prepare_features(features, PLAN, sizes=sizes)
        found = [part[step] for part in parts]
        assert len({jax.tree.structure(part) for part in found}) == 1
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *found)
        assert jax.tree.structure(joined) == jax.tree.structure(whole)
        jax.tree.map(np.testing.assert_array_equal, joined, whole)


def test_different_features_raise_on_all(job_of_thread):
    def run(job: Job):
        job_of_thread.job = job
        features = part_of(features_of(0), range(8))
        if job.process_index == 1:
            del features["bags"]
        te.inputs.prepare_features(features, loader_plan(2), samples="process")

    for error in on_each(make_jobs(2), run):
        assert isinstance(error, ValueError)
        assert "must have the same ragged features" in str(error)
        assert "{'bags': 2, 'sparse': 2} on process 0" in str(error) or (
            "{'bags': 2} on process 0" in str(error)
        )


WRONG = {
    "mesh": (
        {"one": np.arange(8)},
        loader_plan(None),
        "devices of each process are consecutive",
    ),
    "uneven": ({"one": np.arange(6)}, loader_plan(2), "multiple of 4 samples"),
}


@pytest.mark.parametrize(
    ("features", "plan", "message"), WRONG.values(), ids=WRONG.keys()
)
def test_wrong_parts(features, plan, message):
    with pytest.raises(ValueError, match=message):
        te.inputs.prepare_features(features, plan, samples="process")
