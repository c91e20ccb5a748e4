"""What holds for every optimizer of tables: one table of them drives all tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import (
    OPTIMIZERS,
    compilations,
    initial_state,
    logical_state,
    one_table_plan,
    update,
)
from tests.tiers import quick_cases
from tpu_embedding.optimizers.probe import slot_row_shapes
from tpu_embedding.optimizers.table_rows import table_rows, table_rows_context

VOCABULARY_SIZE, DIM = 40, 8


# Elements alone, and sums over rows.
QUICK = ("adam-one_device", "rowwise_adagrad-packed")

CONFIGURATIONS = {
    "one_device": (1, "cpu", {}),
    "three_in_rounds": (3, "cpu", {"capacity": 2}),
    "packed": (2, "v6e", {"capacity": 1}),
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


def plan_of(optimizer, configuration):
    num_devices, hardware, others = CONFIGURATIONS[configuration]
    return one_table_plan(
        optimizer,
        VOCABULARY_SIZE,
        DIM,
        mesh_of(num_devices),
        hardware=te.hardware.hardware_by_name(hardware),
        **others,
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
    """All rules, in one of the configurations in turn."""
    for number, name in enumerate(OPTIMIZERS):
        configuration = list(CONFIGURATIONS)[number % len(CONFIGURATIONS)]
        yield name, configuration


@pytest.mark.parametrize(
    ("name", "configuration"), quick_cases(rules_and_configurations(), *QUICK)
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
