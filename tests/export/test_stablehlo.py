import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.served_models import (
    FEATURES,
    MOVIES,
    UniqueRowsModel,
    batch_of,
    live_outputs,
    trained_model,
    unique_rows_batch,
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 0), id="untrained"),
        pytest.param((8, 2), id="8devices", marks=pytest.mark.full),
    ],
)
def trained(request):
    return trained_model(*request.param)


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("export") / "served"
    te.export.save(trained, directory, *batch_of(16))
    return directory


@pytest.fixture(scope="module")
def served(directory):
    return te.export.load(directory)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_outputs_are_those_of_the_live_model(trained, served, batch_size):
    features, inputs = batch_of(batch_size)
    outputs = served(features, inputs)
    expected = live_outputs(trained, features, inputs)
    assert set(outputs) == set(expected)
    for name, values in expected.items():
        # Sums of up to 6 rows, and of 8 products, in another order.
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


def test_weights_are_beside_the_program(trained, served, directory):
    tables = trained.embedding.embedding_tables()
    assert set(served.document.tables) == set(tables)
    for name, values in tables.items():
        np.testing.assert_array_equal(served.tables[name], values)
        assert served.document.tables[name].largest_error == 0
    np.testing.assert_array_equal(
        served.dense["dense/kernel"], trained.dense.kernel[...]
    )
    watched = served.signature.arrays["features/watched"]
    assert (watched.shape, watched.dtype) == (("batch", 3), "int32")
    # 2.5 kB of weights per table row would show; the program has none.
    assert (directory / "program.stablehlo").stat().st_size < 80_000


def program_text(directory) -> str:
    serialized = (directory / "program.stablehlo").read_bytes()
    return jax.export.deserialize(bytearray(serialized)).mlir_module()


def test_program_holds_no_array_of_ids_by_vocabulary(directory):
    text = program_text(directory)
    shapes = set(re.findall(r"tensor<([^>]*)>", text))
    of_tables = {s for s in shapes if re.search(r"\b(1009|307|53)x|x(1009|307|53)x", s)}
    assert of_tables == {"1009x8xf32", "307x8xf32", "53x8xf32"}
    # Nothing is made in the shape of a table: they are arguments of gathers only.
    for line in text.splitlines():
        results = line.rpartition("->")[2] if "->" in line else line.rpartition(":")[2]
        if "func" not in line and "call @" not in line:
            assert not re.search(r"(1009|307|53)x8xf32", results), line
    assert "dot_general" in text  # of the dense layer
    assert not re.search(r"all_to_all|all_reduce|collective|sharding|while", text)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    # Half a unit in the last of 8 binary digits; half a step of 255, and rounding.
    [
        pytest.param("bfloat16", 2.0**-8, id="bfloat16", marks=pytest.mark.full),
        pytest.param("int8", 0.501 / 255, id="int8"),
    ],
)
def test_narrow_tables_err_by_their_rounding_only(trained, tmp_path, dtype, bound):
    table = trained.embedding.embedding_tables()["users"]
    example = {"user": np.arange(4)}
    te.export.save(trained.embedding, tmp_path / "served", example, dtype=dtype)
    served = te.export.load(tmp_path / "served")
    assert set(served.tables) == {"users"}
    ids = np.arange(307)
    difference = np.abs(served({"user": ids})["user"] - table)
    width = table.max(axis=1) - table.min(axis=1)
    limit = bound * (width[:, None] if dtype == "int8" else np.abs(table))
    assert (difference <= limit + 1e-9).all()
    error = served.document.tables["users"].largest_error
    assert error == pytest.approx(difference.max(), rel=1e-5)


MORE = te.TableConfig(vocabulary_size=1009, dim=8, name="more")


class Similar(nnx.Module):
    """Two layers, and methods that a batch of training does not call."""

    def __init__(self):
        self.left = te.TPUEmbedding(
            {"a": te.FeatureConfig(table=MOVIES)}, mesh=mesh_of(1), rngs=nnx.Rngs(0)
        )
        self.right = te.TPUEmbedding(
            te.FeatureConfig(table=(MOVIES, MORE)), mesh=mesh_of(1), rngs=nnx.Rngs(1)
        )

    def similar(self, liked, candidates):
        serving = {"c": te.FeatureConfig(table=MOVIES, max_sequence_length=3)}
        rows = self.left({"a": liked})["a"]
        others = self.left({"c": candidates}, serving_config=serving)["c"]
        movies, more = self.right(liked[:, 0])
        return jnp.einsum("bd,bcd->bc", rows + movies + more, others)

    def of_whole_batch(self, ids):
        if ids.shape[0] > 2:
            ids = ids[:2]
        return self.left({"a": ids})["a"]


@pytest.mark.full
def test_any_method_of_several_layers(tmp_path):
    model = Similar()
    random = np.random.default_rng(0)
    liked = random.integers(0, 307, (5, 2))
    candidates = random.integers(0, 1009, (5, 3))
    directory = tmp_path / "served"
    te.export.save(model, directory, liked, candidates, method="similar")
    served = te.export.load(directory)
    assert set(served.tables) == {"left/movies", "right/movies", "right/more"}
    assert (directory / "tables" / "left%2Fmovies.safetensors").exists()
    scores = served(liked[:2], candidates[:2])
    # Sums of 8 products in another order.
    expected = model.similar(jnp.asarray(liked[:2]), jnp.asarray(candidates[:2]))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


@pytest.mark.full
def test_code_that_computes_with_the_batch_size(tmp_path):
    model = Similar()
    ids = np.array([1, 2, 3])
    with pytest.raises(te.export.ExportError, match="pass batch_size=N"):
        te.export.save(model, tmp_path / "a", ids, method="of_whole_batch")
    assert not list(tmp_path.iterdir())
    te.export.save(model, tmp_path / "a", ids, method="of_whole_batch", batch_size=3)
    served = te.export.load(tmp_path / "a")
    assert served(ids).shape == (2, 8)
    with pytest.raises(ValueError, match="[Ss]hape"):
        served(ids[:2])


def average_of_ends(valence, rows):
    return (rows[0] + rows[valence - 1]) / 2


TRICKY = te.TableConfig(
    vocabulary_size=11,
    dim=3,
    combiner=te.CustomCombiner(function=average_of_ends, max_valence=4),
    name="tricky",
)
ROUNDED = te.TableConfig(
    vocabulary_size=11,
    dim=3,
    quantization_config=te.QuantizationConfig(num_buckets=16, lower=-0.3, upper=0.4),
    name="rounded",
)
RARE = {
    "custom": te.FeatureConfig(table=TRICKY),
    "custom_ragged": te.FeatureConfig(table=TRICKY),
    "quantized": te.FeatureConfig(table=ROUNDED, out_of_range_ids="drop"),
    "shaped": te.FeatureConfig(table=ROUNDED, output_shape=(3, 2)),
    "default": te.FeatureConfig(table=ROUNDED, default_id=7, out_of_range_ids="drop"),
    "wide": te.FeatureConfig(table=ROUNDED),
}


@pytest.mark.full
def test_rare_kinds_of_features(tmp_path):
    layer = te.TPUEmbedding(RARE, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    batch = {
        "custom": np.array(
            [[1, 2], [3, te.inputs.PADDING_ROW_ID], [te.inputs.PADDING_ROW_ID] * 2]
        ),
        "custom_ragged": te.RaggedIds.from_lists([[1, 2, 3, 4], [], [5]]),
        "quantized": np.array([[1, -1], [11, 2**40], [3, te.inputs.PADDING_ROW_ID]]),
        "shaped": np.array([[1, 2], [3, 4], [5, 6]]),
        "default": te.RaggedIds.from_lists([[], [99], [2]], [[], [0.5], [2.0]]),
        "wide": np.tile(np.arange(11), (3, 13))[:, :130],
    }
    te.export.save(layer, tmp_path / "served", batch, batch_size=3)
    outputs = te.export.load(tmp_path / "served")(batch)
    for name, values in layer(layer.prepare(batch)).items():
        # Sums of up to 130 rows in another order.
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-5)


NO_BATCH = {"user": np.array([1, 2])}


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {}, "missing a required argument"),
        (({},), {}, "must hold at least one array"),
        (({"user": [1, 2]},), {}, r"'user/0' of the example must be an array"),
        (({"user": np.array(["a"])},), {}, "turn strings into ids first"),
        ((NO_BATCH,), {"method": "answer"}, "method must name a method"),
        ((NO_BATCH,), {"dtype": "float64"}, "must be one of"),
        (({"movie": np.array([1])},), {}, "movie"),
    ],
)
def test_wrong_exports_are_refused(tmp_path, arguments, options, message):
    layer = te.TPUEmbedding(
        {"user": FEATURES["user"]}, mesh=mesh_of(1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match=message):
        te.export.save(layer, tmp_path / "served", *arguments, **options)
    assert not (tmp_path / "served").exists()


def with_feature(name, value):
    features, inputs = batch_of(4)
    return features | {name: value}, inputs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((batch_of(4)[0],), ValueError, "takes 2 arguments"),
        (({"user": np.array([1])}, np.ones((1, 2))), ValueError, "is missing"),
        (with_feature("user", np.array([1, 2, 3, 307])), ValueError, "user.*307"),
        (with_feature("user", np.ones(4)), TypeError, "must be integers"),
        (with_feature("user", np.array([1, 2])), ValueError, "user"),
        (with_feature("watched", np.ones((4, 2), int)), ValueError, "watched"),
        (
            with_feature("weighted", np.ones((4, 3), int)),
            ValueError,
            "must have one weight per id",
        ),
        (
            with_feature("watched", [[1], [], [2, 3], [4]]),
            ValueError,
            "got ragged_ids",
        ),
        ((batch_of(4)[0], np.ones((5, 2))), ValueError, "inputs"),
        ((batch_of(4)[0], np.array([["a"]])), TypeError, "must hold numbers"),
    ],
)
def test_wrong_calls_are_refused(served, arguments, error, message):
    with pytest.raises(error, match=message):
        served(*arguments)


def test_damage_is_found(tmp_path):
    config = {"user": FEATURES["user"]}
    layer, path = te.TPUEmbedding(config, rngs=nnx.Rngs(0)), tmp_path / "served"
    te.export.save(layer, path, NO_BATCH)
    for file in ("program.stablehlo", "dense.safetensors", "tables/users.safetensors"):
        before = (path / file).read_bytes()
        (path / file).write_bytes(before[:-1] + bytes([before[-1] ^ 0x40]))
        with pytest.raises(te.export.ExportError, match=f"{file}.*SHA-256"):
            te.export.load(path)
        if file.startswith("tables"):
            assert te.export.load(path, verify=False).tables["users"].shape == (307, 8)
        (path / file).write_bytes(before)


def test_unique_rows_are_served(tmp_path):
    model = UniqueRowsModel()
    te.export.save(model, tmp_path / "served", unique_rows_batch(16))
    served = te.export.load(tmp_path / "served")
    for batch_size in (1, 7):
        features = unique_rows_batch(batch_size)
        expected = model(model.embedding.prepare(features))["score"]
        np.testing.assert_allclose(served(features)["score"], expected, rtol=1e-6)
