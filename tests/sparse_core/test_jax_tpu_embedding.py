"""The buffers equal those that jax-tpu-embedding makes on the host, in C++ and Python.

Runs where that package is installed, which `scripts/test.sh --all` does in an
environment of its own.
"""

import functools
import itertools
import types

import jax
import numpy as np
import pytest

from tests.sparse_core.cases import (
    Case,
    limits_for,
    minibatches_of,
    on_devices,
    partition,
)

pytest.importorskip("jax_tpu_embedding", reason="jax-tpu-embedding is not installed")

from jax_tpu_embedding.sparsecore.lib.core import (  # noqa: E402
    input_preprocessing,
    pybind_input_preprocessing,
)
from jax_tpu_embedding.sparsecore.lib.nn import embedding_spec  # noqa: E402

BATCHES_OF_A_SHAPE = 50
MAX_IDS = 64

SHAPES = [(2, 1, 1), (2, 1, 3), (4, 1, 3), (2, 4, 3), (4, 2, 1), (4, 8, 5)]


def draw(seed, cores, devices, valence):
    """Draws a batch: samples in order, each with `valence` ids."""
    random = np.random.default_rng(seed)
    num_samples, rows_per_partition = 16 * cores, 8
    # Few rows, so that samples and batches have equal ids.
    high = int(random.integers(1, rows_per_partition * cores * devices + 1))
    ids = random.integers(0, high, num_samples * valence)
    weights = random.integers(1, 5, ids.size) / 4.0  # Sums of them are exact.
    return Case(
        ids=ids,
        samples=np.repeat(np.arange(num_samples), valence),
        gains=weights,
        num_samples=num_samples,
        cores=cores,
        devices=devices,
        rows_per_partition=rows_per_partition,
    )


@functools.cache
def program(sizes, limits):
    def partition_of_shard(*arguments):
        ids, fits = partition(*arguments, **dict(sizes), limits=limits)
        return *jax.tree.leaves(ids), fits

    return on_devices(partition_of_shard, 1, 4, 6)


def ours(case, limits):
    """Returns the four buffers, and the number of minibatches."""
    run = program(tuple(case.sizes().items()), limits)
    results = run(*(x[None] for x in case.arguments()))
    *buffers, (count,), fits = (np.asarray(x[0]) for x in results)
    assert fits
    return buffers, count


def by_python(case, ends):
    """Returns the buffers of minibatches that end at these rows."""
    ids = case.ids.reshape(case.num_samples, -1)
    gains = case.gains.reshape(ids.shape)
    rows = ids // case.num_partitions
    features, weights = [], []
    for begin, end in itertools.pairwise([0, *ends]):
        is_taken = (begin <= rows) & (rows < end)
        for batches, values in ((features, ids), (weights, gains)):
            pairs = zip(values, is_taken, strict=True)
            batches.append([list(x[taken]) for x, taken in pairs])
    return input_preprocessing.preprocess_sparse_dense_matmul_input(
        features,
        weights,
        types.SimpleNamespace(devices=np.full(case.devices, None)),
        max_ids_per_partition=MAX_IDS,
        max_unique_ids_per_partition=MAX_IDS,
        num_sc_per_device=case.cores,
        enable_minibatching=True,
    )


def by_cpp(case):
    features = case.ids.reshape(case.num_samples, -1).astype(np.int32)
    num_rows = case.rows_per_partition * case.num_partitions
    options = dict(
        optimizer=embedding_spec.SGDOptimizerSpec(learning_rate=0.1),
        combiner="sum",
        max_ids_per_partition=MAX_IDS,
        max_unique_ids_per_partition=MAX_IDS,
    )
    table = embedding_spec.TableSpec(
        vocabulary_size=num_rows,
        embedding_dim=8,
        initializer=None,
        name="table",
        _setting_in_stack=embedding_spec.TableSettingInStack(
            stack_name="stack",
            padded_vocab_size=num_rows,
            padded_embedding_dim=8,
            row_offset_in_shard=0,
            shard_rotation=0,
        ),
        _stacked_table_spec=embedding_spec.StackedTableSpec(
            stack_name="stack",
            stack_vocab_size=num_rows,
            stack_embedding_dim=8,
            total_sample_count=case.num_samples,
            **options,
        ),
        **options,
    )
    feature = embedding_spec.FeatureSpec(
        table_spec=table,
        input_shape=features.shape,
        output_shape=(case.num_samples, 8),
        name="feature",
        _id_transformation=embedding_spec.FeatureIdTransformation(
            row_offset=0, col_offset=0, col_shift=0
        ),
    )
    *buffers, num_minibatches, _ = (
        pybind_input_preprocessing.preprocess_sparse_dense_matmul_input(
            [features],
            [case.gains.reshape(features.shape).astype(np.float32)],
            [feature],
            1,
            case.devices,
            num_sc_per_device=case.cores,
            sharding_strategy=pybind_input_preprocessing.ShardingStrategy.MOD,
            has_leading_dimension=False,
            allow_id_dropping=False,
            batch_number=0,
            enable_minibatching=True,
        )
    )
    assert num_minibatches == 1
    return [buffer["stack"] for buffer in buffers]


def check_equal(buffers, theirs, count, case):
    """Compares what is used; C++ leaves the rest as it is."""
    (pointers, *positions), (their_pointers, *others) = buffers, theirs
    num_pointers = case.cores * count * max(8, case.num_partitions)
    their_pointers = np.asarray(their_pointers).reshape(-1)[:num_pointers]
    np.testing.assert_array_equal(pointers[:num_pointers], their_pointers)
    end = -(-pointers[num_pointers - 1] // 8) * 8
    for mine, other in zip(positions, others, strict=True):
        other = np.asarray(other).reshape(-1)
        np.testing.assert_array_equal(mine[:end], other[:end])


@pytest.mark.parametrize("cores, devices, valence", SHAPES)
def test_buffers_equal_those_of_the_host(cores, devices, valence):
    for seed in range(BATCHES_OF_A_SHAPE):
        case = draw(seed, cores, devices, valence)
        one = limits_for(case, MAX_IDS, MAX_IDS)
        buffers, count = ours(case, one)
        assert count == 1
        check_equal(buffers, by_cpp(case), 1, case)
        check_equal(buffers, by_python(case, [case.rows_per_partition]), 1, case)
        several = limits_for(case, MAX_IDS, 2)
        buffers, count = ours(case, several)
        ends = minibatches_of([case], several)
        assert count == len(ends)
        check_equal(buffers, by_python(case, ends), count, case)
