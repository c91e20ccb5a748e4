"""Modes, totals and wrappers meet: what each combination does, or why it is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import initial_state, one_table_plan, update


def plan_of(names, optimizer, num_devices=1, **options):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=5, dim=2, combiner="sum", name=name)
        )
        for name in names
    }
    return te.make_plan(features, mesh_of(num_devices), optimizer=optimizer, **options)


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


def test_sequence_follows_the_samples_not_the_places_of_ids():
    """Dense ids lie place by place within; the rule must see them sample by sample."""
    rule = te.optimizers.in_sequence(te.optimizers.adagrad(0.5))
    plan = one_table_plan(rule, 4, 2, mesh_of(2), capacity=1)
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


def test_nested_hyperparameters_are_found():
    def scaled(s):
        inner = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.1)
        return optax.chain(inner, optax.scale(s))

    state = optax.inject_hyperparams(scaled)(s=2.0).init(jnp.ones((2, 2)))
    state = te.optimizers.with_hyperparameters(state, learning_rate=0.5)
    assert "0.5" in str(jax.tree.leaves(state))
