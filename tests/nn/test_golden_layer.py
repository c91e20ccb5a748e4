"""Runs of TensorFlow's lookups and of its layer, with gradients, through our layer.

The lookup files of all kinds are features of one layer, each with a table of its own,
so that one compiled step per number of devices computes them all.

Where TensorFlow disagrees with itself, one rule holds here:
* Its lookup without checks leaves out the empty samples after the last one with an id.
  Here they are zero, as TensorFlow's other lookups have them.
* Its checked lookup fills empty samples with id 0 and masks the result, so row 0 counts
  as touched. Here an empty sample touches no row. Both have a gradient of zero.
* It raises for negative ids of ragged features and drops them in sparse ones. Here the
  feature's policy decides; these files have none in ragged features.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.tiers import quick_cases

# As the golden files' notes suggest: sums of float32 products in another order.
TOLERANCE = dict(rtol=2e-5, atol=1e-5)


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"lookup_{name}.npz") as arrays:
        run = dict(arrays)
    return run | {"meta": json.loads(str(run["meta"]))}


NAMES = sorted(
    path.stem.removeprefix("lookup_")
    for path in GOLDEN.glob("lookup_*.npz")
    if path.stem != "lookup_quantization"
)


def feature_of(name):
    """Returns the configuration under which our lookup is TensorFlow's."""
    run = golden(name)
    meta, options = run["meta"], {}
    match meta["api"]:
        case "safe_embedding_lookup_sparse":
            # Negative ids, and ids whose weight is not positive, are left out.
            options = dict(out_of_range_ids="drop", default_id=meta.get("default_id"))
        case "embedding_lookup_sparse":
            options = dict(validate_weights_and_indices=False)
        case "serving":
            # Ragged features ignore the flag; a sequence has no weights.
            options = dict(validate_weights_and_indices=False)
            options |= dict(max_sequence_length=meta.get("max_sequence_length", 0))
        case api:
            raise AssertionError(api)
    if meta["input"] == "dense":
        options["output_shape"] = run["dense"].shape
    elif meta.get("output_shape"):
        options["output_shape"] = tuple(meta["output_shape"])
    elif meta["input"] == "sparse" and len(run["dense_shape"]) > 2:
        options["output_shape"] = tuple(int(n) for n in run["dense_shape"][:-1])
    vocabulary_size, dim = run["table"].shape
    table = te.TableConfig(
        vocabulary_size=vocabulary_size,
        dim=dim,
        combiner=meta["combiner"],
        name=name,
    )
    return te.FeatureConfig(table=table, name=name, **options)


QUANTIZED = golden("quantization")
QUANTIZED_COTANGENT = np.arange(len(QUANTIZED["x"]), dtype=np.float32)[:, None]


def quantized_feature():
    """Looks up the rows of a table that holds the values to be quantized."""
    meta = QUANTIZED["meta"]
    quantization = te.QuantizationConfig(
        num_buckets=meta["num_buckets"], lower=meta["lower"], upper=meta["upper"]
    )
    table = te.TableConfig(
        vocabulary_size=len(QUANTIZED["x"]),
        dim=1,
        combiner="sum",
        name="quantization",
        quantization_config=quantization,
    )
    # Its batch differs from the other features' batch.
    return te.FeatureConfig(table=table, output_shape=(len(QUANTIZED["x"]),))


def ids_of(name):
    run = golden(name)
    match run["meta"]["input"]:
        case "dense":
            # `[batch]` under an output shape of the same size: nothing is combined.
            return run["dense"].reshape(-1)
        case "ragged":
            return te.RaggedIds(
                values=run["values"],
                row_splits=run["row_splits"],
                weights=run.get("weights"),
            )
        case "sparse":
            return te.SparseIds(
                indices=run["indices"],
                values=run["values"],
                dense_shape=run["dense_shape"],
                weights=run.get("weights"),
            )


def loss_fn(layer, features, cotangents):
    """Returns a loss whose derivatives by the activations are the cotangents."""
    activations = layer(features)
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), activations, cotangents)
    return sum(jax.tree.leaves(products)), activations


@nnx.jit
def step(layer, optimizer, features, cotangents):
    compute = te.value_and_grad(loss_fn, has_aux=True)
    (_, activations), gradients = compute(layer, features, cotangents)
    optimizer.update(layer, gradients)
    return activations


@pytest.fixture(scope="module", params=[1, 8], ids=lambda n: f"{n}devices")
def results(request):
    """Activations, gradients, stats, and tables after SGD with rate 1, of all files."""
    config = {name: feature_of(name) for name in NAMES}
    config["quantization"] = quantized_feature()
    mesh = mesh_of(request.param)
    layer = te.TPUEmbedding(config, optax.sgd(1.0), mesh=mesh, rngs=nnx.Rngs(0))
    assert len(layer.plan.stacks) == 2
    batch = {name: ids_of(name) for name in NAMES}
    batch["quantization"] = np.arange(len(QUANTIZED["x"]))
    batch = layer.prepare(batch)
    cotangents = {"quantization": QUANTIZED_COTANGENT}
    shapes = te.functional.activation_shapes(batch, layer.plan)
    for name in NAMES:
        given = golden(name)["cotangent"]
        # Samples that TensorFlow's output lacks get a cotangent all the same.
        cotangent = np.ones(shapes[name].shape, np.float32)
        cotangent[: len(given)] = given
        cotangents[name] = cotangent
    values = {name: golden(name)["table"] for name in NAMES}
    layer.set_embedding_tables(values | {"quantization": QUANTIZED["x"][:, None]})
    optimizer = te.Optimizer(layer, optax.sgd(1.0))
    activations = step(layer, optimizer, batch, cotangents)
    return dict(
        activations=jax.device_get(activations),
        out_of_range=jax.device_get(layer.stats.get_value().out_of_range),
        tables=layer.embedding_tables(),
    )


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("name", NAMES)
def test_activations_gradients_and_counts(name, results):
    run, actual = golden(name), results["activations"][name]
    expected = run["output"]
    if name.startswith("plain"):
        # TensorFlow leaves out the empty samples after the last one with an id.
        assert len(actual) == run["dense_shape"][0]
        assert not actual[len(expected) :].any()
        actual = actual[: len(expected)]
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, **TOLERANCE)
    gradient = run["table"] - results["tables"][name]
    np.testing.assert_allclose(gradient, run["grad_table"], **TOLERANCE)
    # Rows without gradient keep every bit.
    untouched = ~run["grad_table"].any(axis=1)
    assert not gradient[untouched].any()
    ids = run["dense"] if "dense" in run else run["values"]
    outside = int(((ids < 0) | (ids >= len(run["table"]))).sum())
    assert results["out_of_range"][name] == outside


@pytest.mark.full(every_case=True)
def test_quantization(results):
    assert (np.abs(QUANTIZED["x"]) > 1).any()
    # Off by no more than the rounding of a multiplication by the step of 2/15: the
    # next bucket would be 0.13 away.
    activations = results["activations"]["quantization"][:, 0]
    np.testing.assert_allclose(activations, QUANTIZED["y"], rtol=0, atol=1e-6)
    # Straight through, outside the range too; storage is not quantized.
    expected = QUANTIZED["x"] - QUANTIZED_COTANGENT[:, 0]
    after = results["tables"]["quantization"][:, 0]
    np.testing.assert_allclose(after, expected, rtol=1e-6)


def layer_batch(run, step_number):
    ragged, sparse = (f"in{step_number}__{x}_" for x in ("b_ragged", "c_sparse"))
    return {
        "a_dense": run[f"in{step_number}__a_dense"],
        "b_ragged": te.RaggedIds(
            values=run[ragged + "values"], row_splits=run[ragged + "row_splits"]
        ),
        "c_sparse": te.SparseIds(
            indices=run[sparse + "indices"],
            values=run[sparse + "values"],
            dense_shape=run["meta"]["sparse_dense_shape"],
        ),
    }


@pytest.mark.parametrize("name", quick_cases(["adagrad", "adam", "ftrl", "sgd"]))
def test_layer_trains_as_that_of_tensorflow_recommenders(name):
    """Activations and tables of all steps, by the Keras optimizer of the run."""
    with np.load(GOLDEN / f"layer_{name}.npz") as arrays:
        run = dict(arrays)
    run["meta"] = meta = json.loads(str(run["meta"]))
    optimizer = te.optimizers.from_keras_config(
        meta["hyper_parameters"],
        class_name=meta["optimizer"].rpartition(".")[2],
        # The kernel that TensorFlow has for FTRL moves the rows of the batch only.
        rows="touched" if name == "ftrl" else "every",
    )
    tables = {
        table: te.TableConfig(
            vocabulary_size=size, dim=dim, combiner=combiner, name=table
        )
        for table, size, dim, combiner in zip(
            ("user", "item"), meta["V"], meta["D"], meta["combiners"], strict=True
        )
    }
    config = {
        feature: te.FeatureConfig(table=tables[table], expected_valence=7)
        for feature, table in meta["features"].items()
    }
    layer = te.TPUEmbedding(config, optimizer, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    layer.set_embedding_tables({t: run[f"table0__{t}"] for t in tables})
    optimizer = te.Optimizer(layer, optax.sgd(1.0))
    for i in range(meta["T"]):
        cotangents = {feature: run[f"cot{i}__{feature}"] for feature in config}
        activations = step(
            layer, optimizer, layer.prepare(layer_batch(run, i)), cotangents
        )
        for feature in config:
            np.testing.assert_allclose(
                activations[feature], run[f"act{i}__{feature}"], **TOLERANCE
            )
        for table, values in layer.embedding_tables().items():
            np.testing.assert_allclose(
                values, run[f"table__{table}"][i + 1], **TOLERANCE
            )
