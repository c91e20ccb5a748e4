"""Tables of every dtype, trained through the public functions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.update.table_writer import RoundedState

DIM = 5
SIZES = {"a": 37, "b": 11}
BATCH = 24


def make_plan(mesh, dtype, optimizer, *, dim=DIM, **options):
    tables = [
        te.TableConfig(
            vocabulary_size=size, dim=dim, combiner="sum", name=name, dtype=dtype
        )
        for name, size in SIZES.items()
    ]
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(features, mesh, optimizer=optimizer, **options)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def step(tables, slots, ids, cotangents, plan):
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    return te.functional.apply_gradients(tables, slots, gradients, plan)


def trained(plan, num_steps=4):
    """Trains with gradients whose sums are exact in any order."""
    generator = np.random.default_rng(0)
    values = {
        name: generator.normal(size=(size, DIM)).astype(np.float32)
        for name, size in SIZES.items()
    }
    tables = te.functional.with_table_values(
        te.functional.init_tables(plan, jax.random.key(0)), values, plan
    )
    slots = te.functional.init_slots(tables, plan)
    for _ in range(num_steps):
        ids = {
            name: generator.integers(0, size, BATCH).astype(np.int32)
            for name, size in SIZES.items()
        }
        cotangents = {
            name: generator.integers(-4, 5, (BATCH, DIM)).astype(np.float32) / 64
            for name in SIZES
        }
        tables, slots = step(tables, slots, ids, cotangents, plan)
    return te.functional.unstack_tables(tables, plan), slots


OPTIMIZERS = {
    "sgd": te.optimizers.sgd(2.0**-7),
    "every_element": te.optimizers.every_row(te.optimizers.momentum(2.0**-7, 0.5)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sgd", jnp.bfloat16),
        pytest.param("every_element", jnp.bfloat16, marks=pytest.mark.full),
        pytest.param("sgd", jnp.float16, marks=pytest.mark.full),
    ],
)
def test_equal_on_any_devices_packing_placement_and_rounds(name, dtype):
    results = []
    for num_devices, hardware, options in [
        (1, "cpu", {}),
        (2, "v5p", dict(placement=te.Replicated())),
        (3, "v5p", dict(capacity=1)),
        (8, "cpu", {}),
    ]:
        plan = make_plan(
            mesh_of(num_devices),
            dtype,
            OPTIMIZERS[name],
            hardware=te.hardware.hardware_by_name(hardware),
            **options,
        )
        values, slots = trained(plan)
        results.append(values)
        assert isinstance(slots["stack_0"], RoundedState)
        assert slots["stack_0"].step == 4
    for values in results[1:]:
        for table in SIZES:
            np.testing.assert_array_equal(values[table], results[0][table])


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.full),
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.full),
        "int8",
    ],
)
def test_initial_values(dtype):
    """Float32 values, rounded to nearest; the initializer is asked for float32."""
    asked = []

    def initializer(key, shape, dtype):
        asked.append(dtype)
        return jax.random.normal(key, shape, dtype)

    table = te.TableConfig(
        vocabulary_size=19, dim=6, name="t", dtype=dtype, initializer=initializer
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(3),
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    tables = te.functional.init_tables(plan, jax.random.key(3))
    assert asked == [jnp.float32]
    (lines,) = jax.tree.leaves(tables)
    assert lines.dtype == (jnp.float32 if dtype == "float32" else jnp.int32)
    values = te.functional.unstack_tables(tables, plan)["t"]
    assert values.dtype == np.float32
    exact_plan = te.make_plan(
        te.FeatureConfig(table=dataclasses.replace(table, dtype="float32")), mesh_of(3)
    )
    exact = te.functional.unstack_tables(
        te.functional.init_tables(exact_plan, jax.random.key(3)), exact_plan
    )
    if dtype == "int8":
        # Half of a 255th of a row's range.
        error = np.abs(values - exact["t"]).max(axis=1)
        assert (error <= np.ptp(exact["t"], axis=1) / 509).all()
        return
    expected = np.asarray(jnp.asarray(exact["t"]).astype(dtype), np.float32)
    # Programs differ in the last bit of a normal number, which may round otherwise.
    assert (values == expected).mean() > 0.99
    np.testing.assert_allclose(values, exact["t"], rtol=jnp.finfo(dtype).eps)


def test_rows_that_belong_to_no_table_are_zero():
    table = te.TableConfig(vocabulary_size=7, dim=3, name="t", dtype="bfloat16")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(8))
    (lines,) = jax.tree.leaves(te.functional.init_tables(plan, jax.random.key(0)))
    assert not np.asarray(lines)[-1].any()
    assert np.asarray(lines)[:-1].any(axis=1).all()


class Model(nnx.Module):
    """A layer and a linear model on top."""

    def __init__(self, plan, rngs):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.linear = nnx.Linear(2 * DIM, 1, rngs=rngs)

    def __call__(self, ids):
        rows = self.embedding(ids)
        return self.linear(jnp.concatenate([rows["a"], rows["b"]], axis=1))[:, 0]


@pytest.mark.full
def test_a_model_trains_in_place_and_compiles_once():
    rule = optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=0.1)
    plan = make_plan(mesh_of(8), "bfloat16", rule)
    model = Model(plan, nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    generator = np.random.default_rng(0)
    ids = {name: generator.integers(0, size, BATCH) for name, size in SIZES.items()}
    ids = te.inputs.shard_batch(model.embedding.prepare(ids), plan)
    labels = te.inputs.shard_batch(
        generator.normal(size=BATCH).astype(np.float32), plan
    )
    traces = []

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, ids, labels):
        traces.append(None)

        def loss_fn(model):
            activations = model(ids)
            assert activations.dtype == jnp.float32
            return jnp.mean((activations - labels) ** 2)

        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train_step(model, optimizer, ids, labels)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert len(traces) == 1
    optimizer.set_hyperparameters(learning_rate=0.0)
    before = model.embedding.embedding_tables()
    train_step(model, optimizer, ids, labels)
    for name, rows in model.embedding.embedding_tables().items():
        np.testing.assert_array_equal(rows, before[name])


@pytest.mark.parametrize("optimizer_of", ["table", "layer"])
def test_int8_tables_are_not_trained(optimizer_of):
    rule = te.optimizers.sgd(0.1)
    table = te.TableConfig(
        vocabulary_size=7,
        dim=3,
        name="codes",
        dtype=jnp.int8,
        optimizer=rule if optimizer_of == "table" else None,
    )
    with pytest.raises(ValueError, match="TableConfig.dtype must not be int8") as error:
        te.make_plan(
            te.FeatureConfig(table=table),
            mesh_of(1),
            optimizer=rule if optimizer_of == "layer" else None,
        )
    assert "'codes'" in str(error.value)
    assert ("its own" if optimizer_of == "table" else "the layer") in str(error.value)


@pytest.mark.full
def test_int8_tables_beside_trained_ones():
    codes = te.TableConfig(vocabulary_size=7, dim=4, name="codes", dtype="int8")
    rows = te.TableConfig(
        vocabulary_size=9, dim=4, name="rows", optimizer=te.optimizers.sgd(1.0)
    )
    config = {
        "codes": te.FeatureConfig(table=codes),
        "rows": te.FeatureConfig(table=rows),
    }
    plan = te.make_plan(config, mesh_of(2))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    before = te.functional.unstack_tables(tables, plan)
    ids = {"codes": np.arange(4), "rows": np.arange(4)}
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(
        result.routing, result.activations, plan
    )
    tables, _ = te.functional.apply_gradients(
        tables, te.functional.init_slots(tables, plan), gradients, plan
    )
    after = te.functional.unstack_tables(tables, plan)
    np.testing.assert_array_equal(after["codes"], before["codes"])
    np.testing.assert_allclose(after["rows"][:4], 0, atol=1e-7)
