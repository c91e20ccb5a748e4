"""Optax transformations that reduce over rows: totals, or refused."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import matrix, quick_cases, with_ids

ROWS, DIM = 30, 4
SUMMING = {
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "finite_norm": optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 3
    ),
    "trust_ratio_of_every_row": te.optimizers.every_row(optax.lamb(0.01)),
    "norm_of_every_row": te.optimizers.every_row(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    ),
}


def start():
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def batches(has_nan):
    generator = np.random.default_rng(1)
    for step in range(4):
        ids = generator.integers(0, ROWS, 16).astype(np.int32)
        gradient = generator.normal(size=(16, DIM)).astype(np.float32)
        if has_nan and step == 1:
            gradient[3, 1] = np.nan
        yield ids, gradient


@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    quick_cases(
        matrix(SUMMING, with_ids({"one": (1, {}), "eight": (8, {"capacity": 1})})),
        "norm-one",
    ),
)
def test_equals_dense(name, num_devices, options):
    optimizer = SUMMING[name]
    plan = one_table_plan(optimizer, ROWS, DIM, mesh_of(num_devices), **options)
    tables, slots = initial_state(plan, start())
    table, state = jnp.asarray(start()), optimizer.init(jnp.asarray(start()))
    for ids, gradient in batches(has_nan="finite" in name):
        tables, slots = update(tables, slots, ids, gradient, plan)
        dense = jnp.zeros_like(table).at[ids].add(gradient)
        updates, state = optimizer.update(dense, state, table)
        table = optax.apply_updates(table, updates)
    np.testing.assert_allclose(
        te.functional.unstack_tables(tables, plan)["table"], table, rtol=1e-5, atol=1e-6
    )


def test_state_of_one_number_is_of_one_table():
    """A norm is of a table, so tables of such an optimizer are not stacked."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=5, dim=2, name=name)
        )
        for name in "ab"
    }
    plan = te.make_plan(features, mesh_of(1), optimizer=SUMMING["norm"])
    assert len(plan.stacks) == 2


REFUSED = {
    "lamb": (optax.lamb(0.1), "every_row"),
    "lars": (optax.lars(0.1), "every_row"),
    "factored": (optax.adafactor(0.1), "optimizers.adafactor"),
    "sm3": (optax.sm3(0.1), "reduce_max"),
    "noise": (optax.noisy_sgd(0.1, key=0), "random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_other_rows_is_refused(name):
    optimizer, reason = REFUSED[name]
    with pytest.raises(te.optimizers.NotRowLocalError, match=reason) as error:
        one_table_plan(optimizer, ROWS, DIM, mesh_of(1))
    assert "'table'" in str(error.value)
