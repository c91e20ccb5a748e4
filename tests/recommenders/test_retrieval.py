"""Retrieval from a layer: inside jit with a tower, without gradients, and exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.recommenders import best_rows

MOVIES = te.TableConfig(vocabulary_size=21, dim=4, name="movies")
USERS = te.TableConfig(vocabulary_size=9, dim=4, name="users")
IDS = np.array([3, 8, 0, 5], np.int32)


class TwoTowers(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            {
                "user": te.FeatureConfig(table=USERS),
                "m": te.FeatureConfig(table=MOVIES),
            },
            te.optimizers.sgd(0.1),
            mesh=mesh_of(2),
            rngs=rngs,
        )
        self.tower = nnx.Linear(4, 4, rngs=rngs)

    def best(self, features):
        users = self.embedding(features)["user"]
        return te.nn.top_k(
            self.embedding, users, k=3, table="movies", transform=self.tower
        )._asdict()


@pytest.fixture(scope="module")
def model():
    return TwoTowers(nnx.Rngs(0))


@pytest.fixture(scope="module")
def wanted(model):
    tables = model.embedding.embedding_tables()
    scores = tables["users"][IDS] @ np.asarray(model.tower(tables["movies"])).T
    return np.argsort(-scores, axis=1)[:, :3]


def test_equals_numpy_within_jit(model, wanted):
    best = nnx.jit(TwoTowers.best)(model, {"user": IDS})
    np.testing.assert_array_equal(best["ids"], wanted)


def test_an_export_retrieves(model, wanted, tmp_path):
    te.export.save(model, tmp_path / "served", {"user": IDS}, method="best")
    served = te.export.load(tmp_path / "served")
    assert set(served.tables) == {"users", "movies"}
    np.testing.assert_array_equal(served({"user": IDS})["ids"], wanted)
    np.testing.assert_array_equal(served({"user": IDS[:1]})["ids"], wanted[:1])


@pytest.mark.parametrize("place", quick_cases(["rows", "module", "method"]))
def test_the_second_eager_call_compiles_nothing(place, caplog):
    model = TwoTowers(nnx.Rngs(1))
    towers = {"rows": None, "module": model.tower, "method": model.tower.__call__}

    def scores(seed):
        queries = np.random.default_rng(seed).normal(size=(3, 4))
        options = {"table": "movies", "transform": towers[place]}
        return np.asarray(te.nn.top_k(model.embedding, queries, 2, **options).scores)

    first = scores(0)
    trained_kernel = 2 * model.tower.kernel.get_value()
    with jax.log_compiles():
        second = scores(1)
        model.tower.kernel.set_value(trained_kernel)
        after_training = scores(1)
    assert not [x.message for x in caplog.records if "compil" in x.message.lower()]
    # The bias is 0. Doubling is exact.
    factor = 1 if place == "rows" else 2
    np.testing.assert_array_equal(after_training, factor * second)
    assert not np.array_equal(first, second)


def test_retrieval_in_a_loss_gives_tables_no_gradient(model):
    """Only the lookup does; the scores are constants of the rows that they found."""

    def loss_fn(model, factor):
        rows = model.embedding({"user": IDS})["user"]
        queries = jax.lax.stop_gradient(rows)
        best = te.nn.top_k(model.embedding, queries, k=2, table="movies")
        return jnp.sum(factor * best.scores + rows[:, :2])

    def values(factor):
        _, gradients = te.value_and_grad(loss_fn)(model, factor)
        leaves = jax.tree.leaves(gradients.tables)
        return [leaf for leaf in leaves if leaf.dtype == jnp.float32]

    with_scores = values(1.0)
    assert with_scores
    jax.tree.map(np.testing.assert_array_equal, with_scores, values(0.0))


GENRES = np.arange(21, dtype=np.int32) % 9


@pytest.mark.parametrize(
    ("num_devices", "is_explicit"),
    quick_cases([(1, False), (8, False), (2, True)], "2-True"),
)
def test_a_tower_over_several_tables(num_devices, is_explicit, monkeypatch):
    monkeypatch.setattr(best_rows, "ROWS_PER_BLOCK", 8)
    mesh = mesh_of(num_devices)
    if is_explicit:
        mesh = jax.make_mesh((num_devices,), ("data",), devices=mesh.devices.flat)
    features = {
        name: te.FeatureConfig(table=table)
        for name, table in {"movie": MOVIES, "genre": USERS}.items()
    }
    layer = te.TPUEmbedding(features, mesh=mesh, rngs=nnx.Rngs(0))
    queries = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    excluded = np.array([[3], [0], [1], [20], [7]], np.int32)

    @nnx.jit
    def best(layer, queries):
        def tower(numbers):
            rows = layer({"movie": numbers, "genre": jnp.asarray(GENRES)[numbers]})
            return rows["movie"] * rows["genre"]

        return te.nn.top_k_of_tower(tower, queries, 3, num_items=21, excluded=excluded)

    tables = layer.embedding_tables()
    scores = queries @ (tables["movies"] * tables["users"][GENRES]).T
    np.put_along_axis(scores, excluded, -np.inf, axis=1)
    wanted = np.argsort(-scores, axis=1)[:, :3]
    found = best(layer, queries)
    np.testing.assert_array_equal(found.ids, wanted)
    expected = np.take_along_axis(scores, wanted, axis=1)
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5, atol=1e-6)
    with rejects(field="k", value=22):
        te.nn.top_k_of_tower(
            lambda i: jnp.asarray(queries)[i], queries, 22, num_items=21
        )
    with rejects(field="queries", value=[5, 4]):
        te.nn.top_k_of_tower(lambda i: i[:, None], queries, 2, num_items=21)
