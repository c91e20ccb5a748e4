"""Moving averages of tables: kept by touched rows, swapped in at the end."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.optimizers.rule_cases import (
    initial_state,
    initial_state_of_tables,
    one_table_plan,
    plan_of_tables,
    update,
)
from tests.rejections import rejects
from tests.tiers import quick_cases

opt = te.optimizers
DIM, SIZES = 4, {"a": 30, "b": 7, "c": 1}


def plan_of(names, optimizer, num_devices, hardware="cpu", **options):
    sizes = {name: SIZES[name] for name in names}
    return plan_of_tables(sizes, DIM, optimizer, num_devices, hardware, **options)


def start_of(name):
    rows = np.random.default_rng(SIZES[name]).normal(size=(SIZES[name], DIM))
    return rows.astype(np.float32)


def batches(names, num_steps):
    """Few ids per step, so that most rows are skipped in most steps."""
    generator = np.random.default_rng(1)
    for _ in range(num_steps):
        ids = {n: generator.integers(0, SIZES[n], 4).astype(np.int32) for n in names}
        yield (
            ids,
            {n: np.float32(generator.normal(size=(4, DIM))) for n in names},
        )


def rows_after_each_step(plan, names, num_steps):
    """Yields the tables and slots, and the logical rows, from the start on."""
    tables, slots = initial_state_of_tables(plan, {n: start_of(n) for n in names})
    yield tables, slots, te.functional.unstack_tables(tables, plan)
    for ids, cotangents in batches(names, num_steps):
        tables, slots = update(tables, slots, ids, cotangents, plan)
        yield tables, slots, te.functional.unstack_tables(tables, plan)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    quick_cases(
        [("adafactor_ema", 2), ("adafactor_tfkeras_ema", 1)],
        "adafactor_ema-2",
        every_case=True,
    ),
)
def test_final_values_equal_the_recorded_averages(name, num_devices):
    with np.load(GOLDEN / f"{name}.npz") as run:
        run = dict(run)
    meta = json.loads(str(run["meta"]))
    is_keras_3 = meta["implementation"] == "keras"
    optimizer = opt.adafactor(
        **meta["hyper_parameters"],
        mode="exact",
        ema_start="first_update" if is_keras_3 else "initial_values",
    )
    plan = one_table_plan(optimizer, meta["V"], meta["D"], mesh_of(num_devices))
    tables, slots = initial_state(plan, run["table"][0])
    for step, (ids, gradients) in enumerate(zip(run["ids"], run["grads"], strict=True)):
        tables, slots = update(tables, slots, ids, gradients, plan)
        final, _ = te.functional.finalize_variable_values(tables, slots, plan)
        # Keras sums in another order.
        np.testing.assert_allclose(
            te.functional.unstack_tables(final, plan)["table"],
            run["slot__ema"][step + 1],
            rtol=2e-6,
            atol=1e-6,
        )


def test_steps_that_a_wrapper_of_the_user_collects_are_no_steps_of_averages():
    rule = opt.adafactor(0.5, use_ema=True, ema_momentum=0.5)
    tx = optax.MultiSteps(rule, 4)
    params, final = {"bias": jnp.ones(1)}, {}
    state = tx.init(params)
    for step in range(1, 12):
        updates, state = tx.update({"bias": jnp.ones(1)}, state, params)
        params = optax.apply_updates(params, updates)
        final[step], _ = te.functional.finalize_variable_values(params, state)
    np.testing.assert_array_equal(final[11]["bias"], final[8]["bias"])
    assert final[8]["bias"] != final[7]["bias"]


def test_slots_without_averages_change_nothing():
    plan = plan_of(("b",), "adagrad", 1)
    tables, slots = initial_state_of_tables(plan, {"b": start_of("b")})
    found = te.functional.finalize_variable_values(tables, slots, plan)
    jax.tree.map(np.testing.assert_array_equal, found, (tables, slots))
    with rejects(fix="stack"):
        te.functional.finalize_variable_values(tables, {}, plan)
