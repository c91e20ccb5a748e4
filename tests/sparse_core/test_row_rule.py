"""Elementwise rules are split, and other rules are rejected with the reason."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import OPTIMIZERS
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.sparse_core.row_rule import row_rule


def rule_of(optimizer, dim=4, width=8):
    return row_rule(row_optimizer_of(optimizer), dim, width)


def by_elements(update, init=lambda rows: ()):
    return optax.GradientTransformation(init, update)


REJECTED = {
    "rowwise_adagrad": (OPTIMIZERS["rowwise_adagrad"], r"float32\[\] per row"),
    "lamb": (OPTIMIZERS["lamb"], "reduce_sum is not elementwise"),
    "adafactor": (OPTIMIZERS["adafactor"], "totals over the rows"),
    "clippy_adagrad": (OPTIMIZERS["clippy_adagrad"], "totals over the rows"),
    "every_row": (te.optimizers.every_row(optax.adam(0.1)), "every row"),
    "in_sequence": (te.optimizers.in_sequence(optax.sgd(0.1)), "each occurrence"),
    "bfloat16 slot": (
        optax.trace(0.9, accumulator_dtype=jnp.bfloat16),
        r"bfloat16\[4\] per row",
    ),
    "neighbours": (
        by_elements(lambda g, s, rows: (g[:, ::-1], s)),
        "rev is not elementwise",
    ),
    "columns": (
        by_elements(lambda g, s, rows: (g * jnp.arange(4.0)[None], s)),
        "differs between the elements of a row",
    ),
    "conditional": (
        by_elements(
            lambda g, s, rows: (
                jax.lax.cond(s[0] > 3, lambda g: g, lambda g: -g, g),
                (s[0] + 1,),
            ),
            lambda rows: (jnp.zeros((), jnp.int32),),
        ),
        "cond is not elementwise",
    ),
    "half": (
        by_elements(lambda g, s, rows: (g.astype("float16").astype("float32"), s)),
        "not support float16",
    ),
    "integer of the step": (
        by_elements(
            lambda g, s, rows: (
                g * (jnp.sign(g).astype(jnp.int32) + s[0]),
                (s[0] + 1,),
            ),
            lambda rows: (jnp.zeros((), jnp.int32),),
        ),
        "scalar of dtype int32",
    ),
}


@pytest.mark.parametrize("optimizer, reason", REJECTED.values(), ids=REJECTED.keys())
def test_others_are_rejected_with_the_reason(optimizer, reason):
    found = rule_of(optimizer)
    assert isinstance(found, str)
    assert re.search(reason, found), found


def test_values_of_a_step_are_computed_once():
    rule = rule_of(optax.adam(optax.linear_schedule(0.1, 0.0, 10)))
    # Two bias corrections and a learning rate; two counts.
    assert (rule.num_slots, rule.num_hyperparameters) == (2, 3)
    scalars, leaves = rule.values([jnp.int32(4), jnp.int32(4)])
    assert [int(x) for x in leaves] == [5, 5]
    expected = sorted([1 - 0.9**5, 1 - 0.999**5, -0.06])
    np.testing.assert_allclose(sorted(float(x) for x in scalars), expected, rtol=1e-3)


def test_the_operation_gets_at_least_one_hyperparameter():
    rule = rule_of(optax.sgd(0.1))
    assert rule.num_hyperparameters == 1
    assert len(rule.values([])[0]) == 1
    assert rule.stablehlo.count("%arg") >= 3


def test_columns_beyond_the_dim_keep_their_values():
    rule = rule_of(te.optimizers.adagrad(0.1), dim=3, width=8)
    rows = jnp.full((2, 8), 7.0)
    zeros = jnp.zeros((2, 8))
    new, slot = rule.rows(zeros, rows, zeros, *rule.values([])[0])
    assert np.all(np.isnan(new[:, :3]))  # 0 / 0
    np.testing.assert_array_equal(new[:, 3:], 7.0)
    np.testing.assert_array_equal(slot[:, 3:], 0.0)


def test_a_slot_that_does_not_depend_on_rows():
    rule = rule_of(
        by_elements(
            lambda g, s, rows: (g, jnp.full_like(s, 3.0)), lambda rows: rows * 0.0
        )
    )
    _, slot = rule.rows(*[jnp.ones((2, 8))] * 3, *rule.values([])[0])
    np.testing.assert_array_equal(slot[:, :4], 3.0)
