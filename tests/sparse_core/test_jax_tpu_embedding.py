"""The buffers equal those that jax-tpu-embedding makes on the host, in C++ and Python.

Runs where that package is installed, which `scripts/test.sh --all` does in an
environment of its own.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from tests.sparse_core.cases import Case, room_for
from tpu_embedding.sparse_core.partitioned_ids import partition_ids

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
def program(sizes, room):
    return jax.jit(functools.partial(partition_ids, **dict(sizes), room=room))


def ours(case):
    """Returns the four buffers, by core."""
    run = program(tuple(case.sizes().items()), room_for(case))
    ids, largest = run(*case.arguments())
    buffers = ids.pointers, ids.rows, ids.samples, ids.gains
    return [np.asarray(x).reshape(case.cores, -1) for x in buffers], largest


def by_python(case):
    features = case.ids.reshape(case.num_samples, -1).astype(np.int32)
    return input_preprocessing.preprocess_sparse_dense_matmul_input(
        features,
        case.gains.reshape(features.shape).astype(np.float32),
        types.SimpleNamespace(devices=[None] * case.devices),
        max_ids_per_partition=MAX_IDS,
        max_unique_ids_per_partition=MAX_IDS,
        num_sc_per_device=case.cores,
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
    *buffers, _, stats = (
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
        )
    )
    return [buffer["stack"] for buffer in buffers], stats


def check_equal(buffers, theirs, cores):
    """Compares the places that are taken; C++ leaves the others as they are."""
    pointers, *places = buffers
    their_pointers, *their_places = (np.asarray(x).reshape(cores, -1) for x in theirs)
    np.testing.assert_array_equal(pointers, their_pointers)
    for core, end in enumerate(-(-pointers[:, -1] // 8) * 8):
        for mine, other in zip(places, their_places, strict=True):
            np.testing.assert_array_equal(mine[core, :end], other[core, :end])


@pytest.mark.parametrize("cores, devices, valence", SHAPES)
def test_buffers_equal_those_of_the_host(cores, devices, valence):
    for seed in range(BATCHES_OF_A_SHAPE):
        case = draw(seed, cores, devices, valence)
        buffers, largest = ours(case)
        check_equal(buffers, by_python(case), cores)
        theirs, stats = by_cpp(case)
        check_equal(buffers, theirs, cores)
        assert int(largest.ids) == np.max(stats.max_ids_per_partition["stack"])
        assert int(largest.unique) == np.max(
            stats.max_unique_ids_per_partition["stack"]
        )
        needed = np.max(stats.required_buffer_sizes["stack"])
        assert int(largest.positions) <= needed


def test_it_sees_a_difference():
    case = draw(0, 2, 1, 3)
    buffers, _ = ours(case)
    other = dataclasses.replace(case, ids=(case.ids + 1) % 16)
    with pytest.raises(AssertionError):
        check_equal(buffers, by_python(other), 2)
