"""Runs of TensorFlow's lookups and their gradients, through the public functions.

The files of all kinds are features of one layer, each with a table of its own, so that
one compiled step per number of devices computes them all.
"""

import functools
import json

import jax
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of

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
    # Its batch is not that of the other features.
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


@functools.partial(jax.jit, static_argnames="plan")
def step(tables, slots, features, cotangents, plan):
    result = te.lookup(tables, features, plan)
    gradients = te.compute_gradients(result.routing, cotangents, plan)
    tables, _ = te.apply_gradients(tables, slots, gradients, plan)
    return result, gradients, tables


@pytest.fixture(scope="module", params=[1, 8], ids=lambda n: f"{n}devices")
def results(request):
    """Activations, gradients, stats, and tables after SGD with rate 1, of all files."""
    num_devices = request.param
    config = {name: feature_of(name) for name in NAMES}
    config["quantization"] = quantized_feature()
    plan = te.make_plan(config, mesh_of(num_devices), optimizer=optax.sgd(1.0))
    assert len(plan.stacks) == 2
    batch = {name: ids_of(name) for name in NAMES}
    batch["quantization"] = np.arange(len(QUANTIZED["x"]))
    batch = te.prepare_features(batch, plan)
    cotangents = {"quantization": QUANTIZED_COTANGENT}
    for name in NAMES:
        given = golden(name)["cotangent"]
        # Samples that TensorFlow's output lacks get a cotangent all the same.
        cotangent = np.ones(te.activation_shapes(batch, plan)[name].shape, np.float32)
        cotangent[: len(given)] = given
        cotangents[name] = cotangent
    structs = jax.eval_shape(te.init_tables, plan, jax.random.key(0))
    zeros = jax.tree.map(
        lambda s: jax.device_put(np.zeros(s.shape, s.dtype), plan.sharding), structs
    )
    values = {name: golden(name)["table"] for name in NAMES}
    values["quantization"] = QUANTIZED["x"][:, None]
    tables = te.with_table_values(zeros, values, plan)
    slots = te.init_slots(tables, plan)
    result, gradients, tables = step(tables, slots, batch, cotangents, plan)
    return dict(
        plan=plan,
        activations=jax.device_get(result.activations),
        out_of_range=jax.device_get(result.stats.out_of_range),
        updates={name: gradients.first_round(name) for name in gradients.stacks},
        tables=te.unstack_tables(tables, plan),
    )


def test_all_kinds_are_here():
    kinds = {name.split("_")[0] for name in NAMES}
    assert kinds == {"dense", "plain", "ragged", "safe", "sequence"}
    assert len(NAMES) == 40


@pytest.mark.parametrize("name", NAMES)
def test_activations(name, results):
    actual = results["activations"][name]
    expected = golden(name)["output"]
    if name.startswith("plain"):
        # TensorFlow leaves out the empty samples behind the last one with an id.
        assert len(actual) == golden(name)["dense_shape"][0]
        assert not actual[len(expected) :].any()
        actual = actual[: len(expected)]
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, results):
    run = golden(name)
    gradient = run["table"] - results["tables"][name]
    np.testing.assert_allclose(gradient, run["grad_table"], **TOLERANCE)
    # Rows without gradient keep every bit.
    untouched = ~run["grad_table"].any(axis=1)
    assert not gradient[untouched].any()


def test_row_updates_hold_the_gradients(results):
    stack = next(s for s in results["plan"].stacks if len(s.tables) > 1)
    num_devices = stack.num_shards
    updates = results["updates"][stack.name]
    row_ids = np.asarray(updates.row_ids).reshape(num_devices, -1)
    values = np.asarray(updates.values).reshape(num_devices, -1, stack.dim)
    rows = np.zeros((stack.rows_per_shard * num_devices, stack.dim))
    for shard in range(num_devices):
        is_used = row_ids[shard] != te.PADDING_ROW_ID
        used = row_ids[shard][is_used]
        assert len(np.unique(used)) == len(used)
        rows[used * num_devices + shard] = values[shard][is_used]
    for table in stack.tables:
        expected = golden(table.name)["grad_table"]
        of_table = rows[table.row_offset : table.row_offset + len(expected)]
        np.testing.assert_allclose(of_table, expected, **TOLERANCE, err_msg=table.name)


@pytest.mark.parametrize("name", NAMES)
def test_only_ids_outside_the_table_are_counted(name, results):
    run = golden(name)
    ids = run["dense"] if "dense" in run else run["values"]
    outside = int(((ids < 0) | (ids >= len(run["table"]))).sum())
    assert results["out_of_range"][name] == outside


def test_the_files_have_what_they_are_here_for():
    # Else the tests above would check less than they seem to.
    safe = [golden(name) for name in NAMES if name.startswith("safe")]
    assert any((run["values"] < 0).any() for run in safe)
    mixed = [golden(name) for name in NAMES if name.endswith("mixed")]
    assert all((run["weights"] <= 0).any() for run in mixed)
    plain = [golden(name) for name in NAMES if name.startswith("plain")]
    assert any(len(run["output"]) < run["dense_shape"][0] for run in plain)


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
