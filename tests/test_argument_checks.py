"""Wrong arguments of public functions: each error shows what was given and wanted.

Each case is a call as habits of Flax, optax or TensorFlow would write it. The error
says what was given, what is wanted, and the line to write.
"""

import functools
import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.argument_checks import by_name, describe_value

TABLE = te.TableConfig(vocabulary_size=6, dim=2, name="movie")
FEATURES = {"watched": te.FeatureConfig(table=TABLE)}
IDS = {"watched": np.arange(4, dtype=np.int32)}
VALUES = np.zeros((6, 2), np.float32)


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


class KerasOptimizer:
    def get_config(self):
        return {"name": "adam"}


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


def my_rule(rate):
    return optax.sgd(rate)


def zeros(model):
    del model
    return jnp.zeros((4, 1))


def nested(model):
    return te.value_and_grad(loss_fn)(model, IDS)[0]


def one_branch(model):
    return jnp.sum(nnx.cond(jnp.array(True), lambda m: m(IDS), zeros, model))


def nnx_loop(model):
    def body(i, carry):
        return carry[0], carry[1] + jnp.sum(carry[0](IDS))

    return nnx.fori_loop(0, 2, body, (model, jnp.zeros(())))[1]


LINEN_LINE = "te.linen.TPUEmbedding(te.make_plan(feature_config, optimizer=...))"
LAYER_LINE = "te.TPUEmbedding(feature_config, optimizer, rngs=nnx.Rngs(0))"
MAKE_BEFORE = "lambda batch: f(batch, config)"
BEFORE_IT = "activations = model.embedding(features)"
CONFIG = {"name": "adam", "learning_rate": 0.1}

LAYERS = {
    "rngs: seed": (lambda x: layer(rngs=0), "got 0.", "an nnx.Rngs", LAYER_LINE),
    "rngs: key": (
        lambda x: layer(rngs=jax.random.key(0)),
        "got an array of shape () and dtype key",
        "an nnx.Rngs",
        LAYER_LINE,
    ),
    "plan: features": (
        lambda x: te.TPUEmbedding(None, plan=FEATURES, rngs=nnx.Rngs(0)),
        "got dict with the keys ['watched']",
        "an EmbeddingPlan",
        "te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))",
    ),
    "features: plan": (
        lambda x: te.TPUEmbedding(x.plan, rngs=nnx.Rngs(0)),
        "got EmbeddingPlan at",
        "a nest of FeatureConfig",
        "plan=plan",
    ),
    "features: table": (
        lambda x: te.TPUEmbedding(TABLE, rngs=nnx.Rngs(0)),
        "got TableConfig at",
        "a nest of FeatureConfig",
        "te.FeatureConfig(table=table)",
    ),
    "linen: features": (
        lambda x: te.linen.TPUEmbedding(FEATURES),
        "got dict with the keys ['watched']",
        "an EmbeddingPlan",
        LINEN_LINE,
    ),
    "table by position": (
        lambda x: te.TableConfig(50, 8),  # pyright: ignore
        "got 2",
        "no positional arguments",
        "te.TableConfig(vocabulary_size=50, dim=8)",
    ),
    "feature by position": (
        lambda x: te.FeatureConfig(TABLE),  # pyright: ignore
        "got 1",
        "no positional arguments",
        "te.FeatureConfig(table=TableConfig)",
    ),
    "ids by position": (
        lambda x: te.RaggedIds(np.arange(2), np.array([0, 2])),  # pyright: ignore
        "got 2",
        "no positional arguments",
        "te.RaggedIds(values=an array of shape (2,)",
    ),
    "field of PyTorch": (
        lambda x: te.TableConfig(num_embeddings=50),  # pyright: ignore
        "'num_embeddings'",
        "no argument",
        "it takes vocabulary_size, dim",
    ),
    "placement: class": (
        lambda x: te.TableConfig(
            vocabulary_size=5,
            dim=2,
            placement=te.Replicated,  # pyright: ignore
        ),
        "got the class Replicated",
        "a te.Sharded, te.Replicated or None",
        "te.Replicated()",
    ),
    "initializer: not called": (
        lambda x: te.TableConfig(
            vocabulary_size=5,
            dim=2,
            initializer=jax.nn.initializers.normal,  # pyright: ignore
        ),
        "<function normal",
        "must take (key, shape, dtype)",
        "jax.nn.initializers.normal()",
    ),
    "serving_config: argument of jit": (
        lambda x: nnx.jit(lambda m, ids, c: m.embedding(ids, serving_config=c))(
            x.model, IDS, FEATURES
        ),
        "FeatureConfig",
        "no array",
        MAKE_BEFORE,
    ),
    "values of tables in jit": (
        lambda x: nnx.jit(lambda m: m.embedding.embedding_tables())(x.model),
        "got traced values of the tables ['movie']",
        "on the host",
        "layer.embedding_tables()",
    ),
    "slots in jit": (
        lambda x: nnx.jit(lambda o: o.slot_values())(x.optimizer),
        "got traced values of the tables ['movie']",
        "on the host",
        "outside of jit",
    ),
    "values: array": (
        lambda x: x.model.embedding.set_embedding_tables(VALUES),
        "got an array of shape (6, 2)",
        "a dict",
        "{'movie': array}",
    ),
    "values with an optimizer: swapped": (
        lambda x: x.optimizer.set_embedding_tables({"movie": VALUES}, x.model),
        "got Model",
        "a dict",
        "optimizer.set_embedding_tables(model, {'movie': array})",
    ),
    "slots: array": (
        lambda x: x.optimizer.set_slot_values({"movie": VALUES}),
        "got an array of shape (6, 2)",
        "a dict",
        "{'movie': {'accumulators': array}}",
    ),
    "linen values: array": (
        lambda x: te.linen.with_embedding_tables(x.variables, {"movie": VALUES}),
        "got an array of shape (6, 2)",
        "a dict",
        "{'embedding': {'movie': array}}",
    ),
}

OPTIMIZERS = {
    "tables: not called": (
        lambda x: layer(te.optimizers.adagrad),
        "got the function adagrad",
        "an optax GradientTransformation",
        "te.optimizers.adagrad(0.1)",
    ),
    "tables: optax, not called": (
        lambda x: te.make_plan(FEATURES, optimizer=optax.adam),
        "got the function adam",
        "an optax GradientTransformation",
        "optax.adam(0.1)",
    ),
    "table: not called": (
        lambda x: te.TableConfig(
            vocabulary_size=5, dim=2, name="t", optimizer=te.optimizers.sgd
        ),
        "got the function sgd for table 't'",
        "an optax GradientTransformation",
        "te.optimizers.sgd(0.1)",
    ),
    "tables: number": (
        lambda x: layer(0.5),
        "got 0.5",
        "an optax GradientTransformation",
        "te.optimizers.adagrad(0.5)",
    ),
    "tables: Keras": (
        lambda x: layer(KerasOptimizer()),
        "got KerasOptimizer",
        "an optax GradientTransformation",
        "te.optimizers.from_keras_config(optimizer.get_config())",
    ),
    "tables: config of Keras": (
        lambda x: layer(CONFIG),
        "got dict with the keys ['name', 'learning_rate']",
        "an optax GradientTransformation",
        "te.optimizers.from_keras_config(config)",
    ),
    "tables: schedule": (
        lambda x: layer(optax.exponential_decay(0.1, 10, 0.5)),
        "got the function schedule",
        "an optax GradientTransformation",
        "if this is a schedule, give it to an optimizer: te.optimizers.adagrad(sch",
    ),
    "dense: schedule": (
        lambda x: te.Optimizer(x.model, optax.exponential_decay(0.1, 10, 0.5)),
        "got the function schedule",
        "an optax GradientTransformation",
        "if this is a schedule, give it to an optimizer: optax.adam(schedule)",
    ),
    "tables: lambda": (
        lambda x: layer(lambda rate: optax.sgd(rate)),
        "got the function <lambda>",
        "an optax GradientTransformation",
        "; call the function that makes it;",
    ),
    "tables: function of the user": (
        lambda x: layer(my_rule),
        "got the function my_rule",
        "an optax GradientTransformation",
        "; call the function that makes it;",
    ),
    "tables: partial function": (
        lambda x: layer(functools.partial(optax.adam, 0.1)),
        "got partial",
        "an optax GradientTransformation",
        "; call the function that makes it;",
    ),
    "tables: method": (
        lambda x: layer([].append),
        "got the function append",
        "an optax GradientTransformation",
        "; call the function that makes it;",
    ),
    "every_row: not called": (
        lambda x: te.optimizers.every_row(optax.adam),  # pyright: ignore
        "got the function adam",
        "an optax GradientTransformation",
        "optax.adam(0.1)",
    ),
    "check_row_local: not called": (
        lambda x: te.optimizers.check_row_local(optax.adam, 8),  # pyright: ignore
        "got the function adam",
        "an optax GradientTransformation",
        "optax.adam(0.1)",
    ),
    "tables: lookahead": (
        lambda x: layer(optax.lookahead(optax.sgd(0.1), 5, 0.5)),
        "optax.lookahead",
        "pairs of fast and slow",
        "give the table its fast_optimizer",
    ),
    "dense: lookahead": (
        lambda x: te.Optimizer(x.model, optax.lookahead(optax.sgd(0.1), 5, 0.5)),
        "got optax.lookahead",
        "plain arrays",
        "tx=fast_optimizer",
    ),
    "dense: name": (
        lambda x: te.Optimizer(x.model, "adam"),
        "got 'adam'",
        "an optax GradientTransformation",
        "write optax.adam(0.1)",
    ),
    "dense: not called": (
        lambda x: te.Optimizer(x.model, optax.adam),
        "got the function adam",
        "an optax GradientTransformation",
        "optax.adam(0.1)",
    ),
    "dense: number": (
        lambda x: te.Optimizer(x.model, 0.001),
        "got 0.001",
        "an optax GradientTransformation",
        "optax.adam(0.001)",
    ),
    "dense: swapped": (
        lambda x: te.Optimizer(optax.adam(1e-3), x.model),
        "got GradientTransformation",
        "an nnx.Module",
        "te.Optimizer(model, tx)",
    ),
    "linen: name": (
        lambda x: te.linen.TrainState.create(
            apply_fn=x.linen.apply, variables=x.variables, tx="adam"
        ),
        "got 'adam'",
        "an optax GradientTransformation",
        "write optax.adam(0.1)",
    ),
    "clipvalue: negative": (
        lambda x: te.optimizers.adagrad(0.1, clipvalue=-1.0),
        "got -1.0",
        "at least 0",
        "clipvalue=1.0",
    ),
    "slot_variable_creation_fn": (
        lambda x: te.optimizers.adam(0.1, slot_variable_creation_fn=print),
        "got the function print",
        "must be None",
        "slot_initializers={'momenta': 0.5}",
    ),
    "slot_variable_creation_fn without slots": (
        lambda x: te.optimizers.sgd(0.1, slot_variable_creation_fn=print),
        "got the function print",
        "must be None",
        "Leave it out",
    ),
    "argument of optax": (
        lambda x: te.optimizers.adam(0.1, b1=0.9),
        "'b1'",
        "no argument",
        "it takes learning_rate, beta_1",
    ),
}

TRAINING = {
    "gradients: other model": (
        lambda x: te.gradients.add(x.gradients, gradients_of(Renamed())),
        'has [".dense',
        "of one structure",
        "te.gradients.add(first.dense, second.dense)",
    ),
    "gradients: list": (
        lambda x: te.gradients.add([x.gradients, x.gradients]),
        "got one list",
        "each gradient as an argument",
        "te.gradients.add(*gradients)",
    ),
    "clip: swapped": (
        lambda x: te.gradients.clip_by_global_norm(1.0, x.gradients),
        "got Gradients",
        "a number",
        "te.gradients.clip_by_global_norm(gradients, max_norm)",
    ),
    "scale: swapped": (
        lambda x: te.gradients.scale(0.5, x.gradients),
        "got Gradients",
        "a number",
        "te.gradients.scale(gradients, factor)",
    ),
    "update_if: swapped": (
        lambda x: te.gradients.update_if(lambda state: state, True, x.tables),
        "got True",
        "a function",
        "te.gradients.update_if(condition, update, state)",
    ),
    "norm of optax in jit": (
        lambda x: jax.jit(optax.global_norm)(x.gradients),
        "key<row ids",
        "data type",
        "te.gradients.global_norm",
    ),
    "optimizer of Flax": (
        lambda x: nnx.Optimizer(x.model, optax.adam(0.1), wrt=nnx.Param).update(
            x.model, x.gradients
        ),
        "structure error",
        "['dense']",
    ),
    "update: loss and gradients": (
        lambda x: x.optimizer.update(x.model, (0.0, x.gradients)),
        "got tuple",
        "gradients of tpu_embedding.value_and_grad",
        "optimizer.update(model, gradients)",
    ),
    "model: state": (
        lambda x: te.value_and_grad(loss_fn)(nnx.state(x.model), IDS),
        "got State with the keys ['embedding', 'head']",
        "an nnx.Module",
        "te.value_and_grad(loss_fn)(model, ...)",
    ),
    "model: variables of Linen": (
        lambda x: te.value_and_grad(loss_fn)(x.variables, IDS),
        "'embedding_tables'",
        "an nnx.Module",
        "te.linen.value_and_grad(loss_fn)(variables, ...)",
    ),
    "loss: nested": (
        in_loss(nested),
        "calls it for the same model",
        "calls no te.value_and_grad",
        "first(model) + second(model)",
    ),
    "loss: nnx.cond": (in_loss(one_branch), "inside", "nnx.cond", BEFORE_IT),
    "loss: nnx.fori_loop": (in_loss(nnx_loop), "inside", "nnx.scan", BEFORE_IT),
    "loss: with aux": (
        in_loss(lambda model: (loss_fn(model, IDS), 1.0)),
        "got a tuple of 2 values",
        "one scalar",
        "has_aux=True",
    ),
    "loss: without aux": (
        lambda x: te.value_and_grad(loss_fn, has_aux=True)(x.model, IDS),
        "got an array of shape ()",
        "a pair (loss, aux)",
        "return loss, aux",
    ),
    "loss: per sample": (
        in_loss(lambda model: model(IDS)),
        "got an array of shape (4, 1)",
        "a scalar loss",
        "jnp.mean(losses)",
    ),
}

FUNCTIONS = {
    "init_tables: seed": (
        lambda x: te.functional.init_tables(x.plan, 0),
        "got 0",
        "a random key such as jax.random.key(0)",
        "te.functional.init_tables(plan, key)",
    ),
    "init_tables: swapped": (
        lambda x: te.functional.init_tables(jax.random.key(0), x.plan),
        "got an array of shape ()",
        "an EmbeddingPlan",
        "te.functional.init_tables(plan, key)",
    ),
    "init_slots: swapped": (
        lambda x: te.functional.init_slots(x.plan, x.tables),
        "got dict with the keys ['stack_0']",
        "an EmbeddingPlan",
        "te.functional.init_slots(tables, plan)",
    ),
    "lookup: plan first": (
        lambda x: te.functional.lookup(x.plan, x.tables, IDS),
        "got dict with the keys ['watched']",
        "an EmbeddingPlan",
        "te.functional.lookup(tables, features, plan)",
    ),
    "read_rows: not routed": (
        lambda x: te.functional.read_rows(x.tables, IDS, x.plan),
        "got dict with the keys ['watched']",
        "that te.functional.route returned",
        "te.functional.read_rows(tables, routed, plan)",
    ),
    "compute_gradients: result": (
        lambda x: te.functional.compute_gradients(
            x.result, x.result.activations, x.plan
        ),
        "got LookupResult",
        "the Routing of te.functional.lookup",
        "te.functional.compute_gradients(routing, cotangents, plan)",
    ),
    "apply_gradients: of the layer": (
        lambda x: te.functional.apply_gradients(x.tables, x.slots, x.gradients, x.plan),
        "got Gradients",
        "gradients.tables['embedding']",
        "te.functional.apply_gradients(tables, slots, gradients, plan)",
    ),
    "apply_gradients: no plan": (
        lambda x: te.functional.apply_gradients(x.tables, x.slots, x.gradients),
        "missing",
        "'plan'",
        "te.functional.apply_gradients(tables, slots, gradients, plan)",
    ),
    "prepare_features: layer": (
        lambda x: te.inputs.prepare_features(IDS, x.model.embedding),
        "got TPUEmbedding",
        "an EmbeddingPlan",
        "te.inputs.prepare_features(features, plan)",
    ),
    "unstack_tables: swapped": (
        lambda x: te.functional.unstack_tables(x.plan, x.tables),
        "got dict with the keys ['stack_0']",
        "an EmbeddingPlan",
        "te.functional.unstack_tables(stacked, plan)",
    ),
    "with_table_values: swapped": (
        lambda x: te.functional.with_table_values(x.tables, x.plan, {"movie": VALUES}),
        "got dict with the keys ['movie']",
        "an EmbeddingPlan",
        "te.functional.with_table_values(stacked, values, plan)",
    ),
    "with_slot_values: array": (
        lambda x: te.functional.with_slot_values(x.slots, {"movie": VALUES}, x.plan),
        "got an array of shape (6, 2)",
        "a dict",
        "{'movie': {'accumulators': array}}",
    ),
}

FILES = {
    "save: swapped": (
        lambda x: te.save(x.model, "checkpoint"),
        "got Model",
        "a path",
        "te.save(directory, state)",
    ),
    "restore: swapped": (
        lambda x: te.restore(x.model, "checkpoint"),
        "got Model",
        "a path",
        "te.restore(directory, state)",
    ),
    "export: as te.save": (
        lambda x: te.export.save_tables("export", x.model),
        "got 'export'",
        "an nnx.Module",
        "te.export.save_tables(model, directory)",
    ),
    "delta: no directory": (
        lambda x: te.export.save_delta("new", "old"),
        "missing",
        "'directory'",
        "te.export.save_delta(export, base, directory)",
    ),
    "import: variables": (
        lambda x: te.checkpoint.import_tables("values.npz", x.variables),
        "got dict with the keys",
        "an nnx.Module",
        "te.checkpoint.import_tables(source, model)",
    ),
}

CASES = LAYERS | OPTIMIZERS | TRAINING | FUNCTIONS | FILES


@pytest.mark.parametrize("case", CASES)
def test_error_says_what_is_given_and_wanted_and_what_to_write(case, given):
    call, *parts = CASES[case]
    with pytest.raises((TypeError, ValueError)) as error:
        call(given)
    text = str(error.value)
    assert [part for part in parts if part not in text] == [], text
    assert len(text) < 1000, text  # No plan, model or batch is printed.


def test_keys_of_either_kind_make_tables(given):
    typed, raw = jax.random.key(0), jax.random.PRNGKey(0)
    first, second = (te.functional.init_tables(given.plan, key) for key in (typed, raw))
    np.testing.assert_array_equal(
        te.functional.unstack_tables(first, given.plan)["movie"],
        te.functional.unstack_tables(second, given.plan)["movie"],
    )


def test_a_check_leaves_the_functions_of_jit():
    assert callable(te.functional.init_tables.lower)  # pyright: ignore


def test_configs_that_are_no_arrays_show_their_attributes(given):
    for config in (FEATURES["watched"], given.plan.features):
        members = dict(inspect.getmembers(config))
        assert "__jax_array__" not in members and "__class__" in members


def test_a_class_by_name_keeps_its_signature_and_defaults():
    @by_name
    class Pair:
        def __init__(self, *, first: int, second: int = 2):
            self.values = first, second

    assert Pair(first=1).values == (1, 2)
    with pytest.raises(TypeError, match="missing 1 required"):
        Pair()  # pyright: ignore


DESCRIPTIONS = {
    "text": ("a" * 10, "'aaaaaaaaaa'"),
    "long text": ("a" * 100, "str"),
    "None": (None, "None"),
    "class": (int, "the class int"),
    "function": (len, "the function len"),
    "mapping": ({"b": 1}, "dict with the keys ['b']"),
    "array": (np.zeros(3), "an array of shape (3,) and dtype float64"),
    "object": (object(), "object"),
}


@pytest.mark.parametrize("case", DESCRIPTIONS)
def test_descriptions_are_short(case):
    value, text = DESCRIPTIONS[case]
    assert describe_value(value) == text
