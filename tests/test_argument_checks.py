"""Wrong arguments of public functions: each error shows what was given and wanted.

Each case is a call as habits of Flax, optax or TensorFlow would write it. The error
says what was given, what is wanted, and the line to write.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

TABLE = te.TableConfig(vocabulary_size=6, dim=2, name="movie")
FEATURES = {"watched": te.FeatureConfig(table=TABLE)}
IDS = {"watched": np.arange(4, dtype=np.int32)}


class Model(nnx.Module):
    def __init__(self):
        self.embedding = te.TPUEmbedding(
            FEATURES, "adagrad", mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )
        self.head = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        return self.head(self.embedding(ids)["watched"])


class Renamed(nnx.Module):
    def __init__(self):
        self.tower = Model()

    def __call__(self, ids):
        return self.tower(ids)


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
    result = te.functional.lookup(tables, IDS, plan)
    linen = te.linen.TPUEmbedding(plan)
    return types.SimpleNamespace(
        model=model,
        plan=plan,
        tables=tables,
        slots=te.functional.init_slots(tables, plan),
        result=result,
        gradients=gradients_of(model),
        optimizer=te.Optimizer(model, optax.adam(1e-3)),
        linen=linen,
        variables=linen.init(jax.random.key(0), IDS),
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


BEFORE_IT = "Call the layer before it"

LAYERS = {
    "plan: features": (
        lambda x: te.TPUEmbedding(None, plan=FEATURES, rngs=nnx.Rngs(0)),
        "got dict with the keys ['watched']",
        "an EmbeddingPlan",
        "te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))",
    ),
    "features: table": (
        lambda x: te.TPUEmbedding(TABLE, rngs=nnx.Rngs(0)),
        "got TableConfig at",
        "a nest of FeatureConfig",
        "te.FeatureConfig(table=table)",
    ),
    "values of tables in jit": (
        lambda x: nnx.jit(lambda m: m.embedding.embedding_tables())(x.model),
        "got traced values of the tables ['movie']",
        "outside of jit",
        "layer.embedding_tables()",
    ),
}

OPTIMIZERS = {
    "tables: not called": (
        lambda x: layer(te.optimizers.adagrad),
        "got the function adagrad",
        "an optax transformation",
        "te.optimizers.adagrad(0.1)",
    ),
    "tables: number": (
        lambda x: layer(0.5),
        "got 0.5",
        "an optax transformation",
        "with its learning rate",
    ),
    "tables: schedule": (
        lambda x: layer(optax.exponential_decay(0.1, 10, 0.5)),
        "got the function schedule",
        "an optax transformation",
        "with its learning rate",
    ),
    "tables: lookahead": (
        lambda x: layer(optax.lookahead(optax.sgd(0.1), 5, 0.5)),
        "optax.lookahead",
        "pairs of fast and slow",
        "pass only its fast_optimizer",
    ),
    "dense: not called": (
        lambda x: te.Optimizer(x.model, optax.adam),
        "got the function adam",
        "an optax transformation",
        "optax.adam(0.1)",
    ),
    "both names": (
        lambda x: te.optimizers.adam(0.1, b1=0.9, beta_1=0.9),
        "b1 and beta_1",
        "names of the same argument",
        "Remove one",
    ),
    "argument of PyTorch": (
        lambda x: te.optimizers.adam(0.1, betas=(0.9, 0.99)),
        "'betas'",
        "unexpected keyword argument",
        "arguments are learning_rate, beta_1",
    ),
    "unknown option": (
        lambda x: te.optimizers.with_options(optax.sgd(0.1), clip=1.0),
        "'clip'",
        "option must be one of",
        "clip_weight_min",
    ),
}

TRAINING = {
    "gradients: other model": (
        lambda x: te.gradients.add(x.gradients, gradients_of(Renamed())),
        "gradient 2 has a different structure",
        "of one structure",
        "te.gradients.add(first.dense, second.dense)",
    ),
    "norm of optax in jit": (
        lambda x: jax.jit(optax.global_norm)(x.gradients),
        "because some leaves are row ids",
        "te.gradients.global_norm(gradients)",
    ),
    "optimizer of Flax": (
        lambda x: nnx.Optimizer(x.model, optax.adam(0.1), wrt=nnx.Param).update(
            x.model, x.gradients
        ),
        "nnx.Optimizer",
        "te.Optimizer(model, tx)",
        "optimizer.update(model, gradients)",
    ),
    "update: loss and gradients": (
        lambda x: x.optimizer.update(x.model, (0.0, x.gradients)),
        "got tuple",
        "the gradients of value_and_grad",
        "optimizer.update(model, gradients)",
    ),
    "loss: nested": (
        in_loss(nested),
        "for the same model",
        "first(model) + second(model)",
    ),
    "loss: nnx.cond": (in_loss(one_branch), "inside", "nnx.cond", BEFORE_IT),
    "loss: with aux": (
        in_loss(lambda model: (loss_fn(model, IDS), 1.0)),
        "got a tuple of 2 values",
        "one scalar",
        "has_aux=True",
    ),
}

ROWS = "write vocabulary_size=..."
NAMES = {
    "table: num_embeddings": (lambda x: te.TableConfig(num_embeddings=9, dim=2), ROWS),
    "table: features": (
        lambda x: te.TableConfig(vocabulary_size=9, features=2),
        "write dim=...",
    ),
    "table: a slip": (lambda x: te.TableConfig(vocabularysize=9, dim=2), ROWS),
    "table: by place": (
        lambda x: te.TableConfig(9, 2),
        "write vocabulary_size=..., dim=...",
    ),
    "feature: by place": (lambda x: te.FeatureConfig(TABLE), "write table=..."),
    "layer: by place": (lambda x: te.TPUEmbedding(FEATURES, None, 1), "mesh=..."),
    "top_k: model": (
        lambda x: te.nn.top_k(x.model, jnp.ones((1, 2)), 1),
        "got Model",
        "te.nn.top_k(model.embedding, queries, k)",
    ),
    "call: lists": (
        lambda x: x.model({"watched": [[1, 2], [3]]}),
        "layer.prepare(features)",
    ),
    "call: a tensor of another library": (
        lambda x: x.model({"watched": types.SimpleNamespace(dtype=np.dtype(int))}),
        "got SimpleNamespace",
        "layer.prepare(features)",
    ),
    "value_and_grad: a loss": (
        lambda x: te.value_and_grad(jnp.float32(1)),
        "a function of the model, got an array",
        "te.value_and_grad(loss_fn)(model, ...)",
    ),
    "device_mesh: int": (lambda x: te.device_mesh(4), "(jax.devices()[:4])"),
    "init_tables: int": (
        lambda x: te.functional.init_tables(x.plan, 0),
        "got 0",
        "te.functional.init_tables(plan, jax.random.key(0))",
    ),
    "import: array": (
        lambda x: te.checkpoint.open_tables(np.ones((2, 3))),
        "got an array of shape (2, 3)",
        "{'movie': array}",
    ),
    "export: swapped": (
        lambda x: te.export.save("directory", x.model),
        "got 'directory'",
        "te.export.save(model, directory, batch)",
    ),
    "merge: others": (
        lambda x: te.metrics.merge(te.metrics.AUC.empty(), te.metrics.MAE.empty()),
        "got AUC and MAE",
    ),
    "dynamic: by place": (lambda x: te.Dynamic(9), "write capacity=..."),
    "host rows: by place": (lambda x: te.HostRows(9), "write cache_rows=..."),
    "cross: rngs": (
        lambda x: te.nn.FeatureCross(3, rngs=0),
        "got 0",
        "te.nn.FeatureCross(num_inputs, rngs=nnx.Rngs(0))",
    ),
    "cross: width": (
        lambda x: te.nn.FeatureCross(3, rngs=nnx.Rngs(0))(jnp.ones((2, 4))),
        "num_inputs=3",
        "(2, 4)",
    ),
    "dot: dict": (
        lambda x: te.nn.DotInteraction()(x.tables),
        "got dict",
        "list(activations.values())",
    ),
    "dot: dims": (
        lambda x: te.nn.DotInteraction()([jnp.ones((1, 2)), jnp.ones((1, 3))]),
        "[(1, 2), (1, 3)]",
    ),
    "table: unknown": (lambda x: te.TableConfig(hue=9), "it takes vocabulary_size"),
    "ragged: lengths": (
        lambda x: te.RaggedIds(values=[1], lengths=[1]),
        "write row_splits=np.cumsum([0, *lengths])",
    ),
    "feature: both names": (
        lambda x: te.FeatureConfig(
            table=TABLE,
            drop_nonpositive_weights=False,
            validate_weights_and_indices=False,
        ),
        "drop_nonpositive_weights and validate_weights_and_indices",
    ),
    "feature: a second name to replace": (
        lambda x: dataclasses.replace(
            te.FeatureConfig(table=TABLE), drop_nonpositive_weights=False
        ),
        "Pass only validate_weights_and_indices",
    ),
    "layer: num_embeddings": (
        lambda x: te.TPUEmbedding(num_embeddings=9, rngs=nnx.Rngs(0)),
        "te.TableConfig(vocabulary_size=..., dim=...)",
    ),
    "layer: sizes": (
        lambda x: te.TPUEmbedding(9, 2, rngs=nnx.Rngs(0)),
        "got 9",
        "te.TableConfig(vocabulary_size=..., dim=...)",
    ),
    "layer: item": (
        lambda x: x.model.embedding["movie"],
        "got ['movie']",
        "layer.embedding_tables()['movie']",
    ),
    "argnums": (lambda x: te.grad(loss_fn, argnums=0), "write wrt=filter"),
}

FILTERS = {
    "wrt: DiffState": (
        lambda x: te.grad(loss_fn, wrt=nnx.DiffState(0, nnx.Param))(x.model, IDS),
        "got DiffState",
        "must be a Flax filter",
        "wrt=nnx.Param",
    ),
    "wrt: number": (lambda x: te.grad(loss_fn, wrt=0)(x.model, IDS), "got 0"),
    "wrt: layer": (
        lambda x: te.value_and_grad(loss_fn, wrt=nnx.PathContains("embedding"))(
            x.model, IDS
        ),
        "embedding/tables",
        "wrt must select only dense float",
        "wrt=False",
    ),
    "wrt of an optimizer": (
        lambda x: te.Optimizer(x.model, optax.sgd(0.1), wrt=te.nn.EmbeddingTables),
        "te.Optimizer",
        "wrt must select only dense float",
        "leave wrt out",
    ),
    "update: gradients alone": (
        lambda x: x.optimizer.update(x.gradients),
        "got nothing",
        "second argument",
        "optimizer.update(model, gradients)",
    ),
    "gradients: unknown part": (
        lambda x: x.gradients["tail"],
        "got 'tail'",
        "the layers ['embedding']",
    ),
}

CASES = LAYERS | OPTIMIZERS | TRAINING | NAMES | FILTERS


@pytest.mark.parametrize("case", CASES)
def test_error_says_what_is_given_and_wanted_and_what_to_write(case, given):
    call, *parts = CASES[case]
    with pytest.raises((KeyError, TypeError, ValueError)) as error:
        call(given)
    text = str(error.value)
    assert [part for part in parts if part not in text] == [], text
    assert len(text) < 1000, text  # No plan, model or batch is printed.


ATTRIBUTES = ("attend", "embedding", "num_embeddings")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_other_layers_are_explained(name, given):
    with pytest.raises(AttributeError, match=f"'{name}': .*layer"):
        getattr(given.model.embedding, name)
    assert not hasattr(given.model.embedding, name)


def test_second_name_of_a_field():
    config = te.FeatureConfig(table=TABLE, drop_nonpositive_weights=False)
    assert not config.validate_weights_and_indices
    assert not config.drop_nonpositive_weights
