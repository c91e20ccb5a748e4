"""A rule is run on rows and on parts of them: what it may do, and what is rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases, with_ids
from tpu_embedding import optimizers
from tpu_embedding.optimizers import NotRowLocalError, check_row_local
from tpu_embedding.optimizers.probe import probe_rule, rates_are_finite, slot_row_shapes

DIM = 8


def rule_of(operation):
    """A rule with one slot variable, whose updates are `operation(gradient, slot)`."""
    return optax.GradientTransformation(
        jnp.zeros_like,
        lambda updates, state, rows: (operation(updates, state), state + updates),
    )


def test_a_plan_probes_a_rule_once_for_each_dim():
    calls = []

    def operation(u, s):
        calls.append(u.shape)
        return u * s

    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=10, dim=dim, name=name)
        )
        for name, dim in {"a": 8, "b": 8, "c": 4, "d": 4}.items()
    }
    optimizer = rule_of(operation)
    te.make_plan(features, mesh_of(1), optimizer=optimizer)
    # It also tries another number of rows.
    assert sorted(calls) == [(3, 4), (3, 8), (136, 4), (136, 8)]
    te.make_plan(features, mesh_of(1), optimizer=optimizer)
    check_row_local(optimizer, 8)
    assert len(calls) == 4


def test_a_probe_belongs_to_no_trace_and_no_mesh():
    """It may be made within `shard_map`, and is the same for another mesh."""
    found, optimizer = [], optax.adam(0.1)

    def update(x):
        found.append(probe_rule(optimizer, 5))
        return x

    spec = jax.sharding.PartitionSpec("shard")
    with jax.debug_nans(True):
        for num_devices in (2, 1):
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("shard",))
            jax.jit(jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec))(
                jnp.ones(4)
            )
    assert found[0] is found[1] is probe_rule(optimizer, 5)


NOT_RUNNABLE = {
    "value of a row": (rule_of(lambda u, s: u if s[0, 0] > 0 else s), "[rows, 8]"),
    "a rate without arguments": (optax.sgd(lambda: 0.1), "[rows, 8]"),
    "no array": (optax.stateless(lambda u, p: None), "[rows, 8]"),
    "lookahead": (optax.lookahead(optax.sgd(0.1), 5, 0.5), "fast_optimizer"),
}


@pytest.mark.parametrize("name", NOT_RUNNABLE)
def test_what_does_not_run_on_one_array_is_rejected(name):
    optimizer, fix = NOT_RUNNABLE[name]
    with rejects(NotRowLocalError, fix=fix):
        check_row_local(optimizer, DIM)


ROW_LOCAL = {
    "cond": lambda u, s: jax.lax.cond(jnp.float32(1) > 0, jnp.sin, jnp.cos, u),
    "while": lambda u, s: jax.lax.while_loop(
        lambda x: x[1] < 3, lambda x: (x[0] * 0.5, x[1] + 1), (u, 0)
    )[0],
    "columns": lambda u, s: u * s[:, :1] + u[:, ::-1],
    "constants": lambda u, s: u * np.ones(u.shape, np.float32) + jnp.arange(8.0)[None],
    "vmap": lambda u, s: jax.vmap(lambda x, y: x * jnp.sum(y))(u, s),
    "scan over rows": lambda u, s: jax.lax.map(lambda x: x / (1 + x @ x), u),
    # Positions may be bounded by the number of rows.
    "own position": lambda u, s: (
        u * u[jnp.arange(u.shape[0]), jnp.argmax(s, axis=1)][:, None]
    ),
}
NOT_ROW_LOCAL = {
    "sort of rows": lambda u, s: u * jnp.sort(s, axis=0),
    "iota over rows": lambda u, s: u * jnp.arange(u.shape[0])[:, None],
    "parity": lambda u, s: u * 2 if u.shape[0] % 2 else u + s,
    "more than 128 rows": lambda u, s: u * 2 if u.shape[0] >= 128 else u,
    "large maximum": lambda u, s: jnp.where(jnp.max(jnp.abs(u)) > 1e8, u, 2 * u),
    "only of NaN": lambda u, s: jnp.where(jnp.isnan(u).any(), 0, u),
    "in a later step": lambda u, s: u * jnp.max(s),
    "one row": lambda u, s: u.at[0].set(0.0),
    "rows by rows": lambda u, s: (u @ s.T) @ u,
    "scan that carries": lambda u, s: jax.lax.associative_scan(jnp.add, u),
    "gradient of zeros": lambda u, s: jnp.where(jnp.any(u == 0), 2 * u, u),
}


@pytest.mark.parametrize("name", ROW_LOCAL)
def test_is_row_local(name):
    check_row_local(rule_of(ROW_LOCAL[name]), DIM)


@pytest.mark.parametrize(
    "name",
    quick_cases(
        NOT_ROW_LOCAL,
        *("sort of rows", "more than 128 rows", "only of NaN", "in a later step"),
        every_case=True,
    ),
)
def test_mixes_rows(name):
    with rejects(NotRowLocalError, fix="clip_by_global_norm"):
        check_row_local(rule_of(NOT_ROW_LOCAL[name]), DIM)


def test_rows_that_are_mixed_late_in_training_or_by_a_large_row():
    late = optax.conditionally_transform(
        optax.clip_by_global_norm(1.0), lambda step: step > 2
    )
    large = optax.stateless(lambda g, rows: jnp.where(jnp.max(rows) > 0.7, g / 2, g))
    for rule in (optax.chain(late, optax.sgd(0.1)), large):
        with rejects(NotRowLocalError):
            check_row_local(rule, DIM)


MOVED_BY_ADDING = {
    "sum": (lambda s, u: s + u, True),
    "moving average": (lambda s, u: 0.9 * s + 0.1 * u, True),
    "forgets most": (lambda s, u: 0.3 * s + 0.7 * u, False),
    "forgets all": (lambda s, u: u, False),
    "maximum": (lambda s, u: jnp.maximum(s, u), False),
    "bounded": (lambda s, u: jnp.minimum(s + u, 5.0), False),
}


@pytest.mark.parametrize("name", MOVED_BY_ADDING)
def test_slots_that_a_difference_moves(name):
    operation, expected = MOVED_BY_ADDING[name]
    rule = optax.GradientTransformation(
        jnp.ones_like, lambda u, s, p: (u, operation(s, u))
    )
    (slot,) = probe_rule(rule, DIM).slots
    assert slot.is_moved_by_adding is expected
    assert slot.initial_value == 1


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
    with rejects(NotRowLocalError):
        check_row_local(rule, DIM)


def test_a_rule_is_called_a_few_times_before_the_first_step_is_done():
    calls, adam = {"init": 0, "update": 0}, optax.adam(lambda count: 0.1 / (count + 1))

    def init(rows):
        calls["init"] += 1
        return adam.init(rows)

    def update(gradient, state, rows=None):
        calls["update"] += 1
        return adam.update(gradient, state, rows)

    table = te.TableConfig(
        vocabulary_size=50,
        dim=DIM,
        name="t",
        optimizer=optax.GradientTransformation(init, update),
    )
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    result = te.functional.lookup(tables, np.arange(8, dtype=np.int32), plan)
    gradients = te.functional.compute_gradients(
        result.routing, jnp.ones((8, DIM)), plan
    )
    te.functional.apply_gradients(tables, slots, gradients, plan)
    # Each with 136 and with 3 rows in the probe; then the slot variables and the step.
    assert calls["init"] == 3 and calls["update"] <= 5


def of_state(make_state):
    """A transformation with this state. Only its `init` matters."""
    return optax.GradientTransformation(
        lambda params: {"part": make_state(params)},
        lambda updates, state, params=None: (updates, state),
    )


GROWS_OTHERWISE = {
    "transposed": lambda x: jnp.zeros(x.shape[::-1]),
    "one_more_row": lambda x: jnp.zeros((x.shape[0] + 1, x.shape[1])),
    "rows_by_rows": lambda x: jnp.zeros((x.shape[0], x.shape[0])),
    "rows_last": lambda x: jnp.zeros((2, *x.shape)),
    "half_of_the_rows": lambda x: jnp.zeros((x.shape[0] // 2,)),
}


@pytest.mark.parametrize("make_state", GROWS_OTHERWISE.values(), ids=GROWS_OTHERWISE)
def test_parts_that_grow_otherwise_are_rejected_by_name(make_state):
    with rejects(te.optimizers.NotRowLocalError, fix="'part'"):
        slot_row_shapes(of_state(make_state), (DIM,))


def nan_at_1(count):
    return jnp.where(count == 1, jnp.nan, 0.1)


# Rules, and whether the rate of the second step is finite; None if no rate changes.
RATES = {
    "inf": (optax.adam(lambda count: jnp.where(count == 1, jnp.inf, 0.1)), False),
    "totals": (optimizers.adafactor(nan_at_1), False),
    "injected": (optax.inject_hyperparams(optax.adam)(nan_at_1), False),
    "selected": (optax.radam(nan_at_1), False),
    "every": (optimizers.every_row(optimizers.adagrad(nan_at_1)), False),
    # Its first steps compute NaN, and do not use it.
    "radam": (optax.radam(0.1), True),
    "no_bound": (
        optax.inject_hyperparams(optimizers.bounded_adagrad)(
            0.1, max_var_update=float("inf")
        ),
        True,
    ),
    "schedule": (optax.adam(optax.cosine_decay_schedule(0.1, 3)), True),
    "constant": (optax.sgd(0.1), None),
}


@pytest.mark.parametrize(
    ("rule", "expected"),
    quick_cases(with_ids(RATES), "selected", "radam", "constant", every_case=True),
)
def test_rates_that_are_not_finite_are_found(rule, expected):
    rows = jnp.ones((3, 8))
    _, state = rule.update(rows, rule.init(rows), rows)
    leaves = zip(jax.tree.leaves(state), probe_rule(rule, 8).leaves, strict=True)
    scalars = [leaf for leaf, slot in leaves if slot is None]
    found = rates_are_finite(rule, 8, scalars)
    assert (None if found is None else bool(found)) is expected
