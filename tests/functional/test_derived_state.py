"""State that optimizers derive from table values restarts when values are set."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.functional.derived_state import tables_with_derived_state

DIM = 8
full = pytest.mark.full
EMA = te.optimizers.adafactor(0.1, use_ema=True, relative_step=False)
RULES = {
    "adafactor": te.optimizers.adafactor(0.1, relative_step=False),
    "averages, exact": te.optimizers.adafactor(0.1, use_ema=True, mode="exact"),
    "schedule free": te.optimizers.every_row(optax.contrib.schedule_free_sgd(0.1)),
}


def feature_config(city_dtype=jnp.float32):
    movie = te.TableConfig(vocabulary_size=21, dim=DIM, combiner="sum", name="movie")
    city = te.TableConfig(vocabulary_size=9, dim=DIM, name="city", dtype=city_dtype)
    return {
        "movie": te.FeatureConfig(table=movie),
        "city": te.FeatureConfig(table=city),
    }


def values_of(seed=1, scale=10.0):
    random = np.random.default_rng(seed)
    return {
        "movie": np.float32(scale * random.normal(size=(21, DIM))),
        "city": np.float32(scale * random.normal(size=(9, DIM))),
    }


def layer_of(rule, num_devices=1):
    mesh = mesh_of(num_devices)
    return te.TPUEmbedding(feature_config(), rule, mesh=mesh, rngs=nnx.Rngs(0))


@nnx.jit
def train_step(model, optimizer, ids):
    def loss_fn(model):
        activations = model({"movie": ids, "city": ids % 9})
        return sum(jnp.sum(x) for x in activations.values())

    optimizer.update(model, te.value_and_grad(loss_fn)(model)[1])


def set_after(model, optimizer, values):
    optimizer.set_embedding_tables(model, values)


def import_after(model, optimizer, values):
    te.checkpoint.import_tables(values, model, optimizer)


@pytest.mark.parametrize(
    ("name", "set_values"),
    [
        pytest.param("adafactor", set_after, marks=full),
        pytest.param("averages, exact", import_after, marks=full),
        pytest.param("schedule free", set_after, marks=full),
    ],
)
def test_values_set_before_and_after_the_optimizer_train_alike(name, set_values):
    values = {"movie": values_of()["movie"]}  # The other table keeps its own.
    before, after = layer_of(RULES[name]), layer_of(RULES[name])
    before.set_embedding_tables(values)
    first = te.Optimizer(before, optax.sgd(0.1))
    second = te.Optimizer(after, optax.sgd(0.1))
    set_values(after, second, values)
    for _ in range(2):
        train_step(before, first, jnp.arange(6))
        train_step(after, second, jnp.arange(6))
    # Totals over a table are sums over shards, in any order.
    for name, rows in before.embedding_tables().items():
        np.testing.assert_allclose(
            after.embedding_tables()[name], rows, rtol=1e-5, atol=1e-6
        )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        second.slot_values("all"),
        first.slot_values("all"),
    )


@pytest.mark.full
def test_the_averages_of_a_table_restart_when_its_values_are_set():
    layer = layer_of(EMA, 2)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    for _ in range(3):
        train_step(layer, optimizer, jnp.arange(6))
    old = optimizer.slot_values("all")
    values = layer.embedding_tables()["movie"]
    assert np.any(old["movie"]["averages"][:6] != values[:6])
    values[4] = 7.0
    optimizer.set_embedding_tables(layer, {"movie": values})
    new = optimizer.slot_values("all")
    # Also the averages of rows that did not change.
    np.testing.assert_array_equal(new["movie"]["averages"], values)
    # Sums over shards, in any order.
    np.testing.assert_allclose(
        new["movie"]["squares/value"], np.sum(values**2), rtol=1e-6
    )
    derived = ("averages", "squares/value", "squares/rest")
    for name, slot in old["movie"].items():
        if name not in derived:
            np.testing.assert_array_equal(new["movie"][name], slot)
    jax.tree.map(np.testing.assert_array_equal, new["city"], old["city"])
    optimizer.finalize_variable_values(layer)
    # An average of equal numbers may round; untouched rows are their own average.
    np.testing.assert_allclose(layer.embedding_tables()["movie"], values, rtol=2e-7)


@full
def test_averages_are_those_of_the_rows_as_stored():
    plan = te.make_plan(feature_config(jnp.bfloat16), mesh_of(2), optimizer=EMA)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    tables, slots = te.functional.with_table_values(
        tables, values_of(), plan, te.functional.init_slots(tables, plan)
    )
    expected = te.functional.init_slots(tables, plan)
    # Totals over a table are sums over shards, in any order.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
        te.functional.slot_values(slots, plan, "all"),
        te.functional.slot_values(expected, plan, "all"),
    )


def set_layer(layer, optimizer, directory):
    layer.set_embedding_tables(values_of())


def set_copy(layer, optimizer, directory):
    nnx.merge(*nnx.split(layer)).set_embedding_tables(values_of())


def import_without(layer, optimizer, directory):
    te.checkpoint.import_tables(values_of(), layer)


def restore_without(layer, optimizer, directory):
    te.save(directory / "checkpoint", layer)
    te.restore(directory / "checkpoint", layer)


def set_arrays(layer, optimizer, directory):
    te.functional.with_table_values(layer.tables.get_value(), values_of(), layer.plan)


WAYS_OUT = {
    set_layer: "optimizer.set_embedding_tables(model, values)",
    set_copy: "optimizer.set_embedding_tables(model, values)",
    import_without: "import_tables(source, model, optimizer)",
    restore_without: "te.restore(directory, (model, optimizer))",
    set_arrays: "te.functional.with_table_values(\n    tables, values, plan, slots)",
}


@pytest.mark.parametrize("change", quick_cases(WAYS_OUT, "set_copy", every_case=True))
def test_values_without_their_state_are_rejected(change, tmp_path):
    layer = layer_of(EMA)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    before = layer.embedding_tables()
    with rejects(fix=WAYS_OUT[change]):
        change(layer, optimizer, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, layer.embedding_tables(), before)


def test_other_rules_and_models_are_as_before(tmp_path):
    layer = layer_of(te.optimizers.adagrad(0.1))
    assert not tables_with_derived_state(layer.plan)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    set_layer(layer, optimizer, tmp_path)
    import_without(layer, optimizer, tmp_path)
    restore_without(layer, optimizer, tmp_path)
    set_arrays(layer, optimizer, tmp_path)
    optimizer.set_embedding_tables(layer, {"city": values_of(2)["city"]})
    np.testing.assert_array_equal(
        layer.embedding_tables()["city"], values_of(2)["city"]
    )
    with rejects(fix="films"):
        optimizer.set_embedding_tables(layer, {"films": np.ones((2, 2))})
    ema = layer_of(EMA)
    set_layer(ema, None, tmp_path)  # no optimizer was made yet
