"""Modes, totals and wrappers meet: what each combination does, or why it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import matrix, quick_cases
from tpu_embedding.optimizers.resolve import resolve_optimizer


def plan_of(names, optimizer, num_devices=1, **options):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=5, dim=2, combiner="sum", name=name)
        )
        for name in names
    }
    return te.make_plan(features, mesh_of(num_devices), optimizer=optimizer, **options)


def labels_by_path(tables):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "'a'" in jax.tree_util.keystr(path) else "trained",
        tables,
    )


def test_labels_by_path_are_those_of_each_table():
    optimizer = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.sgd(0.5)}, labels_by_path
    )
    plan = plan_of("ab", optimizer)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    before = te.functional.unstack_tables(tables, plan)
    ones = {name: np.ones((2, 2), np.float32) for name in "ab"}
    ids = {name: np.int32([1, 3]) for name in "ab"}
    tables, _ = update(tables, te.functional.init_slots(tables, plan), ids, ones, plan)
    after = te.functional.unstack_tables(tables, plan)
    np.testing.assert_array_equal(after["a"], before["a"])
    np.testing.assert_allclose(after["b"][1], before["b"][1] - 0.5, rtol=1e-6)


def test_a_mode_is_that_of_its_branch_only():
    optimizer = optax.multi_transform(
        {
            "every": te.optimizers.every_row(optax.adam(0.1), gradient_steps=4),
            "touched": optax.adam(0.1),
            "sequence": te.optimizers.in_sequence(optax.adam(0.1)),
        },
        {"a": "every", "b": "touched", "c": "sequence"},
    )
    found = {
        stack.tables[0].name: stack.optimizer
        for stack in plan_of("abc", optimizer).stacks
    }
    assert [found[name].rows for name in "abc"] == ["every", "touched", "touched"]
    assert [found[name].gradient_steps for name in "abc"] == [4, 1, 1]
    assert [found[name].duplicates for name in "abc"] == ["sum", "sum", "sequence"]


def test_labels_may_name_tables_with_their_own_optimizer():
    optimizer = optax.masked(optax.sgd(0.1), {"a": True, "b": False})
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=5,
                dim=2,
                name=name,
                optimizer="adagrad" if name == "b" else None,
            )
        )
        for name in "ab"
    }
    plan = te.make_plan(features, mesh_of(1), optimizer=optimizer)
    assert len(plan.stacks) == 2


@pytest.mark.parametrize("bad", quick_cases([1e30, np.nan], "1e+30"))
def test_what_is_not_finite_stays_in_its_table(bad):
    plan = plan_of("ab", te.optimizers.adafactor(0.1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    ids = {name: np.int32([1]) for name in "ab"}
    gradients = {
        "a": np.full((1, 2), bad, np.float32),
        "b": np.ones((1, 2), np.float32),
    }
    tables, _ = update(
        tables, te.functional.init_slots(tables, plan), ids, gradients, plan
    )
    assert np.isfinite(te.functional.unstack_tables(tables, plan)["b"]).all()


@pytest.mark.full
def test_a_rule_under_jit_takes_totals_too():
    rule = te.optimizers.adafactor(0.1)
    jitted = optax.GradientTransformation(rule.init, jax.jit(rule.update))
    results = []
    for optimizer in (rule, jitted):
        plan = one_table_plan(optimizer, 20, 2, mesh_of(3), capacity=1)
        assert plan.stacks[0].optimizer.takes_totals
        tables, slots = initial_state(plan, np.ones((20, 2)))
        for seed in range(2):
            generator = np.random.default_rng(seed)
            ids = generator.integers(0, 20, 9).astype(np.int32)
            gradient = generator.normal(size=(9, 2)).astype(np.float32)
            tables, slots = update(tables, slots, ids, gradient, plan)
        results.append(te.functional.unstack_tables(tables, plan)["table"])
    np.testing.assert_allclose(*results, rtol=1e-6)


@pytest.mark.parametrize("num_devices", quick_cases([1, 3], "1"))
def test_sequence_follows_the_samples_not_the_places_of_ids(num_devices):
    """Dense ids lie place by place within; the rule must see them sample by sample."""
    rule = te.optimizers.in_sequence(te.optimizers.adagrad(0.5))
    plan = one_table_plan(rule, 4, 2, mesh_of(num_devices), capacity=1)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 4, (9, 3)).astype(np.int32)
    gradient = np.logspace(-3, 1, 9)[:, None] * generator.normal(size=(9, 2))
    gradient = gradient.astype(np.float32)
    tables, slots = update(*initial_state(plan, np.ones((4, 2))), ids, gradient, plan)
    expected, accumulator = np.ones((4, 2)), np.full((4, 2), 0.1)
    for sample, places in enumerate(ids):
        for row in places:
            accumulator[row] += gradient[sample] ** 2.0
            expected[row] -= 0.5 * gradient[sample] / np.sqrt(accumulator[row])
    found = te.functional.unstack_tables(tables, plan)["table"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_devices", "hardware", "slot_dtype"),
    quick_cases(matrix([(1, "cpu"), (3, "v6e")], [None, jnp.bfloat16]), "1-cpu-None"),
)
def test_every_element_of_rows_of_a_single_value(num_devices, hardware, slot_dtype):
    """They lie flat, where other rows have lines."""
    rule = te.optimizers.adam(0.1, lazy_adam=False, slot_dtype=slot_dtype)
    hardware = te.hardware.hardware_by_name(hardware)
    plan = one_table_plan(rule, 40, 1, mesh_of(num_devices), hardware=hardware)
    assert plan.stacks[0].optimizer.rows == "every"
    start = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    tables, slots = initial_state(plan, start)
    expected, state = jnp.asarray(start), rule.init(jnp.asarray(start))
    for seed in range(3):
        generator = np.random.default_rng(seed)
        ids = generator.integers(0, 40, 12).astype(np.int32)
        gradient = generator.normal(size=(12, 1)).astype(np.float32)
        tables, slots = update(tables, slots, ids, gradient, plan)
        dense = jnp.zeros((40, 1)).at[ids].add(gradient)
        updates, state = rule.update(dense, state, expected)
        expected = optax.apply_updates(expected, updates)
    found = te.functional.unstack_tables(tables, plan)["table"]
    # A moment in bfloat16 may round the other way where duplicates are summed.
    np.testing.assert_allclose(found, expected, rtol=1e-5 if not slot_dtype else 2e-2)


def test_kept_steps_beyond_their_number_run_at_once():
    """As after a restore under a smaller number."""
    long, short = (
        one_table_plan(
            te.optimizers.every_row(optax.sgd(1.0), gradient_steps=steps),
            5,
            2,
            mesh_of(1),
        )
        for steps in (4, 2)
    )
    ids, ones = np.int32([1]), np.ones((1, 2), np.float32)
    tables, slots = initial_state(long, np.zeros((5, 2)))
    for _ in range(3):
        tables, slots = update(tables, slots, ids, ones, long)
    tables, slots = update(tables, slots, ids, ones, short)
    assert int(slots["stack_0"].step) == 0
    assert te.functional.unstack_tables(tables, short)["table"][1, 0] == -2.0


REFUSED = {
    "totals_within_cond": (
        optax.apply_if_finite(te.optimizers.adafactor(0.1), 3),
        "lax.cond",
    ),
    "collected_totals_within_cond": (
        optax.MultiSteps(
            te.optimizers.clippy_adagrad(0.1), 2
        ).gradient_transformation(),
        "gradient_steps",
    ),
    "adafactor_scaled_after": (
        optax.chain(te.optimizers.adafactor(1.0), optax.scale(0.1)),
        "last of a chain",
    ),
    "adafactor_with_options": (
        te.optimizers.with_options(
            te.optimizers.adafactor(1.0), weight_decay_factor=0.5
        ),
        "last of a chain",
    ),
    "two_numbers_of_steps": (
        optax.chain(
            te.optimizers.every_row(optax.sgd(0.1), gradient_steps=4),
            te.optimizers.every_row(optax.sgd(0.1), gradient_steps=2),
        ),
        r"\[2, 4\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_reason_and_table(name):
    optimizer, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as error:
        one_table_plan(optimizer, 5, 2, mesh_of(1))
    assert "'table'" in str(error.value)


ACCEPTED = {
    "clipped_before": optax.chain(optax.clip(1.0), te.optimizers.adafactor(0.1)),
    "slots_of_adafactor": te.optimizers.with_slot_storage(
        te.optimizers.adafactor(0.1), jnp.bfloat16
    ),
    "injected_adafactor": optax.inject_hyperparams(te.optimizers.adafactor)(0.1),
    "every_row_with_counter": te.optimizers.every_row(
        te.optimizers.frequency_aware_adagrad(0.1)
    ),
    "finite_adagrad": optax.apply_if_finite(te.optimizers.adagrad(0.1), 3),
}


@pytest.mark.parametrize("name", quick_cases(ACCEPTED, "every_row_with_counter"))
def test_accepted_and_applied(name):
    plan = one_table_plan(ACCEPTED[name], 20, 2, mesh_of(3), capacity=1)
    tables, slots = initial_state(plan, np.ones((20, 2)))
    ids = np.int32([0, 3, 3, 6, 9, 12])
    tables, slots = update(tables, slots, ids, np.ones((6, 2), np.float32), plan)
    moved = te.functional.unstack_tables(tables, plan)["table"]
    assert np.isfinite(moved).all()
    assert (moved[[0, 3, 6, 9, 12]] != 1).all()


def test_small_slots_need_no_dense_gradient():
    rule = te.optimizers.adam(0.1, lazy_adam=False, slot_dtype=jnp.bfloat16)
    assert not resolve_optimizer(rule, "table", ("table",)).keeps_gradient


def test_scheduled_hyperparameters_are_not_set():
    schedule = optax.linear_schedule(0.1, 0.01, 10)
    state = optax.inject_hyperparams(optax.sgd)(schedule).init(jnp.ones(2))
    with pytest.raises(ValueError, match="not a schedule"):
        te.optimizers.with_hyperparameters(state, learning_rate=1.0)


def test_nested_hyperparameters_are_found():
    def scaled(s):
        inner = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.1)
        return optax.chain(inner, optax.scale(s))

    state = optax.inject_hyperparams(scaled)(s=2.0).init(jnp.ones((2, 2)))
    state = te.optimizers.with_hyperparameters(state, learning_rate=0.5)
    assert "0.5" in str(jax.tree.leaves(state))


@pytest.mark.parametrize(
    "options",
    [
        dict(clip_weight_min=1.0, clip_weight_max=-1.0),
        dict(clipvalue=(1.0, -1.0)),
    ],
    ids=str,
)
def test_bounds_the_wrong_way_round(options):
    with pytest.raises(ValueError, match="must not be above"):
        te.optimizers.sgd(0.1, **options)


@pytest.mark.parametrize("value", [np.float32(0.5), jnp.float32(0.5), 1], ids=str)
def test_any_scalar_is_a_clipvalue(value):
    rule = te.optimizers.sgd(1.0, clipvalue=value)
    rows = jnp.full((1, 2), 9.0)
    assert float(rule.update(rows, rule.init(rows), rows)[0][0, 0]) == -float(value)
