"""Rules as kernels run them, against the rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import (
    OPTIMIZERS,
)
from tpu_embedding.optimizers.analysis.kernel_lowering import (
    LoweredRule,
    Refusal,
    lower_to_kernel,
)

DIM = 8
BY_XLA = {
    "adagrad_momentum": "operation 'pow' does not run on SparseCores",
    "clippy_adagrad": "it takes totals over the rows of a table",
    "adafactor": "it takes totals over the rows of a table",
    "norm": "operation 'reduce_sum' mixes rows",
    "frequency_aware_adagrad": "slot variable '.counters' is int32",
}


HALF = jnp.float32(0.5)
SCHEDULE = optax.linear_schedule(0.5, 0.1, 10)


ODD = {
    "array and schedule": optax.chain(optax.scale(HALF), optax.sgd(SCHEDULE)),
    "literals": optax.stateless(lambda u, _: jax.lax.clamp(-0.5, u, 0.5) * -0.1),
}


@pytest.mark.parametrize(
    "name", ["adam", "ftrl", "inject", "chain", "partial_rowwise_lamb", *ODD]
)
def test_equals_the_rule(name):
    optimizer = (OPTIMIZERS | ODD)[name]
    rule = lower_to_kernel(optimizer, DIM)
    assert isinstance(rule, LoweredRule)
    rows = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    state = optimizer.init(jnp.asarray(rows))
    for seed in range(1, 4):
        gradient = np.random.default_rng(seed).normal(size=rows.shape)
        gradient = jnp.asarray(gradient, jnp.float32)
        updates, expected = optimizer.update(gradient, state, rows)
        leaves, tree = jax.tree.flatten(state)
        is_array = [x.shape == rows.shape for x in leaves]
        is_row_scalar = [x.shape == rows.shape[:1] for x in leaves]
        is_slot = np.logical_or(is_array, is_row_scalar)
        outline = [
            None if of_slot else x for x, of_slot in zip(leaves, is_slot, strict=True)
        ]
        scalars, new = rule.prepare(outline)
        assert all(x.shape == () and x.dtype == jnp.float32 for x in scalars)
        vectors = [
            *(x.reshape(-1) for x in (gradient, rows, *pick(leaves, is_array))),
            *(jnp.repeat(x, DIM) for x in pick(leaves, is_row_scalar)),
            *(jnp.full(rows.size, x) for x in scalars),
        ]
        sums = []
        for _ in range(rule.kernel_body.num_sums):
            summands = rule.kernel_body.run(sums, *vectors)
            sums.append(jnp.repeat(summands.reshape(rows.shape).sum(axis=1), DIM))
        row, *new_slots = rule.kernel_body.run(sums, *vectors)
        new_slots = [x.reshape(rows.shape) for x in new_slots]
        arrays, row_scalars = iter(new_slots), iter(new_slots[sum(is_array) :])
        new = [
            next(arrays) if of_array else next(row_scalars)[:, 0] if of_row else x
            for x, of_array, of_row in zip(new, is_array, is_row_scalar, strict=True)
        ]
        check = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
        check(row.reshape(rows.shape), rows + updates)
        jax.tree.map(check, tree.unflatten(new), expected)
        state, rows = expected, np.asarray(rows + updates)


def pick(leaves, are_wanted):
    return [x for x, is_wanted in zip(leaves, are_wanted, strict=True) if is_wanted]


@pytest.mark.parametrize("name", BY_XLA)
def test_leaves_other_rules_to_xla(name):
    assert lower_to_kernel(OPTIMIZERS[name], DIM) == Refusal(BY_XLA[name])


def one_operation(operation):
    """A rule that does one thing to the gradient, for the table and a slot."""
    return optax.GradientTransformation(
        lambda rows: jnp.ones_like(rows),
        lambda updates, state, rows: (
            operation(updates, state).astype(jnp.float32),
            state + updates,
        ),
    )


REFUSED = {
    "erf": (lambda x, y: jax.lax.erf(x), "'erf' does not run"),
    "int": (
        lambda x, y: (x.astype(jnp.int32) + 1).astype(jnp.float32),
        "'convert_element_type' of int32 does not run",
    ),
    "by row": (
        lambda x, y: x * jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] + y,
        "'iota' does not run",
    ),
    "sum of all": (lambda x, y: x * jnp.sum(y), "'reduce_sum' mixes rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_operations(name):
    operation, reason = REFUSED[name]
    refusal = lower_to_kernel(one_operation(operation), DIM)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(f"operation {reason}")


NOT_LOWERED = {
    "other arguments": (optax.lbfgs(0.1), "it cannot be traced: "),
    "bfloat16": (
        te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16),
        "slot variable '[0].momenta' is bfloat16",
    ),
    "asks about rows": (
        optax.stateless(
            lambda u, _: u * te.optimizers.table_rows(u).is_touched[:, None]
        ),
        "it asks which rows are used or looked up",
    ),
}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_says_why_a_rule_is_not_lowered(name):
    optimizer, reason = NOT_LOWERED[name]
    refusal = lower_to_kernel(optimizer, DIM)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(reason)
