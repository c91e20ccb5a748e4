"""Random rows and ids: exact sums, and collisions on lines."""

from typing import get_args

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.reference import dense_gradients, dense_lookup
from tpu_embedding.tools.doctor.dense_reference import gradient_by_row, pooled_rows
from tpu_embedding.tools.doctor.row_cases import DIMS, IdForm, RowCase
from tpu_embedding.tools.doctor.row_inputs import (
    random_cotangents,
    random_ids,
    random_rows,
)
from tpu_embedding.tools.doctor.row_programs import size_of

FORMS = get_args(IdForm)


def generator():
    return np.random.default_rng(0)


@pytest.mark.parametrize("ids", FORMS)
@pytest.mark.parametrize("dim", [1, 100, *DIMS])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_sizes_suit_kernels(ids, dim, num_devices):
    case = RowCase(name="", dim=dim, scope="rows", ids=ids)
    size = size_of(case, on_tpu=False, num_devices=num_devices)
    multiple = num_devices * 8 * max(1, 128 // dim)
    assert size.num_samples > 0 and size.num_samples % multiple == 0
    num_ids = size.num_samples * (1 if ids == "one id" else 4)
    assert size.table_sizes["sum"] > 4 * num_ids
    # The second table does not start at a line.
    assert size.table_sizes["sum"] % 8


@pytest.mark.parametrize("form", FORMS)
def test_ids_collide(form):
    _, weighted = random_ids(generator(), form, 256, 1000)
    ids, counts = np.unique(weighted.ids, return_counts=True)
    assert {0, 999} <= set(ids)
    assert counts.max() >= len(weighted.ids) // 16
    neighbours = np.flatnonzero(np.diff(ids) == 1)
    assert len(neighbours) > len(ids) // 8
    # Neighbours come far apart in the batch, so different subcores read them.
    places = {int(row): int(np.argmax(weighted.ids == row)) for row in ids}
    apart = [abs(places[ids[i]] - places[ids[i + 1]]) for i in neighbours]
    assert np.median(apart) > len(weighted.ids) // 16


def test_ragged_samples_may_be_empty():
    _, weighted = random_ids(generator(), "ragged", 256, 1000)
    assert len(np.unique(weighted.samples)) < 256


def test_numbers_are_long_for_bfloat16_and_short_for_float32():
    rows = random_rows(generator(), 100, 8)
    cotangents = random_cotangents(generator(), (100, 8))
    for values, bits in ((rows, 15), (cotangents, 12)):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values * 2**bits % 1, 0)
        rounded = np.asarray(jax.lax.reduce_precision(values, 8, 7))
        assert np.mean(rounded != values) > 0.5
        assert abs(values).max() <= 1


@pytest.mark.parametrize("form", FORMS)
def test_reference_equals_the_reference_of_the_tests(form):
    """Two dense references, written apart, agree."""
    tables = {
        name: te.TableConfig(vocabulary_size=50, dim=4, combiner=name, name=name)
        for name in ("sum", "mean")
    }
    features = {name: te.FeatureConfig(table=t) for name, t in tables.items()}
    optimizer = te.optimizers.sgd(0.5)
    plan = te.make_plan(features, mesh_of(1), optimizer=optimizer)
    values, batch, weighted, cotangents = {}, {}, {}, {}
    for seed, name in enumerate(tables):
        random = np.random.default_rng(seed)
        batch[name], weighted[name] = random_ids(random, form, 16, 50)
        values[name] = random_rows(random, 50, 4)
        cotangents[name] = random_cotangents(random, (16, 4))
    weighted["mean"] = weighted["mean"].normalised()
    expected = dense_lookup(values, batch, plan)
    gradients, touched = dense_gradients(values, batch, cotangents, plan)
    for name in tables:
        # Both add float64 numbers, in another order.
        np.testing.assert_allclose(
            pooled_rows(values[name], weighted[name]),
            expected[name],
            rtol=0,
            atol=1e-12,
        )
        row_ids, gradient = gradient_by_row(cotangents[name], weighted[name])
        np.testing.assert_array_equal(row_ids, np.flatnonzero(touched[name]))
        np.testing.assert_allclose(
            gradient, gradients[name][row_ids], rtol=0, atol=1e-12
        )
