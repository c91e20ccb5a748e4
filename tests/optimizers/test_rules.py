"""What holds for every optimizer of tables: one table of them drives all tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tests.optimizers.rule_cases import (
    OPTIMIZERS,
    compilations,
    initial_state,
    logical_slots,
    logical_state,
    one_table_plan,
    update,
)
from tests.tiers import full_cases, matrix, quick_cases, with_ids
from tpu_embedding.optimizers.analysis.row_local import runs_on_lines
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes
from tpu_embedding.optimizers.table_rows import table_rows, table_rows_context
from tpu_embedding.rows import consecutive_rows

VOCABULARY_SIZE, DIM = 40, 8

full = pytest.mark.full


# Equal to the dense rule also where rows are skipped: gradient 0 changes nothing.
WITHOUT_MEMORY = (
    "sgd",
    "adagrad",
    "schedule",
    "rowwise_adagrad",
    "clippy_adagrad",
    "norm",
    "optax.adagrad",
)

# Elements alone, sums over rows, a count, totals of tables, optax's own.
OF_EACH_KIND = (
    "adagrad",
    "partial_rowwise_adam",
    "schedule",
    "adafactor",
    "optax.adam",
)

CONFIGURATIONS = {
    "one_device": (1, "cpu", {}),
    "three_in_rounds": (3, "cpu", {"capacity": 2}),
    "eight_packed": (8, "v6e", {}),
    "two_with_kernels": (2, "v6e", {"kernels": "interpreter"}),
}
NUM_IDS, NUM_PART = 64, 17


def batch(seed, num_rows=VOCABULARY_SIZE):
    """Ids of that many rows, each at least once, and gradients of about one."""
    generator = np.random.default_rng(seed)
    rows = generator.permutation(VOCABULARY_SIZE)[:num_rows]
    ids = np.concatenate([rows, generator.choice(rows, NUM_IDS - num_rows)])
    generator.shuffle(ids)
    return ids.astype(np.int32), np.float32(generator.normal(size=(NUM_IDS, DIM)))


EVERY_ROW_TWICE = [batch(1), batch(2)]
SOME_ROWS_TWICE = [batch(3, NUM_PART), batch(4, NUM_PART)]


def start_values(seed=0):
    return np.random.default_rng(seed).normal(size=(VOCABULARY_SIZE, DIM))


def dense_gradient(ids, cotangents):
    gradient = np.zeros((VOCABULARY_SIZE, DIM), np.float32)
    np.add.at(gradient, ids, cotangents)
    return gradient


def plan_of(optimizer, configuration, **options):
    num_devices, hardware, others = CONFIGURATIONS[configuration]
    return one_table_plan(
        optimizer,
        VOCABULARY_SIZE,
        DIM,
        mesh_of(num_devices),
        hardware=te.hardware.hardware_by_name(hardware),
        **(others | options),
    )


def lazy_steps(optimizer, steps):
    """The rule on the array of the touched rows alone, as if these were the table.

    With all rows touched that is the dense transformation of the whole table.
    """
    table = start_values().astype(np.float32)
    state = optimizer.init(jnp.asarray(table))
    has_rows = jax.tree.leaves(
        jax.tree.map(
            lambda row, part: jax.tree.map(lambda _: row is not None, part),
            slot_row_shapes(optimizer, (DIM,)),
            state,
            is_leaf=lambda row: row is None,
        )
    )
    state, tree = jax.tree.flatten(state)
    size = jnp.full((1,), VOCABULARY_SIZE, jnp.float32)

    @jax.jit
    def step(part, old, table_part):
        with table_rows_context(
            dataclasses.replace(table_rows(part), table_sizes=size)
        ):
            return optimizer.update(part, old, table_part)

    for ids, cotangents in steps:
        rows = np.unique(ids)
        part = dense_gradient(ids, cotangents)[rows]
        old = [
            np.asarray(x)[rows] if y else x
            for x, y in zip(state, has_rows, strict=True)
        ]
        updates, new = step(part, tree.unflatten(old), table[rows])
        table[rows] += updates
        state = [
            replace_rows(x, rows, part) if y else part
            for x, y, part in zip(state, has_rows, tree.flatten_up_to(new), strict=True)
        ]
        yield table.copy(), state


def replace_rows(array, rows, values):
    array = np.array(array)
    array[rows] = values
    return array


@functools.cache
def expected(name):
    return list(lazy_steps(OPTIMIZERS[name], EVERY_ROW_TWICE + SOME_ROWS_TWICE))


def rules_and_configurations():
    """All rules in one of the configurations, in turn; one of each kind in all."""
    for number, name in enumerate(OPTIMIZERS):
        for turn, configuration in enumerate(CONFIGURATIONS):
            marks = [needs_kernels] if "kernels" in configuration else []
            if turn != number % len(CONFIGURATIONS):
                if name not in OF_EACH_KIND:
                    continue
                marks.append(full)
            yield pytest.param(name, configuration, marks=marks)


@pytest.mark.parametrize(
    ("name", "configuration"),
    quick_cases(
        rules_and_configurations(),
        "adagrad-three_in_rounds",
        "adam-two_with_kernels",
    ),
)
def test_steps_equal_the_rule_on_touched_rows(name, configuration):
    """Two steps that touch every row, and two that touch some; compiled once."""
    plan = plan_of(OPTIMIZERS[name], configuration)
    first = tables, slots = initial_state(plan, start_values())
    history = []
    for ids, cotangents in EVERY_ROW_TWICE + SOME_ROWS_TWICE:
        with compilations() as compiled:
            tables, slots = update(tables, slots, ids, cotangents, plan)
        assert len(compiled) <= (not history)
        history.append([te.functional.unstack_tables(tables, plan)["table"]])
        history[-1] += logical_state(slots, plan)
    for values, (table, state) in zip(history, expected(name), strict=True):
        for value, reference in zip(values, [table, *state], strict=True):
            # Duplicates are summed in another order, then divided by roots near zero;
            # what a sum of 320 squares carries over is its rounding, of about 1e-5.
            np.testing.assert_allclose(value, reference, rtol=1e-4, atol=3e-5)
    untouched = np.setdiff1d(
        np.arange(VOCABULARY_SIZE), np.concatenate([x for x, _ in SOME_ROWS_TWICE])
    )
    assert len(untouched) > 5
    for before, after in zip(history[1], history[-1], strict=True):
        if before.shape[:1] == (VOCABULARY_SIZE,):
            assert before[untouched].tobytes() == after[untouched].tobytes()
    for old, new in zip(*map(jax.tree.leaves, (first, (tables, slots))), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


def run_dense(optimizer, steps):
    """The rule on dense gradients of the whole table; returns the table."""
    table = jnp.asarray(start_values(), jnp.float32)
    state = optimizer.init(table)

    @jax.jit
    def step(table, state, gradient):
        updates, state = optimizer.update(gradient, state, table)
        return optax.apply_updates(table, updates), state

    for ids, cotangents in steps:
        table, state = step(table, state, dense_gradient(ids, cotangents))
    return table


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_lazy_rules_without_memory_equal_dense(name):
    optimizer = OPTIMIZERS[name]
    *_, (table, _) = lazy_steps(optimizer, SOME_ROWS_TWICE)
    # Reductions over 17 rows and over 40 round differently.
    np.testing.assert_allclose(
        table, run_dense(optimizer, SOME_ROWS_TWICE), rtol=1e-5, atol=1e-6
    )


STEP_GATED = {
    "apply_every": optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
}
# Rules, and the dense ones that they must equal.
EVERY_ROW = {
    **{
        name: (te.optimizers.every_row(OPTIMIZERS[name]), OPTIMIZERS[name])
        for name in (
            "optax.sgd",
            "optax.adamw",
            "optax.lion",
            "rowwise_adagrad",
            "partial_rowwise_adam",
        )
    },
    "adam": (te.optimizers.adam(0.1, lazy_adam=False), OPTIMIZERS["adam"]),
    "MultiSteps": (
        te.optimizers.every_row(STEP_GATED["MultiSteps"]),
        STEP_GATED["MultiSteps"],
    ),
    "mean_of_two_steps": (
        te.optimizers.every_row(OPTIMIZERS["partial_rowwise_adam"], gradient_steps=2),
        optax.MultiSteps(OPTIMIZERS["partial_rowwise_adam"], 2),
    ),
    "adafactor": (
        te.optimizers.adafactor(0.1, mode="exact", gradient_accumulation_steps=2),
        optax.MultiSteps(te.optimizers.adafactor(0.1, mode="exact"), 2),
    ),
}


@pytest.mark.parametrize(
    ("name", "configuration", "options"),
    quick_cases(
        matrix(
            EVERY_ROW,
            with_ids(
                {
                    "three": ("three_in_rounds", {}),
                    "eight": ("eight_packed", {"capacity": 1}),
                }
            ),
        ),
        "optax.lion-three",
    ),
)
def test_every_row_equals_dense_for_any_touched_rows(name, configuration, options):
    """Also where each round has its own range of rows, and lines hold several."""
    optimizer, dense = EVERY_ROW[name]
    steps = SOME_ROWS_TWICE + EVERY_ROW_TWICE
    plan = plan_of(optimizer, configuration, **options)
    tables, slots = initial_state(plan, start_values())
    for ids, cotangents in steps:
        tables, slots = update(tables, slots, ids, cotangents, plan)
    # Duplicates are summed in another order, then divided by roots near zero.
    np.testing.assert_allclose(
        te.functional.unstack_tables(tables, plan)["table"],
        run_dense(dense, steps),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", STEP_GATED)
def test_step_gated_rules_need_every_row(name):
    """A row that waits for its turn would wait for its next lookup as well."""
    with pytest.raises(te.optimizers.NotRowLocalError, match="every_row"):
        one_table_plan(STEP_GATED[name], VOCABULARY_SIZE, DIM, mesh_of(1))


@full
@pytest.mark.parametrize(
    ("hardware", "kernels"),
    quick_cases(
        [
            ("cpu", None),
            pytest.param("v5p", None, marks=full),
            pytest.param("v5p", "interpreter", marks=needs_kernels),
        ],
        "v5p-interpreter",
    ),
)
def test_slots_survive_outliers(hardware, kernels):
    """A slot that is replaced drops from 1e6 to 1e-6 without a trace of the former."""
    optimizer = optax.optimistic_gradient_descent(0.1)
    plan = one_table_plan(
        *(optimizer, 4, 8, mesh_of(2)),
        hardware=te.hardware.hardware_by_name(hardware),
        kernels=kernels,
    )
    tables, slots = initial_state(plan, np.ones((4, 8)))
    ids = np.arange(4, dtype=np.int32)
    for size in (1e6, 1e-3, 1e-6):
        gradient = np.full((4, 8), size, np.float32)
        tables, slots = update(tables, slots, ids, gradient, plan)
    np.testing.assert_allclose(logical_slots(slots, plan)[0], 1e-6, rtol=1e-6)


# What looks at a row, at its size, or at all of them, cannot see several in a line.
ON_LINES = {
    **{name: True for name in ("sgd", "adagrad", "adam", "ftrl", "chain", "schedule")},
    **{name: True for name in ("inject", "options", "optax.adamw", "optax.lion")},
    **{name: False for name in ("rowwise_adagrad", "lamb", "norm", "adafactor")},
    "centralize": False,
    "factored": False,
    "by_dim": False,
}
LOOK_AT_ROWS = {
    "norm": OPTIMIZERS["norm"],
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "centralize": optax.chain(optax.centralize(), optax.sgd(0.1)),
    "factored": optax.chain(optax.scale_by_factored_rms(), optax.scale(-0.1)),
    "by_dim": optax.stateless(lambda u, p: u / p.shape[1]),
    "every_row": te.optimizers.every_row(te.optimizers.rowwise_adagrad(0.1)),
    "adafactor": te.optimizers.adafactor(0.1, mode="exact"),
}

# Totals over rows, the size of a row, a pass over all rows.
ONE_OF_EACH_REASON = ("norm", "by_dim", "every_row")


@pytest.mark.parametrize(("name", "expected"), ON_LINES.items())
def test_which_rules_run_on_lines(name, expected):
    plan = one_table_plan((OPTIMIZERS | LOOK_AT_ROWS)[name], 9, 32, mesh_of(1))
    assert runs_on_lines(plan.stacks[0].optimizer, 32, 128) is expected


@full
@needs_kernels
@pytest.mark.parametrize(
    "name",
    quick_cases(
        [
            pytest.param(name, marks=() if name in ONE_OF_EACH_REASON else full)
            for name in LOOK_AT_ROWS
        ],
        "by_dim",
    ),
)
def test_rules_that_look_at_rows_see_rows(name, monkeypatch):
    """As many as fill 128 lines, and more than one block of a pass over all."""
    monkeypatch.setattr(consecutive_rows, "_ROWS_PER_BLOCK", 256)
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 900, 2048).astype(np.int32)
    gradient = generator.normal(size=(2048, 32)).astype(np.float32)
    results = []
    for kernels in ("xla", "interpreter"):
        plan = one_table_plan(
            *(LOOK_AT_ROWS[name], 900, 32, mesh_of(2)),
            hardware=te.hardware.hardware_by_name("v5p"),
            kernels=kernels,
        )
        tables, slots = initial_state(plan, generator.permuted(np.ones((900, 32))))
        for _ in range(2):
            tables, slots = update(tables, slots, ids, gradient, plan)
        state = logical_state(slots, plan)
        results.append([te.functional.unstack_tables(tables, plan)["table"], *state])
    for with_lines, with_kernels in zip(*results, strict=True):
        np.testing.assert_allclose(with_kernels, with_lines, rtol=1e-5, atol=1e-6)


def test_every_row_excludes_sequence():
    optimizer = te.optimizers.every_row(te.optimizers.in_sequence(OPTIMIZERS["sgd"]))
    with pytest.raises(ValueError, match="at once"):
        one_table_plan(optimizer, VOCABULARY_SIZE, DIM, mesh_of(1))


@pytest.mark.parametrize("name", full_cases(OPTIMIZERS, "sgd", "adafactor"))
def test_converges(name):
    """Rows follow a target under the loss |row - target|**2 / 2.

    On a dense array, which the layer equals when every row is touched; see above.
    """
    optimizer = OPTIMIZERS[name]
    target = jnp.float32(start_values(5))

    def step(carry, _):
        table, state = carry
        updates, state = optimizer.update(table - target, state, table)
        return (table + updates, state), None

    table = jnp.zeros((VOCABULARY_SIZE, DIM))
    (table, _), _ = jax.lax.scan(step, (table, optimizer.init(table)), length=60)
    left = table - target
    assert jnp.mean(left**2) < 0.35 * jnp.mean(target**2)


@pytest.mark.parametrize("capacity", [pytest.param(None, marks=full), 1])
def test_count_advances_once_a_step_however_many_rounds(capacity):
    optimizer = te.optimizers.adam(0.1, bias_correction=True)
    plan = plan_of(optimizer, "eight_packed", capacity=capacity)
    tables, slots = initial_state(plan, start_values())
    for ids, cotangents in EVERY_ROW_TWICE + SOME_ROWS_TWICE:
        tables, slots = update(tables, slots, ids, cotangents, plan)
    assert slots["stack_0"][0].count == 4


MIXES_ROWS = {
    "trust ratio": optax.lamb(0.1),
    "noise": optax.add_noise(0.1, 0.9, 0),
    "centre all": optax.stateless(lambda u, p: u - u.mean()),
    "sort": optax.stateless(lambda u, p: jnp.sort(u, axis=0)),
    "running sum": optax.stateless(lambda u, p: jnp.cumsum(u, axis=0)),
    "flattened": optax.stateless(lambda u, p: u.reshape(-1, 4).reshape(u.shape)),
    "shift": optax.stateless(lambda u, p: jnp.roll(u, 1, axis=0)),
    "state of all rows": optax.GradientTransformation(
        lambda p: jnp.max(jnp.abs(p)), lambda u, s, p=None: (u * s, s)
    ),
    "shifted by padding": optax.stateless(
        lambda u, p: jax.lax.pad(u, 0.0, [(1, -1, 0), (0, 0, 0)])
    ),
    "number of rows": optax.stateless(lambda u, p: u / u.shape[0]),
    "by position": optax.stateless(lambda u, p: u * jnp.arange(u.shape[0])[:, None]),
}


@pytest.mark.parametrize("case", MIXES_ROWS)
def test_refuses_what_mixes_rows(case):
    with pytest.raises(te.optimizers.NotRowLocalError, match="not row-local") as error:
        te.optimizers.check_row_local(MIXES_ROWS[case], DIM)
    with pytest.raises(te.optimizers.NotRowLocalError, match="'table'") as of_plan:
        one_table_plan(MIXES_ROWS[case], VOCABULARY_SIZE, DIM, mesh_of(1))
    assert str(of_plan.value).startswith(str(error.value))


SUMS_OVER_ROWS = {
    "global norm": optax.clip_by_global_norm(1.0),
    "count of finite": optax.apply_if_finite(optax.sgd(0.1), 5),
    "custom reduction": optax.stateless(
        lambda u, p: u + jax.lax.reduce(u, 0.0, jax.lax.add, (0,))[None, :]
    ),
    "norm of the layer": optax.novograd(0.1),
    "a norm in a chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "every row": te.optimizers.every_row(optax.lamb(0.1)),
    "a name": "adam",
}


@pytest.mark.parametrize("case", SUMS_OVER_ROWS)
def test_check_row_local_accepts_what_a_plan_does(case):
    one_table_plan(SUMS_OVER_ROWS[case], VOCABULARY_SIZE, DIM, mesh_of(1))
    te.optimizers.check_row_local(SUMS_OVER_ROWS[case], DIM)


LOOPS_OVER_ROWS = {
    "map": lambda body, u: jax.lax.map(body, u),
    "map in batches": lambda body, u: jax.lax.map(body, u, batch_size=64),
    "scan": lambda body, u: jax.lax.scan(lambda c, x: (c, body(x)), 0.0, u)[1],
    "fori_loop": lambda body, u: jax.lax.fori_loop(
        0, u.shape[0], lambda i, x: body(x), u
    ),
    "Python": lambda body, u: jnp.stack([body(u[i]) for i in range(u.shape[0])]),
}


@full
def test_a_loop_in_the_state_is_refused_in_bounded_time():
    """Also where an option asks for the state while the rule is traced."""
    traced = []

    def zero(row):
        traced.append(row.shape)
        if len(traced) > 4_000:
            pytest.fail("unrolls too many rows")
        return row * 0

    rule = optax.GradientTransformation(
        lambda rows: jax.lax.map(zero, rows), lambda u, s, p=None: (u, s)
    )
    for each in (rule, te.optimizers.with_slot_storage(rule, dtype=jnp.bfloat16)):
        with pytest.raises(te.optimizers.NotRowLocalError, match=r"jax\.vmap"):
            te.optimizers.check_row_local(each, DIM)


@pytest.mark.parametrize("case", full_cases(LOOPS_OVER_ROWS, "Python", "fori_loop"))
def test_loops_over_rows_are_refused_in_bounded_time(case):
    """The bound counts traced rows; tables of 65,536 rows exceed it."""
    traced = []

    def body(row):
        traced.append(row.shape)
        if len(traced) > 4_000:
            pytest.fail("unrolls too many rows")  # No Exception, so no rule's error.
        return row / (1 + jnp.sum(row * row))

    rule = optax.stateless(lambda u, p: LOOPS_OVER_ROWS[case](body, u))
    with pytest.raises(te.optimizers.NotRowLocalError, match=r"jax\.vmap"):
        te.optimizers.check_row_local(rule, DIM)
    with pytest.raises(te.optimizers.NotRowLocalError, match=r"jax\.vmap"):
        one_table_plan(rule, VOCABULARY_SIZE, DIM, mesh_of(1))


ROW_LOCAL = {
    "centre each row": optax.stateless(lambda u, p: u - u.mean(1, keepdims=True)),
    "norm of each row": optax.stateless(
        lambda u, p: u / (jnp.linalg.norm(u, axis=1, keepdims=True) + 1)
    ),
    "rotation": optax.stateless(lambda u, p: u @ jnp.eye(DIM)),
    "sorted in row": optax.stateless(lambda u, p: jnp.sort(u, axis=1)),
    "columns": optax.stateless(lambda u, p: u * u[:, :1] + u[:, 1][:, None]),
    "joined columns": optax.stateless(
        lambda u, p: jnp.concatenate([u[:, 4:], u[:, :4]], axis=1)
    ),
    "product of rows": optax.stateless(
        lambda u, p: u * jnp.einsum("rd,rd->r", u, p)[:, None]
    ),
    "low precision": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "rprop": optax.rprop(0.1),
    "weight decay": optax.add_decayed_weights(0.1),
    "elementwise clip": optax.clip(1.0),
}


@pytest.mark.parametrize("case", ROW_LOCAL)
def test_accepts_what_treats_each_row_for_itself(case):
    te.optimizers.check_row_local(ROW_LOCAL[case], DIM)


def test_factored_state_is_refused_when_the_plan_is_made():
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match="one entry per row|row-local"):
        plan = one_table_plan(factored, VOCABULARY_SIZE, DIM, mesh_of(1))
        initial_state(plan, start_values())


@pytest.mark.parametrize("multiplies", [pytest.param(True, marks=full), False])
def test_ftrl_without_an_accumulator_gives_no_nan(multiplies):
    """Zero accumulators, zero gradients, and a rate that ramps up from 0."""
    rate = optax.linear_schedule(0.0 if multiplies else 0.1, 0.1, 3)
    optimizer = te.optimizers.ftrl(
        rate,
        initial_accumulator_value=0.0,
        allow_zero_accumulator=True,
        multiply_linear_by_learning_rate=multiplies,
    )
    plan = one_table_plan(optimizer, VOCABULARY_SIZE, DIM, mesh_of(1))
    tables, slots = initial_state(plan, start_values())
    for i, (ids, cotangents) in enumerate(SOME_ROWS_TWICE + EVERY_ROW_TWICE):
        tables, slots = update(tables, slots, ids, cotangents * (i != 0), plan)
        assert np.isfinite(te.functional.unstack_tables(tables, plan)["table"]).all()
