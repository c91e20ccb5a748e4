"""One step count for all trained tables, whichever share a stack, a layer or a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import matrix, quick_cases, with_ids
from tpu_embedding.gradients import TableGradients

ROW = 3
IDS = np.full(4, ROW, np.int32)


def feature(name, dim, rule=None):
    table = te.TableConfig(
        vocabulary_size=10,
        dim=dim,
        combiner="sum",
        name=name,
        initializer=jax.nn.initializers.zeros,
        optimizer=rule,
    )
    return te.FeatureConfig(table=table)


def features_of(dim, rule):
    """A table t1 of dim 8, and t2 of the given dim: in its stack if that is 8."""
    return {"t1": feature("t1", 8, rule), "t2": feature("t2", dim, rule)}


def loss_of(rows):
    """The derivative by each element of row `ROW` is 1."""
    return sum(jnp.sum(x) for x in jax.tree.leaves(rows)) / len(IDS)


def train(rule, dim, tasks):
    """Looks up one table per step. Returns the row of t2."""
    plan = te.make_plan(features_of(dim, rule), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)

    @jax.jit
    def step(tables, slots, batch):
        gradients = TableGradients({}, plan)
        if batch:
            result = te.functional.lookup(tables, batch, plan)
            cotangents = jax.grad(loss_of)(result.activations)
            gradients = te.functional.compute_gradients(
                result.routing, cotangents, plan
            )
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    for task in tasks:
        tables, slots = step(tables, slots, {task: IDS} if task else {})
    return te.functional.unstack_tables(tables, plan)["t2"][ROW]


T2_LAST = ("t1", "t1", "t1", "t2")
CASES = {
    "schedule": (te.optimizers.sgd(lambda count: 1.0 * count), T2_LAST, -3.0),
    "bias correction": (
        te.optimizers.adam(0.1, bias_correction=True),
        T2_LAST,
        # 0.1 of the first moment, over the root of 0.001 of the second.
        -0.1 * 0.1 / (1 - 0.9**4) * np.sqrt((1 - 0.999**4) / 0.001),
    ),
    "no table at all": (te.optimizers.sgd(lambda count: 1.0 * count), ("", "t2"), -1.0),
    "every row": (
        te.optimizers.every_row(optax.sgd(1.0, momentum=0.5)),
        ("t2", "t1", "t1", ""),
        -(1 + 0.5 + 0.25 + 0.125),
    ),
    "kept gradient": (
        te.optimizers.every_row(optax.sgd(1.0), gradient_steps=2),
        ("t2", "t1"),
        -0.5,
    ),
}


@pytest.mark.parametrize(
    ("case", "dim"),
    quick_cases(
        matrix(CASES, with_ids({"one stack": 8, "two stacks": 4})),
        "schedule-two stacks",
    ),
)
def test_a_table_moves_alike_in_every_stack(case, dim):
    rule, tasks, expected = CASES[case]
    np.testing.assert_allclose(train(rule, dim, tasks), expected, rtol=1e-5)


class NnxModel(nnx.Module):
    """A table per layer, of which each task calls one."""

    def __init__(self, rule):
        self.t1 = te.TPUEmbedding(
            feature("t1", 8), rule, mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )
        self.t2 = te.TPUEmbedding(
            feature("t2", 8), rule, mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )

    def __call__(self, task):
        return loss_of(getattr(self, task)(IDS))


class LinenModel(nn.Module):
    plans: dict[str, te.EmbeddingPlan]

    def setup(self):
        self.t1 = te.linen.TPUEmbedding(self.plans["t1"])
        self.t2 = te.linen.TPUEmbedding(self.plans["t2"])

    def __call__(self, tasks):
        return sum(loss_of(getattr(self, task)(IDS)) for task in tasks)


def nnx_parts(rule):
    model = NnxModel(rule)
    return model, te.Optimizer(model, optax.sgd(0.1))


def train_nnx(rule):
    model, optimizer = nnx_parts(rule)
    for task in T2_LAST:
        _, gradients = te.value_and_grad(lambda model, task=task: model(task))(model)
        optimizer.update(model, gradients)
    return model.t2.embedding_tables()["t2"]


def train_linen(rule):
    plans = {
        name: te.make_plan(feature(name, 8), mesh_of(1), optimizer=rule)
        for name in ("t1", "t2")
    }
    model = LinenModel(plans)
    state = te.linen.TrainState.create(
        apply_fn=model.apply,
        variables=model.init(jax.random.key(0), ("t1", "t2")),
        tx=optax.sgd(0.1),
    )
    for task in T2_LAST:
        _, gradients = te.linen.value_and_grad(model.apply)(state.variables, (task,))
        # A layer that the caller leaves out also takes the step.
        own = {path: x for path, x in gradients.tables.items() if x.stacks}
        assert own.keys() != gradients.tables.keys()
        state = state.apply_gradients(
            grads=type(gradients)(dense=gradients.dense, tables=own)
        )
    (rows,) = te.linen.embedding_tables(state.variables)["t2"].values()
    return rows


WAYS = [train_nnx, train_linen]


@pytest.mark.parametrize("train", quick_cases(WAYS, "train_nnx"))
def test_a_layer_that_the_loss_did_not_call_takes_the_step(train):
    rows = train(te.optimizers.sgd(lambda count: 1.0 * count))
    np.testing.assert_array_equal(rows[ROW], np.full(8, -3.0, np.float32))
