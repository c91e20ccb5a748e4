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
    batch_of,
    live_outputs,
    trained_model,
)
from tests.rejections import rejects
from tests.tiers import quick_cases


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 0), id="untrained"),
        pytest.param((2, 1), id="2devices", marks=pytest.mark.full),
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


@pytest.mark.parametrize("batch_size", quick_cases([1, 7], "7"))
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
    for name, values in tables.items():
        np.testing.assert_array_equal(served.tables[name], values)
    np.testing.assert_array_equal(
        served.dense["dense/kernel"], trained.dense.kernel[...]
    )
    # 2.5 kB of weights per table row would show; the program has none.
    assert (directory / "program.stablehlo").stat().st_size < 80_000


def test_the_program_names_no_file_of_this_machine(directory):
    program = (directory / "program.stablehlo").read_bytes()
    assert b".py" not in program
    assert str(pathlib.Path(te.__file__).parent).encode() not in program


def test_program_holds_no_array_of_ids_by_vocabulary(directory):
    serialized = (directory / "program.stablehlo").read_bytes()
    text = jax.export.deserialize(bytearray(serialized)).mlir_module()
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


class Similar(nnx.Module):
    """Two layers, and methods that a batch of training does not call."""

    def __init__(self):
        config = {"a": te.FeatureConfig(table=MOVIES)}
        self.left = te.TPUEmbedding(config, mesh=mesh_of(1), rngs=nnx.Rngs(0))
        self.right = te.TPUEmbedding(config, mesh=mesh_of(1), rngs=nnx.Rngs(1))

    def similar(self, liked, candidates):
        serving = {"c": te.FeatureConfig(table=MOVIES, max_sequence_length=3)}
        rows = self.left({"a": liked})["a"] + self.right({"a": liked[:, 0]})["a"]
        others = self.left({"c": candidates}, serving_config=serving)["c"]
        return jnp.einsum("bd,bcd->bc", rows, others)

    def of_whole_batch(self, ids):
        if ids.shape[0] > 2:
            ids = ids[:2]
        return self.left({"a": ids})["a"]


@pytest.mark.full
def test_any_method_of_several_layers(tmp_path):
    model, directory = Similar(), tmp_path / "served"
    random = np.random.default_rng(0)
    liked = random.integers(0, 307, (5, 2))
    candidates = random.integers(0, 1009, (5, 3))
    te.export.save(model, directory, liked, candidates, method="similar")
    served = te.export.load(directory)
    assert set(served.tables) == {"left/movies", "right/movies"}
    assert (directory / "tables" / "left%2Fmovies.safetensors").exists()
    scores = served(liked[:2], candidates[:2])
    # Sums of 8 products in another order.
    expected = model.similar(jnp.asarray(liked[:2]), jnp.asarray(candidates[:2]))
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-6)


def test_code_that_computes_with_the_batch_size(tmp_path):
    model, path, ids = Similar(), tmp_path / "served", np.array([1, 2, 3])
    with rejects(te.export.ExportError, fix="batch_size=N"):
        te.export.save(model, path, ids, method="of_whole_batch")
    assert not list(tmp_path.iterdir())
    te.export.save(model, path, ids, method="of_whole_batch", batch_size=3)
    served = te.export.load(path)
    assert served(ids).shape == (2, 8)
    with pytest.raises(ValueError, match="[Ss]hape"):
        served(ids[:2])


NO_BATCH = {"user": np.array([1, 2])}
WRONG_EXPORTS = {
    "no leaf": (({},), {}, "example"),
    "a list": (({"user": [1, 2]},), {}, "input 'user/0'"),
    "dtype": ((NO_BATCH,), {"dtype": "float64"}, "dtype"),
}


@pytest.mark.parametrize(
    ("example", "options", "field"), WRONG_EXPORTS.values(), ids=WRONG_EXPORTS
)
def test_wrong_exports_are_refused(tmp_path, example, options, field):
    config = {"user": FEATURES["user"]}
    layer = te.TPUEmbedding(config, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    with rejects(te.export.ExportError, field=field):
        te.export.save(layer, tmp_path / "served", *example, **options)
    with rejects(te.export.ExportError, field="model"):
        te.export.save(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tmp_path / "served", 1)
    assert not list(tmp_path.iterdir())


FOUR, INPUTS = batch_of(4)
WRONG_CALLS = {
    "one argument": ((FOUR,), "Number of arguments"),
    "missing": (({"user": np.array([1])}, INPUTS), None),
    "out of range": ((FOUR | {"user": np.array([1, 2, 3, 307])}, INPUTS), None),
    "floats": ((FOUR | {"user": np.ones(4)}, INPUTS), "'features/user'"),
    "no weights": ((FOUR | {"weighted": np.ones((4, 3), int)}, INPUTS), "arrays"),
    "ragged": ((FOUR | {"watched": [[1], [], [2, 3], [4]]}, INPUTS), "arrays"),
}


@pytest.mark.parametrize(("call", "field"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls_are_refused(served, call, field):
    with rejects((TypeError, ValueError), field=field):
        served(*call)


class NextIds(Similar):
    """Computes with ids before it looks them up."""

    def __call__(self, ids):
        return self.left({"a": ids + 1})["a"]


def test_numbers_that_the_program_cannot_hold_are_refused(tmp_path):
    model = NextIds()
    te.export.save(model, tmp_path / "served", np.arange(4))
    served = te.export.load(tmp_path / "served")
    wanted = model.left.embedding_tables()["movies"][[1, 2]]
    np.testing.assert_array_equal(served(np.array([0, 1])), wanted)
    with rejects(te.export.ExportError, field="Input 'ids'", value=[0, 2**33]):
        served(np.array([0, 2**33]))


def test_damage_is_found(tmp_path):
    config = {"user": FEATURES["user"]}
    layer, path = te.TPUEmbedding(config, rngs=nnx.Rngs(0)), tmp_path / "served"
    words = te.inputs.Vocabulary([f"{i}" for i in range(306)])
    te.export.save(layer, path, NO_BATCH, vocabularies={"user": words})
    files = ("program.stablehlo", "tables/users.safetensors", "vocabularies/0.json")
    for file in files:
        before = (path / file).read_bytes()
        (path / file).write_bytes(before[:-1] + bytes([before[-1] ^ 0x40]))
        with rejects(te.export.ExportError, fix=file):
            te.export.load(path)
        if file.startswith("tables"):
            assert te.export.load(path, verify=False).tables["users"].shape == (307, 8)
        (path / file).write_bytes(before)
