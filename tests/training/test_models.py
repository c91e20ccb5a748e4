"""Models against their formulas in NumPy, given the activations of their layer."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.conftest import mesh_of
from tpu_embedding.data.criteo import SyntheticCriteo
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.training.models import (
    ClickModelConfig,
    DLRMConfig,
    RatingModelConfig,
)
from tpu_embedding.training.models.dlrm import interactions
from tpu_embedding.training.models.model import MLP
from tpu_embedding.types import RaggedIds

RATING = RatingModelConfig(dim=4, initial_deviation=0.5, l2=0.1)


class Ratings:
    """The part of `MovieLens` that the model reads."""

    config = types.SimpleNamespace(max_history=2)
    vocabulary_sizes = dict.fromkeys(
        ("user", "movie", "age", "gender", "occupation", "genres", "history"), 10
    )
    mean_rating = 3.5


def test_rating_model():
    ids = {name: np.array([1, 2, 3]) for name in Ratings.vocabulary_sizes}
    ids["genres"] = np.array([[1, 2], [3, 4], [5, 6]])
    ids["history"] = RaggedIds(
        values=np.array([7, 8, 9]), row_splits=np.array([0, 2, 2, 3])
    )
    plan = make_plan(RATING.feature_config(Ratings), mesh_of(1))
    model = RATING.build(Ratings, plan, rngs=nnx.Rngs(0))
    outputs = model(model.embedding.prepare(ids), None)
    rows = model.embedding.embedding_tables()
    one = {n: rows[n][[1, 2, 3]] for n in ("user", "movie", "age", "gender")}
    one["occupation"] = rows["occupation"][[1, 2, 3]]
    genres = (rows["genres"][[1, 3, 5]] + rows["genres"][[2, 4, 6]]) / 2
    history = np.stack(
        [
            (rows["history"][7] + rows["history"][8]) / np.sqrt(2),
            np.zeros(4),
            rows["history"][9],
        ]
    )
    about_user = one["age"] + one["gender"] + one["occupation"]
    user = one["user"] + history + about_user
    movie = one["movie"] + genres
    scores = 3.5 + user[:, 0] + movie[:, 0] + (user[:, 1:] * movie[:, 1:]).sum(1)
    penalty = 0.1 * sum(
        np.square(part).sum(1)
        for part in (one["user"], one["movie"], history, genres, about_user)
    )
    # Float32 sums of a few numbers near 1.
    np.testing.assert_allclose(outputs.scores, scores, rtol=1e-5)
    np.testing.assert_allclose(outputs.penalty, penalty, rtol=1e-5)
    np.testing.assert_array_equal(
        outputs.predictions, np.clip(outputs.scores, np.float32(1), np.float32(5))
    )


def test_interactions_are_all_pairs_once():
    vectors = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    wanted = [
        [vectors[b, i] @ vectors[b, j] for i in range(4) for j in range(i)]
        for b in range(2)
    ]
    np.testing.assert_allclose(interactions(jnp.array(vectors)), wanted, rtol=1e-5)


def test_dlrm_has_the_sizes_of_its_config():
    config = DLRMConfig(
        dim=4, bottom_sizes=(5,), top_sizes=(6, 7), initial_deviation=0.1
    )
    data = SyntheticCriteo(batch_size=3, vocabulary_sizes=9)
    plan = make_plan(config.feature_config(data), mesh_of(1))
    model = config.build(data, plan, rngs=nnx.Rngs(0))
    shapes = {
        tuple(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param)) if p.ndim
    }
    num_pairs = 27 * 26 // 2
    kernels = {(13, 5), (5, 4), (4 + num_pairs, 6), (6, 7), (7, 1)}
    assert kernels == {shape for shape in shapes if len(shape) == 2}


@pytest.mark.parametrize("last_activation", [True, False])
def test_mlp(last_activation):
    mlp = MLP(3, (4, 2), last_activation=last_activation, rngs=nnx.Rngs(0))
    inputs = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    assert (np.asarray(mlp(inputs)) < 0).any() == (not last_activation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClickModelConfig(dim=0, hidden_sizes=(0,)), "dim.*hidden_sizes"),
        (lambda: RatingModelConfig(dim=1, initial_deviation=-1, l2=-1), "l2 must not"),
        (
            lambda: DLRMConfig(
                dim=1, bottom_sizes=(1,), top_sizes=(1,), initial_deviation=0
            ),
            "initial_deviation must be positive",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
