"""Initializers: distributions, and wrong parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.initializers import row_initializer

KEY = jax.random.key(3)
SHAPE = (5000, 64)

# Mean and deviation. A normal cut at two deviations keeps 0.8796 of its deviation.
MOMENTS = {
    "uniform": (te.initializers.uniform(-0.1, 0.5), 0.2, 0.6 / math.sqrt(12)),
    "normal": (te.initializers.normal(0.5, 0.1), 0.1, 0.5),
    "truncated": (te.initializers.truncated_normal(0.5, 0.1), 0.1, 0.5 * 0.8796),
    "rowwise": (te.initializers.rowwise(jax.nn.initializers.normal(0.5)), 0, 0.5),
}


@pytest.mark.parametrize("case", MOMENTS)
def test_mean_and_deviation(case):
    initializer, mean, stddev = MOMENTS[case]
    values = np.asarray(jax.jit(lambda: initializer(KEY, SHAPE, jnp.float32))())
    # 320,000 samples know their mean to 0.2 % of the deviation; five times that.
    assert values.mean() == pytest.approx(mean, abs=0.01 * stddev)
    assert values.std() == pytest.approx(stddev, rel=0.01)
    # Rows and columns are independent: so are their means.
    assert values.mean(axis=1).std() == pytest.approx(stddev / 8, rel=0.1)
    columns = values.mean(axis=0).std()
    assert columns == pytest.approx(stddev / math.sqrt(5000), rel=0.5)


@pytest.mark.parametrize("case", ["normal", "truncated"])
def test_quantiles_of_the_normal_distribution(case):
    values = np.sort(np.ravel(MOMENTS[case][0](KEY, SHAPE, jnp.float32)))
    below = np.asarray(jax.scipy.stats.norm.cdf(values, 0.1, 0.5))
    if case == "truncated":
        below = (below - 0.022750132) / 0.954499736
    uniform = (np.arange(values.size) + 0.5) / values.size
    # Kolmogorov and Smirnov: 320,000 samples exceed 0.0035 in one of 1,000 draws.
    assert np.abs(below - uniform).max() < 0.0035


def test_constant_and_functions_of_jax_that_are_constants():
    assert (te.initializers.constant(0.5)(KEY, (3, 2), jnp.float32) == 0.5).all()
    zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones
    assert row_initializer(zeros, 4) == te.initializers.constant(0)
    assert row_initializer(ones, 4) == te.initializers.constant(1)
    assert row_initializer(jax.nn.initializers.normal(), 4) is None


def test_rowwise_gives_each_row_its_own_key():
    integers = te.initializers.rowwise(
        lambda key, shape, dtype: jax.random.bits(key, shape).astype(dtype)
    )
    values = np.asarray(integers(KEY, (50, 4), jnp.float32))
    assert np.unique(values).size == 200


def test_a_row_initializer_of_the_wrong_shape_names_its_tables():
    def rows_of_one(key, row_ids, dim):
        return jnp.zeros((row_ids.shape[0], 1), jnp.float32)

    bad = te.initializers.RowInitializer(rows_of_one)
    table = te.TableConfig(vocabulary_size=6, dim=4, name="bad", initializer=bad)
    plan = te.make_plan(te.FeatureConfig(table=table))
    with rejects(fix="TableConfig.initializer"):
        te.functional.init_tables(plan, KEY)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: te.initializers.normal(-1.0), "stddev"),
        (lambda: te.initializers.truncated_normal(math.nan), "stddev"),
        (lambda: te.initializers.uniform(1.0, 0.0), "low"),
        (lambda: te.initializers.constant("0"), "value"),
        (lambda: te.initializers.rowwise(0.5), "initializer"),
        (lambda: te.initializers.rowwise(lambda shape, dtype: 0), "initializer"),
        (lambda: te.initializers.RowInitializer(5), "function"),
        (lambda: te.initializers.RowInitializer(print, (math.inf,)), "parameters"),
        (lambda: te.initializers.RowInitializer(print, (2**31,)), "parameters"),
        (lambda: te.initializers.RowIdInitializer(0.5), "offset"),
        (lambda: te.initializers.RowIdInitializer(2**31), "offset"),
    ],
)
def test_wrong_parameters_are_rejected(make, field):
    with rejects((TypeError, ValueError), fix=field):
        make()
