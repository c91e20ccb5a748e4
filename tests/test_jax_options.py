"""Steps of a layer under options of JAX that change types, or check each result."""

import contextlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import OPTIMIZERS
from tests.tiers import matrix, quick_cases, with_ids

FEATURES = {
    f"f{k}": te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=16 + k, dim=4, name=f"t{k}")
    )
    for k in range(2)
}


def run(rule, steps=2, **options):
    """Trains a stack of two tables; returns the loss and the tables."""
    plan = te.make_plan(FEATURES, mesh_of(2), optimizer=rule, **options)
    assert len(plan.stacks) == 1
    model = te.TPUEmbedding(FEATURES, plan=plan, rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    ids = model.prepare({name: np.array([1, 2, 2, 5]) for name in FEATURES})

    @nnx.jit
    def step(model, optimizer, ids):
        loss, gradients = te.value_and_grad(
            lambda model: sum((x**2).sum() for x in jax.tree.leaves(model(ids)))
        )(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, ids) for _ in range(steps)]
    optimizer.finalize_variable_values(model)
    return losses[-1], model.embedding_tables()


@pytest.mark.parametrize("name", quick_cases(OPTIMIZERS))
def test_x64_changes_nothing(name):
    results = []
    for context in (contextlib.nullcontext(), jax.enable_x64(True)):
        with context:
            loss, tables = run(OPTIMIZERS[name])
        assert loss.dtype == np.float32
        assert {x.dtype for x in tables.values()} == {np.dtype(np.float32)}
        results.append(tables)
    for table in FEATURES.values():
        name = table.table.name
        # Constants such as beta**t are rounded at another place.
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-4)


TWIN = {"hardware": te.hardware.hardware_by_name("v5p"), "backend": "sparse_core"}


@pytest.mark.parametrize(
    ("name", "options"),
    quick_cases(matrix(OPTIMIZERS, with_ids({"xla": {}, "sparse_core": TWIN}))),
)
def test_debug_nans_finds_none(name, options):
    with jax.debug_nans(True):
        loss, _ = run(OPTIMIZERS[name], **options)
    assert np.isfinite(loss)
