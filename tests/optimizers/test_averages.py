"""Moving averages of rows around any optimizer, and of adafactor with its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.optimizers.rule_cases import initial_state_of_tables, plan_of_tables, update
from tests.rejections import rejects
from tests.tiers import quick_cases

opt = te.optimizers
DIM, SIZES = 4, {"a": 30, "b": 7, "c": 1}
NAMES = tuple(SIZES)


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
        yield (ids, {n: np.float32(generator.normal(size=(4, DIM))) for n in names})


def rows_after_each_step(plan, names, num_steps):
    """Yields the tables and slots, and the logical rows, from the start on."""
    tables, slots = initial_state_of_tables(plan, {n: start_of(n) for n in names})
    yield tables, slots, te.functional.unstack_tables(tables, plan)
    for ids, cotangents in batches(names, num_steps):
        tables, slots = update(tables, slots, ids, cotangents, plan)
        yield tables, slots, te.functional.unstack_tables(tables, plan)


RULES = {
    "sgd": (opt.sgd(0.3), 2, {}),
    "adafactor": (opt.adafactor(0.3), 2, {"capacity": 1}),
    "packed": (opt.momentum(0.3, 0.9), 2, {"hardware": "v5p", "capacity": 1}),
    "options": (opt.adam(0.1, clip_weight_max=0.5, slot_dtype=jnp.bfloat16), 1, {}),
    "every row": (opt.every_row(opt.adam(0.1)), 3, {}),
    "collected": (opt.every_row(opt.adam(0.1), gradient_steps=2), 2, {}),
}


def final_rows(tables, slots, plan):
    tables, slots = te.functional.finalize_variable_values(tables, slots, plan)
    return te.functional.unstack_tables(tables, plan), tables, slots


@pytest.mark.parametrize(
    ("case", "start"),
    quick_cases(
        [
            ("packed", "first_update"),
            ("options", "first_update"),
            ("every row", "first_update"),
            ("collected", "first_update"),
            ("collected", "initial_values"),
            ("sgd", "initial_values"),
            ("adafactor", "first_update"),
        ],
        "options-first_update",
        every_case=True,
    ),
)
def test_averages_equal_averages_of_the_whole_table_in_every_step(case, start):
    rule, num_devices, options = RULES[case]
    averaged_rule = opt.with_ema(rule, momentum=0.7, start=start)
    if case == "adafactor":
        averaged_rule = opt.adafactor(0.3, use_ema=True, ema_momentum=0.7)
    plan = plan_of(NAMES, averaged_rule, num_devices, **options)
    alone = rows_after_each_step(plan_of(NAMES, rule, num_devices, **options), NAMES, 5)
    steps_of_update = 2 if case == "collected" else 1
    expected = {}
    steps = rows_after_each_step(plan, NAMES, 5)
    for i, ((tables, slots, rows), (_, _, same)) in enumerate(
        zip(steps, alone, strict=True)
    ):
        is_first = start == "first_update" and i <= steps_of_update
        for name in NAMES:
            # XLA may fuse a product and a sum in one of both programs.
            np.testing.assert_allclose(rows[name], same[name], rtol=1e-6, atol=1e-7)
            momentum = 0.0 if i == 0 or is_first else 0.7
            old = expected.get(name, 0.0)
            expected[name] = momentum * old + (1 - momentum) * rows[name]
        if i not in (1, 5):
            continue
        found, tables, slots = final_rows(tables, slots, plan)
        again, _, _ = final_rows(tables, slots, plan)
        for name, state in te.functional.slot_values(slots, plan, "all").items():
            if case == "adafactor":  # The state fits the new rows.
                np.testing.assert_allclose(
                    state["squares/value"], np.sum(found[name] ** 2), rtol=1e-5
                )
        for name in NAMES:
            # Closed form of several steps: powers of the momentum.
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-5, atol=1e-6
            )
            np.testing.assert_allclose(again[name], found[name], rtol=1e-6, atol=1e-7)


def test_averages_of_dense_parameters_keep_the_norm_of_the_model():
    """The wrapped rule sees the whole pytree, and not one array after the other."""
    rule = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    params = {"a": jnp.ones(2), "b": jnp.ones((2, 2)), "c": jnp.ones(())}
    averaged = opt.with_ema(rule)
    expected, _ = rule.update(params, rule.init(params), params)
    found, _ = averaged.update(params, averaged.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_slots_are_named_averages_and_restart_from_values_that_are_set():
    table = te.TableConfig(vocabulary_size=5, dim=2, name="t")
    model = te.TPUEmbedding(
        te.FeatureConfig(table=table), opt.with_ema(opt.adagrad(0.1)), rngs=nnx.Rngs(0)
    )
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    optimizer.set_embedding_tables(model, {"t": np.ones((5, 2))})
    slots = optimizer.slot_values()["t"]
    assert {"accumulators", "averages", "average_counts"} == set(slots)
    np.testing.assert_array_equal(slots["averages"], 1)
    with rejects(fix="set_embedding_tables"):
        model.set_embedding_tables({"t": np.ones((5, 2))})


def test_what_cannot_be_averaged():
    sgd = opt.sgd(1)
    with rejects(TypeError, field="rule", value=3):
        opt.with_ema(3)
    for options in ({"momentum": 2}, {"overwrite_frequency": 0}, {"start": "x"}):
        with rejects(field=next(iter(options))):
            opt.with_ema(sgd, **options)
    with rejects(fix="with_ema("):
        opt.with_ema(opt.with_ema(sgd))
    with rejects(fix="in_sequence"):
        opt.with_ema(opt.in_sequence(sgd))
    with rejects(fix="in_sequence"):
        opt.in_sequence(opt.with_ema(sgd))
    with rejects(field="gradient_steps", value=2, fix="with_ema(every_row"):
        opt.every_row(opt.with_ema(sgd), gradient_steps=2)
    with rejects(fix="finalize_variable_values"):
        opt.with_ema(opt.every_row(sgd, gradient_steps=2), overwrite_frequency=3)
    with rejects(fix="every_row"):
        opt.check_row_local(opt.with_ema(sgd, overwrite_frequency=3), dim=2)
    with rejects(fix="use_ema=True"):
        opt.check_row_local(opt.with_ema(opt.adafactor(1.0)), dim=2)
    rule, rows = opt.with_ema(sgd), jnp.ones((1, 2))
    with rejects(fix="update(gradients, state, params)"):
        rule.update(rows, rule.init(rows))


@pytest.mark.full
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
