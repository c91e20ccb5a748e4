"""Modes, totals and wrappers meet: what each combination does, or its rejection."""

import jax
import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import one_table_plan
from tests.rejections import rejects
from tpu_embedding.optimizers.row_optimizer import EveryRow

EVERY_ROW = te.optimizers.every_row(optax.sgd(0.1))
CHAIN = "every_row(optax.chain("
# Rules, and code of the fix.
REJECTED = {
    "totals_within_cond": (
        optax.apply_if_finite(te.optimizers.adafactor(0.1), 3),
        "every_row(rule, gradient_steps=",
    ),
    "adafactor_scaled_after": (
        optax.chain(te.optimizers.adafactor(1.0), optax.scale(0.1)),
        "learning_rate",
    ),
    "every_row_in_a_chain": (optax.chain(optax.clip(1.0), EVERY_ROW), CHAIN),
    "norm_in_a_chain": (
        optax.chain(optax.clip(1.0), te.optimizers.adafactor(0.1, global_clipnorm=1.0)),
        CHAIN,
    ),
    "step_gated": (optax.chain(optax.sgd(0.1), optax.apply_every(2)), "every_row"),
    "several_tables": (
        optax.multi_transform({"x": optax.sgd(1.0)}, {"table": "x"}),
        "of one array",
    ),
    "norm_of_collected_gradients": (
        te.optimizers.adafactor(
            0.1, global_clipnorm=1.0, gradient_accumulation_steps=2
        ),
        "te.gradients.clip_by_global_norm",
    ),
    "totals_in_sequence": (
        te.optimizers.in_sequence(te.optimizers.clippy_adagrad(0.1)),
        "use_gradient_accumulation=False",
    ),
    "unknown_name": ("adamax", "'adam'"),
}


def test_options_keep_the_mode():
    rule = te.optimizers.adam(0.1, lazy_adam=False, clip_weight_max=1.0)
    for wrapped in (
        rule,
        te.optimizers.with_options(EVERY_ROW, slot_dtype=jnp.float32),
        te.optimizers.with_options(EVERY_ROW, weight_decay_factor=0.1),
        te.optimizers.with_options(EVERY_ROW, clipvalue=1.0),
    ):
        plan = one_table_plan(wrapped, 5, 2, mesh_of(1))
        assert plan.stacks[0].optimizer.driver == EveryRow()


@pytest.mark.parametrize("name", REJECTED)
def test_rejected_with_reason_and_table(name):
    optimizer, fix = REJECTED[name]
    with rejects(field="optimizer", value=optimizer, fix=fix) as error:
        one_table_plan(optimizer, 5, 2, mesh_of(1))
    assert name == "unknown_name" or "'table'" in str(error.value)


def test_nested_hyperparameters_are_found():
    def scaled(s):
        inner = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.1)
        return optax.chain(inner, optax.scale(s))

    state = optax.inject_hyperparams(scaled)(s=2.0).init(jnp.ones((2, 2)))
    state = te.optimizers.with_hyperparameters(state, learning_rate=0.5)
    assert "0.5" in str(jax.tree.leaves(state))
