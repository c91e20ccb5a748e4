"""Dense optimizers that step less often than tables are rejected."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import tpu_embedding as te
from tests.conftest import mesh_of

ADAM = optax.adam(1e-3)
MULTI_STEPS = optax.MultiSteps(ADAM, 4)
TABLE = te.TableConfig(vocabulary_size=6, dim=4, name="movie")
RULE = te.optimizers.adagrad(0.1)
WAITING = {
    "gradient_steps": te.optimizers.every_row(RULE, gradient_steps=4),
    "MultiSteps": te.optimizers.every_row(
        optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
    ),
    "fixed": None,
}


class Model(nnx.Module):
    def __init__(self, rule=RULE):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=TABLE), rule, mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))


class LinenModel(linen.Module):
    plan: te.EmbeddingPlan

    @linen.compact
    def __call__(self, ids):
        return linen.Dense(1)(te.linen.TPUEmbedding(self.plan)(ids))


def make_nnx(tx, rule=RULE):
    return te.Optimizer(Model(rule), tx)


def make_linen(tx, rule=RULE):
    plan = te.make_plan(te.FeatureConfig(table=TABLE), mesh_of(1), optimizer=rule)
    model = LinenModel(plan)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.array([1, 2]))
    return te.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


makers = pytest.mark.parametrize("make", [make_nnx, make_linen])

COLLECTING = {
    "MultiSteps": MULTI_STEPS,
    "in a chain": optax.chain(
        optax.clip(1.0), MULTI_STEPS.gradient_transformation(), optax.scale(0.5)
    ),
    "of some parameters": optax.partition(
        {"all": MULTI_STEPS.gradient_transformation()},
        lambda params: jax.tree.map(lambda _: "all", params),
    ),
    "adafactor": te.optimizers.adafactor(0.1, gradient_accumulation_steps=4),
}


@pytest.mark.parametrize("tx", COLLECTING.values(), ids=COLLECTING.keys())
def test_optimizers_that_collect_gradients_are_refused(tx):
    with pytest.raises(ValueError, match="table 'movie', got one that") as e:
        make_nnx(tx)
    assert "gradients = te.gradients.scale(total, 1 / len(parts))\n" in str(e.value)


@makers
@pytest.mark.parametrize("rule", WAITING.values(), ids=WAITING.keys())
def test_tables_that_wait_as_well_or_never_move_are_fine(make, rule):
    make(MULTI_STEPS, rule)
