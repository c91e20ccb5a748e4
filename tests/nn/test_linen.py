"""The Linen layer: equal to NNX and to plain functions, and errors of misuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training import train_state

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import full_cases

BATCH, DIM = 12, 4
VOCABULARY_SIZE = 50
# Its state has counts of steps beside the slot variables.
SCHEDULED = te.optimizers.adagrad(optax.linear_schedule(0.2, 0.1, 9))


def make_config():
    item, user = (
        te.TableConfig(vocabulary_size=size, dim=DIM, combiner="sum", name=name)
        for name, size in (("item", VOCABULARY_SIZE), ("user", 30))
    )
    return {
        "item": te.FeatureConfig(table=item),
        "past": te.FeatureConfig(table=item),
        "user": te.FeatureConfig(table=user),
    }


@functools.cache
def plan_of(num_devices, optimizer=None):
    return te.make_plan(make_config(), mesh_of(num_devices), optimizer=optimizer)


@functools.cache
def trained_plan(num_devices=1):
    return plan_of(num_devices, te.optimizers.adagrad(0.1))


def make_batch(seed=0):
    generator = np.random.default_rng(seed)
    past = generator.integers(0, VOCABULARY_SIZE, (BATCH, 3))
    past[generator.random(past.shape) < 0.5] = te.inputs.PADDING_ROW_ID
    ids = {
        "item": generator.integers(0, VOCABULARY_SIZE, BATCH),
        "past": past,
        "user": generator.integers(0, 30, BATCH),
    }
    dense = generator.normal(size=(BATCH, 3)).astype(np.float32)
    labels = generator.integers(0, 2, BATCH).astype(np.float32)
    return {"ids": ids, "dense": dense, "labels": labels}


def interact(bottom, activations):
    """The interactions of a DLRM: dot products of all pairs of vectors."""
    vectors = jnp.stack([bottom, *jax.tree.leaves(activations)], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = np.triu_indices(4, k=1)
    return jnp.concatenate([bottom, products[:, rows, columns]], axis=1)


def loss_of(logits, batch):
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["labels"]).mean()


class LinenModel(nn.Module):
    plan: te.EmbeddingPlan

    @nn.compact
    def __call__(self, batch):
        activations = te.linen.TPUEmbedding(self.plan, name="embedding")(batch["ids"])
        bottom = nn.Dense(DIM, name="bottom")(batch["dense"])
        return nn.Dense(1, name="top")(interact(bottom, activations))


class NnxModel(nnx.Module):
    def __init__(self, plan):
        rngs = nnx.Rngs(0)
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.bottom = nnx.Linear(3, DIM, rngs=rngs)
        self.top = nnx.Linear(DIM + 6, 1, rngs=rngs)

    def __call__(self, batch):
        activations = self.embedding(batch["ids"])
        return self.top(interact(self.bottom(batch["dense"]), activations))


def linen_loss(model, batch):
    return lambda variables: loss_of(model.apply(variables, batch), batch)


def make_state(model, batch, tx=None):
    variables = model.init(jax.random.key(0), batch)
    tx = tx or optax.adam(0.01)
    return te.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


def run_linen(plan, num_steps):
    model = LinenModel(plan)
    state = make_state(model, make_batch())
    initial = jax.tree.map(np.array, state.variables["params"])
    initial_tables = te.linen.embedding_tables(state.variables)["embedding"]

    def step(state, batch):
        compute = te.linen.value_and_grad(linen_loss(model, batch))
        loss, gradients = compute(state.variables)
        return state.apply_gradients(grads=gradients), loss

    step = jax.jit(step, donate_argnums=0)
    losses = []
    for seed in range(num_steps):
        state, loss = step(state, make_batch(seed))
        losses.append(loss)
    tables = te.linen.embedding_tables(state.variables)["embedding"]
    return initial, initial_tables, (losses, tables)


def run_nnx(plan, num_steps, initial, initial_tables):
    model = NnxModel(plan)
    model.embedding.set_embedding_tables(initial_tables)
    for name, layer in (("bottom", model.bottom), ("top", model.top)):
        layer.kernel.set_value(jnp.array(initial[name]["kernel"]))
    optimizer = te.Optimizer(model, optax.adam(0.01))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        compute = te.value_and_grad(lambda model: loss_of(model(batch), batch))
        loss, gradients = compute(model)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, make_batch(seed)) for seed in range(num_steps)]
    return losses, model.embedding.embedding_tables()


def run_functional(plan, num_steps, initial, initial_tables):
    tables = te.functional.init_tables(plan, jax.random.key(0))
    tables = te.functional.with_table_values(tables, initial_tables, plan)
    slots, tx = te.functional.init_slots(tables, plan), optax.adam(0.01)
    opt_state = tx.init(initial)

    def dense_part(params, activations, batch):
        bottom = batch["dense"] @ params["bottom"]["kernel"] + params["bottom"]["bias"]
        joined = interact(bottom, activations)
        logits = joined @ params["top"]["kernel"] + params["top"]["bias"]
        return loss_of(logits, batch)

    @jax.jit
    def step(tables, slots, params, opt_state, batch):
        found = te.functional.lookup(tables, batch["ids"], plan)
        compute = jax.value_and_grad(dense_part, argnums=(0, 1))
        loss, (by_params, cotangents) = compute(params, found.activations, batch)
        changes, opt_state = tx.update(by_params, opt_state)
        gradients = te.functional.compute_gradients(found.routing, cotangents, plan)
        tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
        return tables, slots, optax.apply_updates(params, changes), opt_state, loss

    losses, values = [], (tables, slots, initial, opt_state)
    with jax.numpy_rank_promotion("allow"):
        for seed in range(num_steps):
            *values, loss = step(*values, make_batch(seed))
            losses.append(loss)
    return losses, te.functional.unstack_tables(values[0], plan)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_devices", "num_steps"),
    [(3, 20), *(pytest.param(n, 200, marks=pytest.mark.full) for n in (1, 8))],
)
def test_linen_nnx_and_functions_train_alike(num_devices, num_steps):
    plan = trained_plan(num_devices)
    initial, initial_tables, (losses, tables) = run_linen(plan, num_steps)
    assert np.std(losses) > 0
    for run in (run_nnx, run_functional):
        other_losses, other_tables = run(plan, num_steps, initial, initial_tables)
        np.testing.assert_array_equal(losses, other_losses)
        for name, values in tables.items():
            np.testing.assert_array_equal(values, other_tables[name], err_msg=name)


@pytest.mark.full
def test_a_step_compiles_once_and_donates():
    model, traces = LinenModel(trained_plan(3)), []
    state = make_state(model, make_batch())

    def step(state, batch):
        traces.append(1)
        compute = te.linen.value_and_grad(linen_loss(model, batch))
        loss, gradients = compute(state.variables)
        return state.apply_gradients(grads=gradients), loss

    step = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        old = jax.tree.leaves((state.variables, state.slots))
        state, _ = step(state, make_batch())
        assert all(leaf.is_deleted() for leaf in old if leaf.ndim)
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert state.step == 3


def test_init_makes_tables_once_on_the_mesh():
    made = []

    def initializer(key, shape, dtype):
        made.append(shape)
        return jnp.ones(shape, dtype)

    table = te.TableConfig(
        vocabulary_size=9, dim=4, initializer=initializer, name="item"
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(3), optimizer=te.optimizers.sgd(0.1)
    )
    model, ids = Towers(plan), jnp.arange(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, ids)
    made.clear()
    variables = jax.jit(model.init)(jax.random.key(0), ids, ids)
    assert len(made) <= 1  # none, if the trace for the shapes is still there
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    (lines,) = jax.tree.leaves(variables["embedding_tables"])
    assert lines.sharding.is_equivalent_to(plan.batch_sharding, lines.ndim)
    assert set(variables) == {"params", "embedding_tables"}


class Towers(nn.Module):
    """Two calls of one layer."""

    plan: te.EmbeddingPlan

    def setup(self):
        self.embedding = te.linen.TPUEmbedding(self.plan)

    def __call__(self, left, right):
        return jnp.sum(self.embedding(left) * self.embedding(right), axis=1)


@functools.cache
def towers_plan(num_devices=2):
    table = te.TableConfig(vocabulary_size=20, dim=4, name="item")
    feature = te.FeatureConfig(table=table)
    rule = te.optimizers.sgd(0.5)
    return te.make_plan(feature, mesh_of(num_devices), optimizer=rule)


def test_gradients_of_several_calls_and_layers_are_added():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, left, right):
            towers = Towers(towers_plan(), name="towers")(left, right)
            other = te.linen.TPUEmbedding(towers_plan(), name="other")(left)
            te.linen.TPUEmbedding(towers_plan(), name="idle")
            return towers + jnp.sum(other, axis=1)

    left, right = np.array([[1, 5, 1, 7], [5, 2, 2, 9]])
    model = Model()
    variables = model.init(jax.random.key(0), left, right)
    tables = te.linen.embedding_tables(variables)
    state = te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1)
    )

    def loss_fn(variables):
        return jnp.sum(model.apply(variables, left, right) ** 2)

    def dense_loss(towers, other):
        product = jnp.sum(towers[left] * towers[right], axis=1)
        return jnp.sum((product + jnp.sum(other[left], axis=1)) ** 2)

    loss, gradients = te.linen.value_and_grad(loss_fn)(state.variables)
    expected = {path: tables[path]["item"] for path in ("towers/embedding", "other")}
    by_path = jax.grad(dense_loss, argnums=(0, 1))(*map(jnp.array, expected.values()))
    np.testing.assert_allclose(
        te.gradients.global_norm(gradients), optax.global_norm(by_path), rtol=1e-5
    )
    state = state.apply_gradients(grads=gradients)
    tables = te.linen.embedding_tables(state.variables)
    for (path, before), gradient in zip(expected.items(), by_path, strict=True):
        np.testing.assert_allclose(
            tables[path]["item"], before - 0.5 * gradient, rtol=1e-5, atol=1e-6
        )


@pytest.mark.full
def test_statistics_move_on_and_lookup_stats_are_sown():
    class Model(nn.Module):
        plan: te.EmbeddingPlan

        @nn.compact
        def __call__(self, ids):
            layer = te.linen.TPUEmbedding(self.plan, name="embedding")
            found = layer(ids, {name: jnp.full(ids[name].shape, 2.0) for name in ids})
            return nn.BatchNorm(use_running_average=False)(found["item"])

    model, ids = Model(trained_plan(2)), make_batch()["ids"]
    state = make_state(model, ids)

    def loss_fn(variables):
        mutable = ["batch_stats", "intermediates"]
        out, updates = state.apply_fn(variables, ids, mutable=mutable)
        return jnp.mean(out**3), updates

    compute = te.linen.value_and_grad(loss_fn, has_aux=True)
    (_, updates), gradients = compute(state.variables)
    (stats,) = updates.pop("intermediates")["embedding"]["lookup_stats"]
    assert stats.rounds == {"stack_0": 1}
    new = state.apply_gradients(grads=gradients, updates=updates)
    item = te.linen.embedding_tables(state.variables)["embedding"]["item"]
    np.testing.assert_allclose(
        new.variables["batch_stats"]["BatchNorm_0"]["mean"],
        0.01 * jnp.mean(2 * item[ids["item"]], axis=0),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.full
def test_orbax_restores_under_the_same_plan_only(tmp_path):
    batch = make_batch()
    model = LinenModel(trained_plan(2))
    state = make_state(model, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
        jax.tree.map(np.testing.assert_array_equal, restored, state)
        other = make_state(LinenModel(trained_plan(3)), batch)
        with pytest.raises(ValueError, match="stack_0"):
            checkpointer.restore(tmp_path / "state", other)


@pytest.mark.full
def test_flax_bytes_restore_under_the_same_plan_only():
    batch, tx = make_batch(), optax.adam(0.01)
    model = LinenModel(plan_of(2, SCHEDULED))
    state = make_state(model, batch, tx)
    _, gradients = te.linen.value_and_grad(linen_loss(model, batch))(state.variables)
    trained = state.apply_gradients(grads=gradients)
    saved = serialization.to_bytes(trained)
    restored = serialization.from_bytes(state, saved)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)
    for found, lines in zip(
        jax.tree.leaves(restored.variables["embedding_tables"]),
        jax.tree.leaves(trained.variables["embedding_tables"]),
        strict=True,
    ):
        assert found.sharding == lines.sharding
    other = make_state(LinenModel(plan_of(3, SCHEDULED)), batch, tx)
    with pytest.raises(ValueError, match="saved under the plan .*embedding_tables"):
        serialization.from_bytes(other, saved)


@pytest.mark.full
def test_averages_are_swapped_in_as_with_nnx():
    """The variables that `finalize_variable_values` sets, dense ones and tables."""
    rule = te.optimizers.adafactor(0.1, use_ema=True, ema_momentum=0.5)
    plan, batch = plan_of(2, rule), make_batch()
    linen = LinenModel(plan)
    state = make_state(linen, batch, rule)
    model = NnxModel(plan)
    tables = te.linen.embedding_tables(state.variables)["embedding"]
    model.embedding.set_embedding_tables(tables)
    for name in ("bottom", "top"):
        kernel = np.array(state.variables["params"][name]["kernel"])
        getattr(model, name).kernel.set_value(jnp.array(kernel))
    optimizer = te.Optimizer(model, rule)
    for seed in range(2):
        batch = make_batch(seed)
        compute = te.linen.value_and_grad(linen_loss(linen, batch))
        state = state.apply_gradients(grads=compute(state.variables)[1])
        compute = te.value_and_grad(lambda m, batch: loss_of(m(batch), batch))
        optimizer.update(model, compute(model, batch)[1])
    last = te.linen.embedding_tables(state.variables)["embedding"]
    state = state.finalize_variable_values()
    optimizer.finalize_variable_values(model)
    found = te.linen.embedding_tables(state.variables)["embedding"]
    expected = model.embedding.embedding_tables()
    for name, values in found.items():
        # The two programs may fuse the rule's sums in another way.
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-7)
        assert (values != last[name]).any()
    for name in ("bottom", "top"):
        np.testing.assert_allclose(
            state.variables["params"][name]["kernel"],
            getattr(model, name).kernel.get_value(),
            **dict(rtol=1e-5, atol=1e-7),
        )
    without_averages = make_state(LinenModel(trained_plan()), batch)
    same = without_averages.finalize_variable_values()
    jax.tree.map(np.testing.assert_array_equal, same, without_averages)


def call_in(transform):
    """Returns a model whose layer is within a submodule that Linen transforms."""

    class Part(nn.Module):
        plan: te.EmbeddingPlan

        @nn.compact
        def __call__(self, ids):
            return te.linen.TPUEmbedding(self.plan)(ids)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return transform(Part)(towers_plan(), name="part")(ids)

    return Model()


SHARED = {"params": None, "embedding_tables": None}


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, ids):
        def body(layer, carry, ids):
            return carry, layer(ids)

        layer = te.linen.TPUEmbedding(towers_plan())
        scan = nn.scan(
            body, variable_broadcast=list(SHARED), split_rngs={"params": False}
        )
        return scan(layer, 0, ids)[1]


TRANSFORMS = {
    "jit": call_in(nn.jit),
    "remat": call_in(nn.remat),
    "vmap": call_in(
        lambda part: nn.vmap(part, variable_axes=SHARED, split_rngs={"params": False})
    ),
    "scan": Scanned(),
}


@pytest.mark.parametrize("name", full_cases(TRANSFORMS, "jit"))
def test_transformed_layers_look_up_and_refuse_to_lose_gradients(name):
    model, ids = TRANSFORMS[name], np.arange(12).reshape(3, 4)
    if name in ("jit", "remat"):
        ids = ids[0]
    variables = model.init(jax.random.key(0), ids)
    (tables,) = te.linen.embedding_tables(variables).values()
    np.testing.assert_array_equal(model.apply(variables, ids), tables["item"][ids])

    def loss_fn(variables):
        return jnp.sum(model.apply(variables, ids))

    with pytest.raises(ValueError, match="gradient of its tables would be lost"):
        te.linen.value_and_grad(loss_fn)(variables)


def test_weights_of_ids_can_be_learned():
    class Weighted(nn.Module):
        @nn.compact
        def __call__(self, ids):
            weights = self.param("weights", nn.initializers.ones, ids.shape)
            return te.linen.TPUEmbedding(towers_plan())(ids, weights)

    model, ids = Weighted(), np.arange(8).reshape(4, 2)
    variables = model.init(jax.random.key(0), ids)
    compute = te.linen.value_and_grad(lambda v: jnp.sum(model.apply(v, ids)[:, 0] ** 2))
    (tables,) = te.linen.embedding_tables(variables).values()

    def dense_loss(weights):
        rows = tables["item"][ids][..., 0]
        return jnp.sum((jnp.sum(rows * weights, 1) / jnp.sum(weights, 1)) ** 2)

    np.testing.assert_allclose(
        compute(variables)[1].dense["weights"],
        jax.grad(dense_loss)(jnp.ones(ids.shape)),
        rtol=1e-4,
        atol=1e-6,
    )


def test_calls_with_some_features_and_with_others():
    layer, ids = te.linen.TPUEmbedding(trained_plan(2)), make_batch()["ids"]
    variables = layer.init(jax.random.key(0), ids)
    tables = te.linen.embedding_tables(variables)[""]
    table = te.TableConfig(
        vocabulary_size=VOCABULARY_SIZE, dim=DIM, combiner="sum", name="item"
    )
    serving_config = {"candidates": te.FeatureConfig(table=table)}

    def loss_fn(variables):
        some = layer.apply(variables, {"user": ids["user"]})
        candidates = {"candidates": ids["item"]}
        others = layer.apply(variables, candidates, serving_config=serving_config)
        return jnp.sum(some["user"] ** 2) + jnp.sum(others["candidates"] ** 2)

    loss, gradients = te.linen.value_and_grad(loss_fn)(variables)
    used = {"user": tables["user"][ids["user"]], "item": tables["item"][ids["item"]]}
    np.testing.assert_allclose(
        loss, sum(np.sum(rows**2) for rows in used.values()), rtol=1e-5
    )

    def dense_loss(tables):
        return sum(jnp.sum(tables[name][ids[name]] ** 2) for name in used)

    np.testing.assert_allclose(
        te.gradients.global_norm(gradients),
        optax.global_norm(jax.grad(dense_loss)(jax.tree.map(jnp.array, tables))),
        rtol=1e-5,
    )


def test_tables_without_optimizer_allow_plain_gradients():
    model, batch = LinenModel(plan_of(2)), make_batch()
    variables = model.init(jax.random.key(0), batch)
    assert set(variables["params"]) == {"bottom", "top"}

    def loss_fn(params):
        return linen_loss(model, batch)({**variables, "params": params})

    gradients = jax.grad(loss_fn)(variables["params"])
    assert optax.global_norm(gradients) > 0


def test_tables_can_be_replaced():
    model, batch = LinenModel(trained_plan(3)), make_batch()
    variables = model.init(jax.random.key(0), batch)
    values = np.arange(30 * DIM, dtype=np.float32).reshape(30, DIM)
    variables = te.linen.with_embedding_tables(
        variables, {"embedding": {"user": values}}
    )
    tables = te.linen.embedding_tables(variables)["embedding"]
    np.testing.assert_array_equal(tables["user"], values)


def plain_train_state(model, variables, batch):
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=variables["params"], tx=optax.sgd(0.1)
    )
    rest = {"embedding_tables": variables["embedding_tables"]}
    jax.grad(lambda params: linen_loss(model, batch)({"params": params, **rest}))(
        state.params
    )


def apply_with_tables_of(plan, variables):
    other = LinenModel(plan).init(jax.random.key(0), make_batch())
    tables = {"embedding_tables": other["embedding_tables"]}
    LinenModel(trained_plan()).apply({**variables, **tables}, make_batch())


def apply_gradients_of(plan, variables):
    model, batch = LinenModel(plan), make_batch()
    other = model.init(jax.random.key(0), batch)
    _, gradients = te.linen.value_and_grad(linen_loss(model, batch))(other)
    make_state(LinenModel(trained_plan()), batch).apply_gradients(grads=gradients)


def apply_gradients_with(model, variables, batch, **arguments):
    grads = te.gradients.Gradients(dense={}, tables={})
    make_state(model, batch).apply_gradients(**{"grads": grads, **arguments})


class PlansInside(nn.Module):
    """Makes a plan in each call; the optimizers of two plans are two."""

    @nn.compact
    def __call__(self, batch):
        plan = te.make_plan(make_config(), mesh_of(1), optimizer=te.optimizers.sgd(0.1))
        return LinenModel(plan)(batch)


def train_with_plans_inside(model, variables, batch):
    model = PlansInside()
    variables = model.init(jax.random.key(0), batch)
    jax.jit(model.apply)(variables, batch)
    te.linen.value_and_grad(linen_loss(model, batch))(variables)


MISUSE = {
    "plain gradients": (plain_train_state, ValueError, r"te.linen.value_and_grad"),
    "plain gradients of everything": (
        lambda m, v, b: jax.grad(linen_loss(m, b))(v),
        ValueError,
        "no dense derivative|would never train",
    ),
    "loss by parameters only": (
        lambda m, v, b: te.linen.value_and_grad(linen_loss(m, b))(v["params"]),
        ValueError,
        "Pass all variables that model.init returned",
    ),
    "no tables": (
        lambda m, v, b: m.apply({"params": v["params"]}, b),
        ValueError,
        "TPUEmbedding 'embedding' needs its tables",
    ),
    "tables in other classes": (
        lambda m, v, b: m.apply(
            {**v, "embedding_tables": {"embedding": {"tables": {}}}}, b
        ),
        (TypeError, ValueError),
        "'embedding'",
    ),
    "tables of another plan": (
        lambda m, v, b: apply_with_tables_of(trained_plan(2), v),
        ValueError,
        "num_shards: 2, not 1|num_shards: 1, not 2",
    ),
    "gradients of another plan": (
        lambda m, v, b: apply_gradients_of(trained_plan(2), v),
        ValueError,
        "computed with another plan",
    ),
    "gradients of another model": (
        lambda m, v, b: apply_gradients_with(
            m, v, b, grads=te.gradients.Gradients(dense={}, tables={"tower": None})
        ),
        ValueError,
        r"layers of the model, \['embedding'\], got unknown layers \['tower'\]",
    ),
    "gradients of jax.grad": (
        lambda m, v, b: apply_gradients_with(m, v, b, grads=v["params"]),
        TypeError,
        "lacks those of the tables",
    ),
    "unknown updates": (
        lambda m, v, b: apply_gradients_with(m, v, b, updates={"cache": {}}),
        ValueError,
        r"unknown collections \['cache'\]",
    ),
    "a plan per call": (
        train_with_plans_inside,
        ValueError,
        "make the plan once, outside of the modules",
    ),
    "jit inside": (
        lambda m, v, b: te.linen.value_and_grad(jax.jit(linen_loss(m, b)))(v),
        ValueError,
        "jax.jit belongs around the whole step",
    ),
    "state without tables": (
        lambda m, v, b: te.linen.TrainState.create(
            apply_fn=m.apply, variables={"params": v["params"]}, tx=optax.sgd(0.1)
        ),
        ValueError,
        "collection 'embedding_tables'",
    ),
    "values of an unknown layer": (
        lambda m, v, b: te.linen.with_embedding_tables(v, {"tower": {}}),
        ValueError,
        "unknown layers",
    ),
}


@pytest.mark.parametrize(
    "case",
    full_cases(
        MISUSE,
        "gradients of another plan",
        "gradients of another model",
        "gradients of jax.grad",
        "a plan per call",
    ),
)
def test_misuse_gives_one_clear_error(case):
    call, error, match = MISUSE[case]
    model, batch = LinenModel(trained_plan()), make_batch()
    variables = model.init(jax.random.key(0), batch)
    with pytest.raises(error, match=match):
        call(model, variables, batch)


def test_linen_layer_in_an_nnx_model_looks_up_and_refuses_to_train():
    ids = np.arange(4)
    layer = te.linen.TPUEmbedding(towers_plan())
    model = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(ids)
    assert model(ids).shape == (4, 4)

    def loss_fn(model):
        return jnp.sum(model(ids))

    for compute in (te.value_and_grad(loss_fn), nnx.grad(loss_fn)):
        with pytest.raises(ValueError, match="te.TPUEmbedding in place of nnx.bridge"):
            compute(model)


def test_nnx_layer_in_a_linen_model_is_refused():
    """The bridge would make the layer, with new tables, in each `apply`."""
    model = nnx.bridge.to_linen(te.TPUEmbedding, None, plan=towers_plan())
    with pytest.raises(ValueError, match=r"use te.linen.TPUEmbedding\(plan\)"):
        model.init(jax.random.key(0), np.arange(4))


def test_dense_linen_modules_train_inside_an_nnx_model():
    """The way out for a Linen model that is to use NNX: bridge its dense part."""
    ids = np.arange(4)

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embedding = te.TPUEmbedding(None, plan=towers_plan(), rngs=rngs)
            dense = nnx.bridge.ToNNX(nn.Dense(1), rngs=rngs)
            self.dense = dense.lazy_init(jnp.zeros((4, 4)))

        def __call__(self, ids):
            return self.dense(self.embedding(ids))

    model = Model()
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    loss, gradients = te.value_and_grad(lambda m: jnp.sum(m(ids) ** 2))(model)
    optimizer.update(model, gradients)
    assert jnp.sum(model(ids) ** 2) < loss
