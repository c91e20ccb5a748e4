"""Slot variables by table and name: read, set, and rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import initial_state_of_tables, plan_of_tables
from tests.rejections import ANY, rejects
from tests.tiers import quick_cases

SIZES, DIM = {"a": 37, "b": 1, "c": 5}, 3
opt = te.optimizers


def plan_of(optimizer, num_devices=8, hardware="v5p", names=tuple(SIZES)):
    sizes = {name: SIZES[name] for name in names}
    return plan_of_tables(sizes, DIM, optimizer, num_devices, hardware)


def start_of(plan):
    values = {
        table.name: np.ones((table.config.vocabulary_size, DIM), np.float32)
        for stack in plan.stacks
        for table in stack.tables
    }
    return initial_state_of_tables(plan, values)


def random_like(values):
    """Other values of the same shapes; counts of one table and the next are equal."""
    generator = np.random.default_rng(0)

    def change(array):
        if array.dtype == bool:
            return ~array
        if array.shape == ():
            return np.asarray(7, array.dtype)
        numbers = 100 * generator.uniform(size=array.shape)
        return numbers.astype(array.dtype)

    return {
        table: {name: change(x) for name, x in of_table.items()}
        for table, of_table in values.items()
    }


def shapes(values):
    return {
        table: {name: x.shape for name, x in of_table.items()}
        for table, of_table in values.items()
    }


def assert_equal(actual, expected):
    assert shapes(actual) == shapes(expected)
    for table, of_table in expected.items():
        for name, array in of_table.items():
            np.testing.assert_array_equal(actual[table][name], array)
            assert actual[table][name].dtype == array.dtype


def a_row_optimizer(gradient, row, slots, rate, _):
    return row - rate * gradient, *slots


NAMES = {
    "ftrl": (opt.ftrl(0.1), {"accumulators": 2, "linears": 2}),
    "frequency": (opt.frequency_aware_adagrad(0.1), {"accumulators": 2, "counters": 1}),
    "user_defined": (
        opt.user_defined(
            *(a_row_optimizer, 0.1),
            slot_names=["z", "y"],
            slot_initializers=[0.0, 1.0],
            slot_dims=[2, 1],
        ),
        {"z": 2, "y": 1},
    ),
    "inject": (
        optax.inject_hyperparams(opt.adagrad)(learning_rate=0.1),
        {"accumulators": 2},
    ),
    "one array": (
        optax.GradientTransformation(jnp.zeros_like, lambda g, s, _: (-g, s + g**2)),
        {"state": 2},
    ),
    "two of a kind": (
        optax.chain(optax.trace(0.9), optax.trace(0.5), optax.scale(-0.1)),
        {"0/trace": 2, "1/trace": 2},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes(name):
    optimizer, expected = NAMES[name]
    plan = plan_of(optimizer, 1)
    _, slots = start_of(plan)
    found = shapes(te.functional.slot_values(slots, plan))
    assert list(found) == list(SIZES)
    for table, size in SIZES.items():
        assert found[table] == {
            slot: (size, DIM)[:rank] for slot, rank in expected.items()
        }


ALL = {
    "exact adafactor": (
        opt.adafactor(0.1, mode="exact"),
        {
            "count": (),
            "column_accumulators": (DIM,),
            "squares/value": (),
            "squares/rest": (),
            "clock/value": (),
            "clock/rest": (),
        },
    ),
    "bools": (
        optax.GradientTransformation(
            lambda rows: {"has_begun": jnp.zeros((), bool)},
            lambda gradient, state, rows: (
                -gradient,
                {"has_begun": ~jnp.zeros((), bool)},
            ),
        ),
        {"has_begun": ()},
    ),
}


@pytest.mark.parametrize("name", quick_cases(ALL, "bools"))
def test_all_of_a_state_is_read_and_set(name):
    optimizer, others = ALL[name]
    plan = plan_of(optimizer, 2)
    _, slots = start_of(plan)
    rows, values = (
        te.functional.slot_values(slots, plan),
        te.functional.slot_values(slots, plan, "all"),
    )
    for table, of_table in values.items():
        found = {key: x.shape for key, x in of_table.items() if key not in rows[table]}
        assert found == others
    new = random_like(values)
    changed = te.functional.with_slot_values(slots, new, plan)
    assert_equal(te.functional.slot_values(changed, plan, "all"), new)
    # Compiled steps still fit, and the old state is as it was.
    for before, after in zip(
        jax.tree.leaves(slots), jax.tree.leaves(changed), strict=True
    ):
        assert before.sharding == after.sharding
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
    assert_equal(te.functional.slot_values(slots, plan, "all"), values)


def test_tables_without_an_optimizer_have_no_slots():
    trained = te.TableConfig(
        vocabulary_size=4, dim=2, name="trained", optimizer="adagrad"
    )
    frozen = te.TableConfig(vocabulary_size=4, dim=2, name="frozen")
    plan = te.make_plan([te.FeatureConfig(table=t) for t in (trained, frozen)])
    slots = te.functional.init_slots(
        te.functional.init_tables(plan, jax.random.key(0)), plan
    )
    assert set(te.functional.slot_values(slots, plan)) == {"trained"}
    with rejects(field="values", value="frozen", fix="['trained']"):
        te.functional.with_slot_values(slots, {"frozen": {}}, plan)
    assert te.functional.slot_values({}, plan) == {}


WRONG = {
    "table": ({"d": {}}, "values", "d"),
    "slot": ({"a": {"nu": np.ones((37, 3))}}, "values of table 'a'", "nu"),
    "shape": (
        {"b": {"accumulators": np.ones((2, 3))}},
        *("values of slot 'accumulators' of table 'b'", (2, 3)),
    ),
    "complex": (
        {"b": {"accumulators": np.ones((1, 3), complex)}},
        *("values of slot 'accumulators' of table 'b'", ANY),
    ),
    "fractions": (
        {"b": {"counters": np.array([1.5])}},
        *("values of slot 'counters' of table 'b'", [1.5]),
    ),
    "counts": ({"a": {"count": 1}, "b": {"count": 2}}, "values of 'count'", [1, 2]),
}


def test_wrong_values_are_rejected():
    plan = plan_of(opt.frequency_aware_adagrad(0.1), 1, "cpu")
    _, slots = start_of(plan)
    for values, field, value in WRONG.values():
        with rejects(field=field, value=value):
            te.functional.with_slot_values(slots, values, plan)
