"""Dense optimizers that do not fit to tables: refused, or warned of."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import tpu_embedding as te
from tests.conftest import mesh_of

ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAM)
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
    with pytest.raises(ValueError, match="table 'movie' does, got one that") as e:
        make_nnx(tx)
    assert "gradients = te.gradients.scale(total, 1 / len(parts))\n" in str(e.value)


@makers
@pytest.mark.parametrize("rule", WAITING.values(), ids=WAITING.keys())
def test_tables_that_wait_as_well_or_never_move_are_fine(make, rule):
    make(MULTI_STEPS, rule)


@makers
def test_one_warning_with_the_lines_to_write(make):
    with pytest.warns(UserWarning, match="looks at all dense gradients") as found:
        make(CLIPPED)
    (warning,) = found
    assert "te.gradients.clip_by_global_norm(gradients, 1.0)\n" in str(warning.message)
    assert warning.filename == __file__
    make(ADAM)
    make(CLIPPED, None)


def printing(updates, params):
    del params
    jax.debug.print("{}", jax.tree.leaves(updates)[0])
    return jax.tree.map(jax.jit(lambda g: 2 * g), updates)


SEPARATE = {
    "adam": optax.adam(optax.cosine_decay_schedule(0.1, 9)),
    "muon": optax.contrib.muon(0.1),
    # The model tells it the norm of all gradients.
    "global_clipnorm": te.optimizers.adafactor(0.1, global_clipnorm=1.0),
    "prints": optax.stateless(printing),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_no_warning_of_optimizers_that_look_at_each_array_alone(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_nnx(SEPARATE[name])


def by_name(of_tables):
    """Returns an optimizer with labels by name, one of them for tables."""

    def labels(params):
        return jax.tree.map_with_path(
            lambda path, _: "t" if "embedding" in jax.tree_util.keystr(path) else "d",
            params,
        )

    return optax.multi_transform({"t": of_tables, "d": ADAM}, labels)


WARM_UP = optax.linear_schedule(0.0, 0.1, 100)
MISSING_TABLES = {
    "decay": (optax.adamw(0.1), "their rows do not decay"),
    "late decay": (optax.adamw(WARM_UP), "their rows do not decay"),
    "labels": (by_name(optax.adagrad(0.1)), r"It never gets tables"),
    "frozen": (by_name(optax.set_to_zero()), r"layers \['embedding'\]"),
}


@pytest.mark.parametrize("case", MISSING_TABLES)
def test_a_warning_of_parts_that_miss_the_tables(case):
    tx, match = MISSING_TABLES[case]
    with pytest.warns(UserWarning, match=match) as warned:
        make_nnx(tx)
    assert warned[0].filename == __file__


def test_no_warning_of_parts_that_tables_have_or_nobody_expects():
    biases = optax.multi_transform(
        {"kernel": ADAM, "other": optax.sgd(0.1)},
        lambda p: jax.tree.map(lambda x: "kernel" if x.ndim == 2 else "other", p),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_nnx(optax.adamw(0.1), optax.adamw(0.1))
        make_nnx(optax.adamw(0.1), optax.adamw(WARM_UP))
        make_nnx(optax.yogi(0.1))
        make_nnx(optax.noisy_sgd(0.1, key=0))
        make_nnx(by_name(ADAM))
        make_nnx(biases)


def test_a_warning_of_apply_if_finite():
    with pytest.warns(UserWarning, match=r"te\.gradients\.all_finite"):
        make_nnx(optax.apply_if_finite(ADAM, 3))
