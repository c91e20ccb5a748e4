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


EMA = {"use_ema": True, "ema_momentum": 0.7}
CASES = {
    "lazy": (EMA, 2, {"capacity": 1}),
    "packed": ({**EMA, "weight_decay": 0.1}, 2, {"hardware": "v5p"}),
    "collected": ({**EMA, "gradient_accumulation_steps": 2}, 3, {}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_final_values_average_every_row_in_every_step(case):
    """Also of rows that no step looks up, though these cost nothing in the steps."""
    options, num_devices, others = CASES[case]
    optimizer = opt.adafactor(0.3, **options)
    names = tuple(SIZES)
    plan = plan_of(names, optimizer, num_devices, **others)
    steps_of_update = options.get("gradient_accumulation_steps", 1)
    expected = {}
    for i, (tables, slots, rows) in enumerate(rows_after_each_step(plan, names, 6)):
        # The first update of Keras 3 begins the averages anew.
        begins = i <= steps_of_update
        for name in names:
            momentum = 0.0 if i == 0 or begins else 0.7
            old = expected.get(name, 0.0)
            expected[name] = momentum * old + (1 - momentum) * rows[name]
        if i not in (1, 3, 6):
            continue
        final, new_slots = te.functional.finalize_variable_values(tables, slots, plan)
        found = te.functional.unstack_tables(final, plan)
        for name in names:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-5, atol=1e-6
            )
        # The state fits the new rows: their sum of squares, and another call changes
        # nothing.
        state = te.functional.slot_values(new_slots, plan, "all")
        for name in names:
            np.testing.assert_allclose(
                state[name]["squares/value"], np.sum(found[name] ** 2), rtol=1e-5
            )
        again, _ = te.functional.finalize_variable_values(final, new_slots, plan)
        for name, values in te.functional.unstack_tables(again, plan).items():
            np.testing.assert_allclose(values, found[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("num_devices", quick_cases([1, 2], "2"))
@pytest.mark.parametrize("name", ["adafactor_ema", "adafactor_tfkeras_ema"])
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
    with pytest.raises(ValueError, match="slots must hold stack"):
        te.functional.finalize_variable_values(tables, {}, plan)


def test_tables_do_not_know_the_norm_of_collected_gradients():
    optimizer = opt.adafactor(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"te.gradients.clip_by_global_norm.*'table'"):
        one_table_plan(optimizer, 9, DIM, mesh_of(1))
