"""A rule in two halves: values of a step, and arithmetic on rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.optimizers import rule_split
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.optimizers.rule_split import (
    evaluate_by_numpy,
    split_program,
    trace_program,
)

DIM, NUM_ROWS = 4, 136  # the number of rows that the probe traces
SCHEDULE = optax.linear_schedule(0.1, 0.0, 100)

RULES = {
    "adam": optax.adam(SCHEDULE),
    "adagrad": te.optimizers.adagrad(0.1),
    "ftrl": te.optimizers.ftrl(SCHEDULE, l1_regularization_strength=0.1),
    "radam": optax.radam(0.1),
    "conditional": optax.conditionally_transform(
        optax.scale_by_adam(), lambda step: step > 2, forward_extra_args=False
    ),
    "steps in a conditional": te.optimizers.every_row(
        optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()
    ),
}
CROSSING = {"adagrad": 0, "adam": 3, "radam": 4, "conditional": 2}
"""Scalars that rows need: Adam's two bias corrections and its learning rate."""


def arguments_of(rule, num_rows):
    """Returns gradients and rows of normal numbers, and the state after two steps."""
    gradient, rows = np.random.default_rng(0).normal(size=(2, num_rows, DIM))
    gradient, rows = jnp.float32(gradient), jnp.float32(rows)
    state = rule.init(rows)
    for _ in range(2):
        _, state = rule.update(gradient, state, rows)
    return gradient, rows, state


@pytest.mark.parametrize(
    "name", quick_cases(RULES, "adam", "conditional", every_case=True)
)
def test_both_halves_compute_what_the_rule_does(name):
    rule = row_optimizer_of(RULES[name]).transformation
    probed = probe_rule(rule, DIM)
    split = probed.split
    gradient, rows, state = arguments_of(rule, NUM_ROWS)
    leaves, tree = jax.tree.flatten(state)
    is_slot = [slot is not None for slot in probed.leaves]
    slots = [x for x, of_rows in zip(leaves, is_slot, strict=True) if of_rows]
    scalars = [x for x, of_rows in zip(leaves, is_slot, strict=True) if not of_rows]
    hyperparameters, new_scalars = split.values(scalars)
    is_touched = jnp.ones(NUM_ROWS, bool)
    updates, new_slots = split.rows(gradient, rows, is_touched, slots, hyperparameters)
    new = [iter(new_scalars), iter(new_slots)]
    found = [updates, *(next(new[of_rows]) for of_rows in is_slot)]
    expected, new_state = rule.update(gradient, state, rows)
    expected = [expected, *tree.flatten_up_to(new_state)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert all(jnp.shape(x) == () for x in hyperparameters)
    assert split.num_hyperparameters == CROSSING.get(name, split.num_hyperparameters)


DEPENDS = {
    "norm": lambda g, count: (g, count + jnp.sum(g * g)),
    "any": lambda g, count: (g, jnp.where(jnp.isnan(g).any(), count, count + 1)),
    "condition": lambda g, count: (
        g,
        jax.lax.cond(jnp.sum(g) > 0, lambda x: x + 1, lambda x: x, count),
    ),
    "branch": lambda g, count: jax.lax.cond(
        count > 3, lambda g, x: (g, x + jnp.sum(g)), lambda g, x: (-g, x), g, count
    ),
    "product with 0": lambda g, count: (g, count + 0 * jnp.sum(g)),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_a_scalar_that_depends_on_rows_is_rejected(name):
    rule = optax.GradientTransformation(
        lambda rows: jnp.zeros(()), lambda g, s, rows: DEPENDS[name](g, s)
    )
    with rejects(te.optimizers.NotRowLocalError):
        probe_rule(rule, DIM)


def test_side_effects_stay():
    """A user prints values of a rule, in either half."""
    seen = []

    def update(g, rows, is_touched, count):
        jax.debug.callback(lambda x: seen.append(("rows", x.shape)), g)
        jax.debug.callback(lambda x: seen.append(("values", x.shape)), count)
        return g, count

    g, count = jnp.ones((3, DIM)), jnp.float32(1)
    program, _ = trace_program(update, g, g, jnp.ones(3, bool), count)
    split = split_program(program, [False])
    hyperparameters, _ = split.values([count])
    jax.effects_barrier()
    assert seen == [("values", ())]
    split.rows(g, g, jnp.ones(3, bool), [], hyperparameters)
    jax.effects_barrier()
    assert seen == [("values", ()), ("rows", (3, DIM))]


def first_step(rule, num_ids=8):
    """Makes a plan, slot variables and a step on one device."""
    table = te.TableConfig(vocabulary_size=50, dim=DIM, name="t", optimizer=rule)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    result = te.functional.lookup(tables, np.arange(num_ids, dtype=np.int32), plan)
    gradients = te.functional.compute_gradients(
        result.routing, jnp.ones((num_ids, DIM)), plan
    )
    return te.functional.apply_gradients(tables, slots, gradients, plan)


def test_a_rule_is_called_a_few_times_before_the_first_step_is_done():
    calls, adam = {"init": 0, "update": 0}, optax.adam(SCHEDULE)

    def init(rows):
        calls["init"] += 1
        return adam.init(rows)

    def update(gradient, state, rows=None):
        calls["update"] += 1
        return adam.update(gradient, state, rows)

    first_step(optax.GradientTransformation(init, update))
    # Each with 136 and with 3 rows in the probe; then the slot variables and the step.
    assert calls["init"] == 3 and calls["update"] <= 5


def test_a_plan_rejects_what_depends_on_the_number_of_rows():
    rule = optax.stateless(lambda g, rows: g / g.shape[0])
    with rejects(te.optimizers.NotRowLocalError):
        first_step(rule)


def test_positions_may_depend_on_the_number_of_rows():
    """An index is bounded by it; each row still depends on itself alone."""
    rule = optax.stateless(
        lambda g, rows: g * g[jnp.arange(g.shape[0]), jnp.argmax(rows, axis=1)][:, None]
    )
    first_step(rule)


X = np.float32([[0.5, -2.0, 1e-3], [3.0, 0.0, -1.5]])


def elementwise(x):
    """Uses each operation that NumPy has for elements."""
    small, whole = jnp.abs(x) + 0.5, jnp.int32(x)
    yield from (jnp.sin(x) * jnp.cos(x), jnp.tanh(-x), jnp.sign(x), jnp.floor(x))
    yield from (jnp.exp(x), jnp.log(small), jnp.sqrt(small), jax.lax.rsqrt(small))
    yield from (jnp.square(x), small**x, x / small, jnp.power(x, -3), x - small)
    yield from (jnp.maximum(x, whole), jnp.minimum(x, 0.3), jnp.isfinite(x / x[1, 1]))
    yield from (x < 1, x <= 3, x > 1, x >= 3, x == 0, x != 0, ~(x > 0), whole & 1)
    yield from (whole | 4, jnp.copy(x), whole // 2)
    yield jax.jvp(lambda y: y + jnp.sin(y) * y, (x,), (small,))[1]


def of_arrays(x):
    """Uses each operation that has parameters."""
    yield from (x.sum(0), x.max(1), x.min(), jnp.mean(x, 1, keepdims=True))
    yield from (jnp.concatenate([x, x], 1), x.reshape(3, 2), jnp.where(x > 0, x, 7.0))
    yield from (jnp.select([x > 1, x > 0], [x, -x], 0.0), jnp.squeeze(x[:, :1]))
    yield from (x.astype(jnp.bfloat16) * 3, jnp.broadcast_to(x[:, None], (2, 4, 3)))


def others(x):
    """Uses operations that JAX evaluates, and functions that are called."""
    yield from (jnp.sort(x), jax.lax.cond(True, jnp.sin, jnp.cos, x), jnp.cumsum(x, 0))
    yield jax.random.key_data(jax.random.split(jax.random.key(0))[0])
    yield from (jax.jit(jnp.arcsin)(x / 4), jax.nn.softplus(x), x[::-1])


@pytest.mark.parametrize("function", [elementwise, of_arrays, others])
def test_evaluates_as_jax_does(function):
    program, shapes = trace_program(lambda x: list(function(x)), X)
    with np.errstate(all="ignore"):
        found = evaluate_by_numpy(program, [X])
    with jax.debug_nans(False):
        expected = jax.jit(lambda x: list(function(x)))(X)
    for value, shape, wanted in zip(found, shapes, expected, strict=True):
        assert (value.shape, value.dtype) == (shape.shape, shape.dtype)
        np.testing.assert_allclose(
            np.float64(value), np.float64(wanted), rtol=1e-5, atol=1e-6
        )


def test_each_operation_is_used():
    used = {
        equation.name
        for function in (elementwise, of_arrays)
        for equation in trace_program(lambda x, f=function: list(f(x)), X)[0].equations
    }
    known = {*rule_split._ELEMENTWISE, *rule_split._WITH_PARAMETERS}
    assert known - used == set()
