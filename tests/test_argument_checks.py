"""Wrong arguments of public functions: each error shows what was given and wanted.

Each case is a call that follows the habits of Flax, optax or TensorFlow.
"""

import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

TABLE = te.TableConfig(vocabulary_size=6, dim=2, name="movie")
FEATURES = {"watched": te.FeatureConfig(table=TABLE)}
STATE = nnx.DiffState(0, nnx.Param)
IDS = {"watched": np.arange(4, dtype=np.int32)}


class Model(nnx.Module):
    def __init__(self):
        self.embedding = te.TPUEmbedding(
            FEATURES, "adagrad", mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )
        self.head = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.head(self.embedding(ids)["watched"])


def loss_fn(model, ids):
    return jnp.sum(model(ids) ** 2)


def gradients_of(model):
    return te.value_and_grad(loss_fn)(model, IDS)[1]


@pytest.fixture(scope="module")
def given():
    """Returns a model, its plan and all that functions take; no case changes them."""
    model = Model()
    plan = model.embedding.plan
    tables = model.embedding.tables.get_value()
    return types.SimpleNamespace(
        model=model,
        plan=plan,
        tables=tables,
        gradients=gradients_of(model),
        optimizer=te.Optimizer(model, optax.adam(1e-3)),
    )


def layer(optimizer="adagrad", **options):
    return te.TPUEmbedding(FEATURES, optimizer, **{"rngs": nnx.Rngs(0), **options})


def in_loss(compute):
    """Returns a case whose loss is `compute(model)`."""
    return lambda x: te.value_and_grad(compute)(x.model)


def zeros(model):
    del model
    return jnp.zeros((4, 1))


def nested(model):
    return te.value_and_grad(loss_fn)(model, IDS)[0]


def one_branch(model):
    return jnp.sum(nnx.cond(jnp.array(True), lambda m: m(IDS), zeros, model))


# A call, and the argument that its error names, if it is about one, or code to write.
LAYERS = {
    "plan: features": (
        lambda x: te.TPUEmbedding(None, plan=FEATURES, rngs=nnx.Rngs(0)),
        dict(field="plan", value=FEATURES, fix="te.TPUEmbedding(None, plan=plan"),
    ),
    "features: table": (
        lambda x: te.TPUEmbedding(TABLE, rngs=nnx.Rngs(0)),
        dict(field="feature_config", value=TABLE, fix="te.FeatureConfig(table=table)"),
    ),
    "call: lists": (
        lambda x: x.model({"watched": [[1, 2], [3]]}),
        dict(fix="layer.prepare(features)"),
    ),
    "item": (
        lambda x: x.model.embedding["movie"],
        dict(fix="layer.embedding_tables()['movie']"),
    ),
    "attribute": (lambda x: x.model.embedding.attend, dict(fix="queries @ layer")),
    "lookahead": (
        lambda x: layer(optax.lookahead(optax.sgd(0.1), 5, 0.5)),
        dict(fix="fast_optimizer"),
    ),
}

TRAINING = {
    "dense optimizer: not called": (
        lambda x: te.Optimizer(x.model, optax.adam),
        dict(fix="optax.adam(0.1)"),
    ),
    "update: loss and gradients": (
        lambda x: x.optimizer.update(x.model, (0.0, x.gradients)),
        dict(fix="optimizer.update(model, gradients)"),
    ),
    "gradients: unknown part": (
        lambda x: x.gradients["tail"],
        dict(field="gradients", value="tail"),
    ),
    "gradients: another structure": (
        lambda x: te.gradients.add(x.gradients, {}),
        dict(fix="te.gradients.add(first.dense, second.dense)"),
    ),
    "loss: nested": (in_loss(nested), dict(fix="first(model) + second(model)")),
    "loss: with aux": (
        in_loss(lambda model: (loss_fn(model, IDS), 1.0)),
        dict(field="loss_fn", fix="has_aux=True"),
    ),
    "wrt: DiffState": (
        lambda x: te.grad(loss_fn, wrt=STATE)(x.model, IDS),
        dict(field="wrt", value=STATE, fix="wrt=nnx.Param"),
    ),
}

NAMES = {
    "table: num_embeddings": (
        lambda x: te.TableConfig(num_embeddings=9, dim=2),
        dict(field="num_embeddings", value=9, fix="vocabulary_size=..."),
    ),
    "table: by place": (
        lambda x: te.TableConfig(9, 2),
        dict(fix="vocabulary_size=..., dim=..."),
    ),
    "ragged: lengths": (
        lambda x: te.RaggedIds(values=[1], lengths=[1]),
        dict(field="lengths", value=[1], fix="row_splits=np.cumsum([0, *lengths])"),
    ),
    "feature: both names": (
        lambda x: te.FeatureConfig(
            table=TABLE,
            drop_nonpositive_weights=False,
            validate_weights_and_indices=False,
        ),
        dict(fix="Pass only validate_weights_and_indices"),
    ),
    "top_k: model": (
        lambda x: te.nn.top_k(x.model, jnp.ones((1, 2)), 1),
        dict(fix="te.nn.top_k(model.embedding, queries, k)"),
    ),
    "device_mesh: int": (
        lambda x: te.device_mesh(4),
        dict(field="devices", value=4, fix="(jax.devices()[:4])"),
    ),
    "init_tables: int": (
        lambda x: te.functional.init_tables(x.plan, 0),
        dict(fix="te.functional.init_tables(plan, jax.random.key(0))"),
    ),
    "import: array": (
        lambda x: te.checkpoint.open_tables(np.ones((2, 3))),
        dict(fix="{'movie': array}"),
    ),
    "export: swapped": (
        lambda x: te.export.save("directory", x.model),
        dict(fix="te.export.save(model, directory, batch)"),
    ),
}
CASES = LAYERS | TRAINING | NAMES


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument_or_what_to_write(case, given):
    call, expected = CASES[case]
    kinds = (AttributeError, KeyError, TypeError, ValueError)
    with rejects(kinds, **expected) as error:
        call(given)
    assert len(str(error.value)) < 1000  # No plan, model or batch is printed.


def test_second_name_of_a_field():
    config = te.FeatureConfig(table=TABLE, drop_nonpositive_weights=False)
    assert not config.validate_weights_and_indices
    assert not config.drop_nonpositive_weights
