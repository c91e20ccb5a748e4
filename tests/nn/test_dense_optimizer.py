"""What the optimizer of the dense parameters means for the tables."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen, nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases, with_ids

ADAM = optax.adam(1e-3)
MULTI_STEPS = optax.MultiSteps(ADAM, 4)
TABLE = te.TableConfig(vocabulary_size=6, dim=4, name="movie")
RULE = te.optimizers.adagrad(0.1)
WAITING = {
    "gradient_steps": te.optimizers.every_row(RULE, gradient_steps=4),
    "MultiSteps": te.optimizers.every_row(
        optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
    ),
    "fixed": optax.set_to_zero(),
}


class Model(nnx.Module):
    def __init__(self, rule=RULE, num_devices=1):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=TABLE),
            rule,
            mesh=mesh_of(num_devices),
            rngs=nnx.Rngs(0),
        )
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.dense(self.embedding(ids))


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


def of_all_parameters(tx):
    return optax.partition({"all": tx}, lambda p: jax.tree.map(lambda _: "all", p))


COLLECTING = {
    "MultiSteps": MULTI_STEPS,
    "in a chain": optax.chain(optax.clip(1.0), MULTI_STEPS.gradient_transformation()),
    "of some parameters": of_all_parameters(MULTI_STEPS.gradient_transformation()),
    "adafactor": te.optimizers.adafactor(0.1, gradient_accumulation_steps=4),
}


@pytest.mark.parametrize("tx", COLLECTING.values(), ids=COLLECTING)
def test_optimizers_that_collect_gradients_are_rejected(tx):
    with rejects(fix="te.gradients.scale(total, 1 / len(parts))"):
        make_nnx(tx)


@makers
@pytest.mark.parametrize("name", quick_cases(WAITING, "MultiSteps"))
def test_tables_that_wait_as_well_or_never_move_are_fine(make, name):
    make(MULTI_STEPS, WAITING[name])


IDS = jnp.array([1, 2, 2, 5])


def loss_of(predictions, factor):
    return factor * jnp.sum(predictions**2)


@nnx.jit
def train_step(model, optimizer, factor, **extra_args):
    compute = te.value_and_grad(lambda model: loss_of(model(IDS), factor))
    loss, gradients = compute(model)
    optimizer.update(model, gradients, **extra_args)
    return loss


def assert_equal_state(first, second):
    """Asserts equal bits, except in the counts of `apply_if_finite` and Flax."""
    for state in (first, second):
        counts = state[1].dense
        counts.step[...] = 0
        counts.opt_state = counts.opt_state.inner_state
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.to_pure_dict(nnx.state(first)),
        nnx.to_pure_dict(nnx.state(second)),
    )


PARTS = {
    "all": lambda model: model(IDS),
    "tables": lambda model: model.embedding(IDS),
    "dense": lambda model: model.dense.bias[...],
}
NOT_FINITE = [("all", "inf", 2), ("all", "nan", 8), ("tables", "nan", 1)]


@pytest.mark.parametrize(
    ("part", "bad", "num_devices"),
    quick_cases([*NOT_FINITE, ("dense", "nan", 1)], "all-inf-2", "tables-nan-1"),
)
def test_a_step_that_is_not_finite_changes_nothing(part, bad, num_devices):
    @nnx.jit
    def step(model, optimizer, factor):
        def loss_fn(model):
            return jnp.sum(model(IDS) ** 2) + factor * jnp.sum(PARTS[part](model))

        optimizer.update(model, te.value_and_grad(loss_fn)(model)[1])

    runs = []
    for factors in ((1.0, float(bad), 2.0), (1.0, 2.0)):
        model = Model(num_devices=num_devices)
        optimizer = te.Optimizer(model, optax.apply_if_finite(optax.adam(0.1), 5))
        for factor in factors:
            step(model, optimizer, factor)
        runs.append((model, optimizer))
    assert int(runs[0][1].opt_state.total_notfinite[...]) == 1
    assert_equal_state(*runs)


def test_tables_never_take_gradients_that_are_not_finite():
    """Dense parameters take them after `max_consecutive_errors`, as in optax."""
    model = Model()
    optimizer = te.Optimizer(model, optax.apply_if_finite(optax.adam(0.1), 1))
    train_step(model, optimizer, 1.0)
    expected = model.embedding.embedding_tables()["movie"]
    for _ in range(2):
        train_step(model, optimizer, jnp.nan)
    assert np.isnan(model.dense.kernel[...]).all()
    found = model.embedding.embedding_tables()["movie"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.full
def test_linen_skips_such_steps_as_well():
    states = []
    for factors in ((1.0, jnp.nan, 2.0), (1.0, 2.0)):
        state = make_linen(optax.apply_if_finite(optax.adam(0.1), 5))

        def loss_fn(variables, factor, state=state):
            return loss_of(state.apply_fn(variables, IDS), factor)

        for factor in factors:
            _, grads = te.linen.value_and_grad(loss_fn)(state.variables, factor)
            state = state.apply_gradients(grads=grads)
        states.append((state.variables, state.slots, state.opt_state.inner_state))
    jax.tree.map(np.testing.assert_array_equal, *states)


ADAM_IF_FINITE = optax.apply_if_finite(ADAM, 5)
SKIPS_MULTI_STEPS = optax.MultiSteps(
    ADAM, 4, should_skip_update_fn=optax.skip_not_finite
)
SKIPS_PART = {
    "partition": (of_all_parameters(ADAM_IF_FINITE), RULE),
    "masked": (optax.chain(optax.clip(1.0), optax.masked(ADAM_IF_FINITE, True)), RULE),
    "MultiSteps": (SKIPS_MULTI_STEPS, WAITING["gradient_steps"]),
    "inside MultiSteps": (
        optax.MultiSteps(ADAM_IF_FINITE, 4),
        WAITING["gradient_steps"],
    ),
}


@makers
@pytest.mark.parametrize(
    ("tx", "rule"),
    quick_cases(with_ids(SKIPS_PART), "masked", "MultiSteps", every_case=True),
)
def test_skips_of_a_part_are_rejected(make, tx, rule):
    with rejects(fix="optax.apply_if_finite(tx"):
        make(tx, rule)


CLIP = optax.clip_by_global_norm(1.0)
OF_WHOLE_MODEL = {
    "chain": ("clip_by_global_norm", optax.chain(CLIP, ADAM)),
    "named chain": ("clip_by_global_norm", optax.named_chain(("clip", CLIP))),
    "masked": ("clip_by_global_norm", optax.masked(optax.chain(CLIP, ADAM), True)),
    "partition": ("clip_by_global_norm", of_all_parameters(CLIP)),
    "flatten": ("clip_by_global_norm", optax.flatten(CLIP)),
    "inject_hyperparams": (
        "clip_by_global_norm",
        optax.inject_hyperparams(optax.clip_by_global_norm)(1.0),
    ),
    "apply_if_finite": ("clip_by_global_norm", optax.apply_if_finite(CLIP, 3)),
    "with_ema": ("clip_by_global_norm", te.optimizers.with_ema(CLIP)),
    "update norm": ("normalize_by_update_norm", optax.normalize_by_update_norm()),
    "NaN": ("zero_nans", optax.chain(optax.zero_nans(), ADAM)),
}


@pytest.mark.parametrize(
    ("name", "tx"),
    quick_cases(with_ids(OF_WHOLE_MODEL), "masked", "NaN", every_case=True),
)
def test_what_is_meant_for_the_whole_model_is_warned_of(name, tx):
    for make in (make_nnx, make_linen):
        with pytest.warns(UserWarning, match=rf"optax\.{name} in tx") as warned:
            make(tx)
        assert {warning.filename for warning in warned} == {__file__}


PLATEAU = optax.chain(ADAM, optax.contrib.reduce_on_plateau())
NEED_VALUE = {
    "plateau": (PLATEAU, RULE),
    "polyak": (optax.polyak_sgd(), RULE),
    "MultiSteps": (optax.MultiSteps(PLATEAU, 1), WAITING["fixed"]),
}


@pytest.mark.parametrize(("tx", "rule"), quick_cases(with_ids(NEED_VALUE), "plateau"))
def test_optimizers_that_need_the_loss(tx, rule):
    model, reference = Model(rule), Model(rule)
    optimizer = te.Optimizer(model, tx)
    expected = nnx.Optimizer(reference, tx, wrt=nnx.Param)
    gradients = te.grad(lambda m: loss_of(m(IDS), 1.0))(model)
    value = jnp.float32(3.0)
    optimizer.update(model, gradients, value=value)
    expected.update(reference, gradients.dense, value=value)
    found = (nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (model, reference))
    jax.tree.map(np.testing.assert_array_equal, *found)
    with rejects(TypeError, fix="update(model, gradients, value=loss"):
        optimizer.update(model, gradients)


def test_linen_passes_the_loss():
    state = make_linen(optax.polyak_sgd())

    def loss_fn(variables):
        return loss_of(state.apply_fn(variables, IDS), 1.0)

    loss, grads = te.linen.value_and_grad(loss_fn)(state.variables)
    new = state.apply_gradients(grads=grads, extra_args={"value": loss})
    changes, _ = state.tx.update(
        grads.dense, state.opt_state, state.variables["params"], value=loss
    )
    expected = optax.apply_updates(state.variables["params"], changes)
    jax.tree.map(np.testing.assert_array_equal, new.variables["params"], expected)
    with rejects(TypeError, fix="extra_args={'value': loss}"):
        state.apply_gradients(grads=grads)


def test_a_table_without_an_optimizer_is_warned_of():
    for make in (make_nnx, make_linen):
        with pytest.warns(UserWarning, match=r"optax\.set_to_zero") as warned:
            make(ADAM, None)
        assert {warning.filename for warning in warned} == {__file__}


def test_gradients_of_tables_that_nobody_uses_are_warned_of():
    """A plain `nnx.Optimizer` takes dense gradients, and would train no table."""
    model = Model()
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    _, gradients = te.value_and_grad(lambda m: loss_of(m(IDS), 1.0))(model)
    optimizer.update(model, gradients.dense)
    with pytest.warns(UserWarning, match=r"te\.Optimizer"):
        del gradients
        gc.collect()


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    "tx",
    [
        te.optimizers.with_ema(ADAM),
        te.optimizers.adafactor(0.1),
        te.optimizers.ftrl(0.1),
    ],
    ids=["with_ema", "adafactor", "ftrl"],
)
def test_annotated_parameters(tx):
    """Only state shaped like a parameter is sharded like it."""
    found = []
    for annotate in (True, False):
        kernel_init, bias_init = nnx.initializers.ones, nnx.initializers.zeros
        if annotate:
            kernel_init = nnx.with_partitioning(kernel_init, (None, "shard"))
            bias_init = nnx.with_partitioning(bias_init, ("shard",))
        with jax.set_mesh(mesh_of(2)):
            model = Model(num_devices=2)
            model.dense = nnx.Linear(
                4, 8, kernel_init=kernel_init, bias_init=bias_init, rngs=nnx.Rngs(0)
            )
            optimizer = te.Optimizer(model, tx)
            for factor in (1.0, 0.5):
                train_step(model, optimizer, factor)
            optimizer.finalize_variable_values(model)
        found.append(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    # XLA may fuse, and so round, sharded arithmetic differently.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5), *found)


def test_set_to_zero_keeps_one_table_of_a_layer_fixed():
    fixed = te.TableConfig(
        vocabulary_size=6, dim=4, name="fixed", optimizer=optax.set_to_zero()
    )
    int8 = te.TableConfig(
        vocabulary_size=6, dim=4, name="int8", dtype="int8", optimizer=fixed.optimizer
    )
    tables = (TABLE, fixed, int8)
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    plan = te.make_plan(features, mesh_of(1), optimizer=RULE)
    trained_tables = [t.name for stack in plan.trained_stacks for t in stack.tables]
    assert trained_tables == ["movie"]
