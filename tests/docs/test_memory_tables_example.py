"""The transformer with tables of n-grams trains like its twin with dense tables."""

import runpy

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.docs.test_example_programs import EXAMPLES

NUM_ROWS, NUM_STEPS = 300, 4


class DenseTables(nnx.Module):
    """`table[ids]`, with gradients of whole tables."""

    def __init__(self, values):
        self.rows = nnx.List([nnx.Param(rows) for rows in values])

    def __call__(self, ids):
        return [rows[...][i] for rows, i in zip(self.rows, ids, strict=True)]


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(EXAMPLES / "memory_tables.py"))


def model_of(program, mesh):
    # More n-grams than rows: some of them share a row.
    return program["LanguageModel"](NUM_ROWS, nnx.Rngs(0), mesh=mesh)


def batches(program):
    random = np.random.default_rng(0)
    return [program["text"](8, random) for _ in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def dense_losses(program):
    model = model_of(program, mesh_of(1))
    tables = model.tables.embedding_tables()
    model.tables = DenseTables([tables["2-grams"], tables["3-grams"]])
    # The rule of the tables is an optax transformation, which takes dense arrays, too.
    optimizers = {
        "table": te.optimizers.rowwise_adagrad(1.0),
        "other": optax.adam(0.01),
    }

    def labels(params):
        def label(path, leaf):
            return "table" if path[0].key == "tables" else "other"

        return jax.tree_util.tree_map_with_path(label, params)

    tx = optax.multi_transform(optimizers, labels)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, tokens):
        loss, gradients = nnx.value_and_grad(program["loss_fn"])(model, tokens)
        optimizer.update(model, gradients)
        return loss

    return [float(train_step(model, optimizer, x)) for x in batches(program)]


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("num_devices", [1, 8])
def test_losses_are_those_of_dense_tables(program, dense_losses, num_devices):
    model = model_of(program, mesh_of(num_devices))
    optimizer = te.Optimizer(model, optax.adam(0.01))
    losses = [
        float(program["train_step"](model, optimizer, x)) for x in batches(program)
    ]
    assert losses[-1] < losses[0]
    # Float32 sums in another order, through four steps of Adam.
    np.testing.assert_allclose(losses, dense_losses, rtol=1e-4)
