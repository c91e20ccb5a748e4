"""An export with vocabularies takes strings, and treats unknown ones by choice."""

import shutil

import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tpu_embedding.export.documents import read_document, write_document
from tpu_embedding.export.program_inputs import Input, Signature, by_input

ExportError = te.export.ExportError
GENRES = te.inputs.Vocabulary(["comedy", "drama"], mask_token="")
USERS = te.inputs.Vocabulary(["17", "4"], num_oov_buckets=0)
BATCH = {
    "user": np.zeros(3, np.int32),
    "genres": te.RaggedIds.from_lists([[2], [], [3, 2]]),
}


@pytest.fixture(scope="module")
def layer():
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=vocabulary.vocabulary_size,
                dim=4,
                combiner="mean",
                initializer=te.initializers.normal(1.0),
                name=name,
            )
        )
        for name, vocabulary in {"user": USERS, "genres": GENRES}.items()
    }
    return te.TPUEmbedding(features, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def directory(layer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "served"
    vocabularies = {"genres": GENRES, "user": USERS}
    te.export.save(layer, directory, BATCH, vocabularies=vocabularies)
    return directory


def test_strings_are_served(layer, directory):
    served = te.export.load(directory)
    strings = {"user": [17, 4], "genres": [["drama", "western", ""], ["comedy"]]}
    rows = layer.embedding_tables()
    outputs = served(strings)
    np.testing.assert_array_equal(outputs["user"], rows["user"])
    of_genres = [rows["genres"][[3, 1]].mean(axis=0), rows["genres"][2]]
    # Tolerance: the mean of two rows is rounded in another order.
    np.testing.assert_allclose(outputs["genres"], of_genres, atol=1e-6)
    strict = te.export.load(directory, unknown_strings="error")
    known = {"user": ["17", "4"], "genres": [["drama"], ["comedy"]]}
    np.testing.assert_array_equal(strict(known)["genres"], rows["genres"][[3, 2]])
    with pytest.raises(ValueError, match="'western' is not one of the 2 tokens"):
        strict(strings)
    with pytest.raises(ValueError, match="'5' is not one of the 2 tokens"):
        served(strings | {"user": ["5", "4"]})


def test_vocabularies_are_files_that_users_read(directory):
    path = directory / "vocabularies" / "0.json"
    assert te.inputs.Vocabulary.load(path).tokens == GENRES.tokens
    text = path.read_text()
    path.write_text(text.replace("comedy", "comedies"))
    with pytest.raises(ExportError, match="0.json.*must have the SHA-256"):
        te.export.load(directory)
    path.write_text(text)


def test_names_that_are_none_of_an_input(layer, tmp_path):
    with pytest.raises(ExportError, match="got 'film'; the inputs"):
        te.export.save(layer, tmp_path / "x", BATCH, vocabularies={"film": GENRES})
    assert not list(tmp_path.iterdir())


def test_vocabularies_by_input():
    names = ("user", "left/user", "left/movie", "right/movie")
    inputs = tuple(
        Input(name=x, path=tuple(x.split("/")), kind="dense_ids", vocabulary_size=3)
        for x in names
    )
    signature = Signature(arguments=("features",), inputs=inputs)
    given = {"user": USERS, "left/user": USERS, "left/movie": USERS}
    assert by_input(given, signature).keys() == given.keys()
    larger = te.inputs.Vocabulary(["a", "b", "c"])
    for wrong, message in (
        ({"movie": USERS}, "the inputs are .'left/movie', 'right/movie'."),
        ({5: USERS}, "got 5; the inputs are .'user'"),
        ({"user": larger}, "'user'.*at most 3 ids, .*got Vocabulary.3 tokens"),
        ({"user": ["a"]}, "must be a te.inputs.Vocabulary"),
    ):
        with pytest.raises(ExportError, match=message):
            by_input(wrong, signature)


def test_the_treatment_of_unknown_strings_is_one_of_two(directory):
    with pytest.raises(ValueError, match="unknown_strings must be one of.*'errors'"):
        te.export.load(directory, unknown_strings="errors")
    with pytest.raises(ValueError, match="unknown must be one of.*'errors'"):
        USERS.ids(["4"], unknown="errors")


def test_deltas_carry_vocabularies(directory, tmp_path):
    newer, path = tmp_path / "newer", "vocabularies/0.json"
    shutil.copytree(directory, newer)
    te.inputs.Vocabulary(["comedy", "opera"], mask_token="").save(newer / path)
    write_document(newer, read_document(directory).signature)
    te.export.save_delta(newer, directory, tmp_path / "delta")
    changed = [x.name for x in (tmp_path / "delta").rglob("*") if x.is_file()]
    assert sorted(changed) == ["0.json", "base.json", "export.json"]
    te.export.apply_delta(directory, tmp_path / "delta", tmp_path / "made")
    made = te.inputs.Vocabulary.load(tmp_path / "made" / path)
    assert made.tokens == ("comedy", "opera")
