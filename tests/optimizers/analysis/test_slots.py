"""Slot variables are found in the state of any transformation."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes

DIM = 16
FULL, SCALAR = (DIM,), ()

OPTIMIZERS = {
    "sgd": (te.optimizers.sgd(0.1), []),
    "adagrad": (te.optimizers.adagrad(0.1), [FULL]),
    "rowwise_adagrad": (te.optimizers.rowwise_adagrad(0.1), [SCALAR]),
    "adam": (te.optimizers.adam(0.1), [FULL, FULL]),
    "optax.sgd": (optax.sgd(0.1), []),
    "optax.sgd_scheduled": (optax.sgd(lambda count: 0.1 / (1 + count)), []),
    "optax.sgd_with_momentum": (optax.sgd(0.1, momentum=0.9), [FULL]),
    "optax.adam": (optax.adam(0.1), [FULL, FULL]),
    "optax.adagrad": (optax.adagrad(0.1), [FULL]),
    "optax.adadelta": (optax.adadelta(0.1), [FULL, FULL]),
    "chain": (
        optax.chain(
            optax.clip(1.0),
            optax.scale_by_rss(),
            te.optimizers.rowwise_adagrad(0.1),
            optax.trace(0.9),
        ),
        [FULL, SCALAR, FULL],
    ),
    "inject_hyperparams": (
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        [FULL, FULL],
    ),
    "masked": (optax.masked(optax.adam(0.1), True), [FULL, FULL]),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), [FULL, FULL]),
}
every_optimizer = pytest.mark.parametrize(
    ("optimizer", "slots"), OPTIMIZERS.values(), ids=OPTIMIZERS
)


@every_optimizer
def test_slots_of(optimizer, slots):
    found = jax.tree.leaves(slot_row_shapes(optimizer, (DIM,)))
    assert [slot.shape for slot in found] == slots
    assert all(slot.dtype == jnp.float32 for slot in found)


@every_optimizer
def test_structure_is_that_of_the_state(optimizer, slots):
    del slots
    shapes = slot_row_shapes(optimizer, (DIM,))
    state = optimizer.init(jnp.zeros((5, DIM)))
    leaves = jax.tree.leaves(shapes, is_leaf=lambda x: x is None)
    assert len(leaves) == len(jax.tree.leaves(state))
    for shape, leaf in zip(leaves, jax.tree.leaves(state), strict=True):
        if shape is None:
            assert leaf.shape[:1] != (5,)
        else:
            assert leaf.shape == (5, *shape.shape)


@pytest.mark.parametrize("dim", [1, 2, 128])
@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "optax.adam"])
def test_slots_of_any_dim(name, dim):
    optimizer, slots = OPTIMIZERS[name]
    found = jax.tree.leaves(slot_row_shapes(optimizer, (dim,)))
    expected = [(dim,) if slot else () for slot in slots]
    assert [slot.shape for slot in found] == expected


def test_slots_in_the_plan():
    table = te.TableConfig(vocabulary_size=100, dim=DIM)
    optimizer, _ = OPTIMIZERS["chain"]
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1), optimizer=optimizer)
    assert [slot.shape for slot in plan.stacks[0].slots] == [FULL, SCALAR, FULL]


def transformation(make_state):
    """A transformation with this state, of which only `init` is of interest."""
    return optax.GradientTransformation(
        lambda params: {"part": make_state(params)},
        lambda updates, state, params=None: (updates, state),
    )


@pytest.mark.parametrize(
    "make_state",
    [
        lambda x: jnp.zeros((x.shape[1],)),
        lambda x: jnp.zeros((x.shape[1], x.shape[1])),
        lambda x: jnp.zeros((3, 4, 5)),
        lambda x: jnp.int32(0),
        lambda x: (),
    ],
    ids=["per_column", "square_of_columns", "constant", "count", "nothing"],
)
def test_parts_that_do_not_grow_with_the_table_are_no_slots(make_state):
    assert jax.tree.leaves(slot_row_shapes(transformation(make_state), (DIM,))) == []


def test_dtypes_of_slots():
    kinds = transformation(lambda x: jnp.zeros(x.shape, jnp.bfloat16))
    (slot,) = jax.tree.leaves(slot_row_shapes(kinds, (DIM,)))
    assert slot == jax.ShapeDtypeStruct(FULL, jnp.bfloat16)


WRONG = {
    "transposed": lambda x: jnp.zeros(x.shape[::-1]),
    "one_more_row": lambda x: jnp.zeros((x.shape[0] + 1, x.shape[1])),
    "flat": lambda x: jnp.zeros((x.size,)),
    "rows_by_rows": lambda x: jnp.zeros((x.shape[0], x.shape[0])),
    "three_axes": lambda x: jnp.zeros((*x.shape, 2)),
    "rows_behind": lambda x: jnp.zeros((2, *x.shape)),
    "half_of_the_rows": lambda x: jnp.zeros((x.shape[0] // 2,)),
}


@pytest.mark.parametrize("make_state", WRONG.values(), ids=WRONG)
def test_parts_that_grow_otherwise_are_refused_by_name(make_state):
    with pytest.raises(ValueError, match="one entry per row") as error:
        slot_row_shapes(transformation(make_state), (DIM,))
    assert re.search(r"'part'.* has shape \(", str(error.value))


def test_history_of_whole_tables_is_refused():
    with pytest.raises(ValueError, match="diff_params_memory"):
        slot_row_shapes(optax.lbfgs(0.1), (DIM,))


@pytest.mark.parametrize(
    "optimizer",
    [optax.adafactor(0.1, min_dim_size_to_factor=8), optax.sm3(0.1)],
    ids=["adafactor", "sm3"],
)
def test_factored_states_are_refused_before_training(optimizer):
    table = te.TableConfig(vocabulary_size=1000, dim=DIM)
    config = te.FeatureConfig(table=table)
    with pytest.raises(ValueError, match="row"):
        plan = te.make_plan(config, mesh_of(1), optimizer=optimizer)
        tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
        jax.eval_shape(te.functional.init_slots, tables, plan)
