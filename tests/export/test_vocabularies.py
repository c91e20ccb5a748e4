"""An export with vocabularies takes strings, and treats unknown ones by choice."""

import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.states import make_layer
from tests.rejections import rejects
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
    vocabularies = {"user": USERS, "genres": GENRES}
    return make_layer({k: (x.vocabulary_size, 4) for k, x in vocabularies.items()})


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
    with rejects(fix="'5'"):
        served(strings | {"user": ["5", "4"]})


def test_vocabularies_are_files_that_users_read(directory):
    path = directory / "vocabularies" / "0.json"
    assert te.inputs.Vocabulary.load(path).tokens == GENRES.tokens


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
    for wrong, field, value in (
        ({"movie": USERS}, "key", "movie"),
        ({5: USERS}, "key", 5),
        ({"user": larger}, "vocabularies['user']", larger),
        ({"user": ["a"]}, "vocabularies['user']", ["a"]),
    ):
        with rejects(ExportError, field=field, value=value):
            by_input(wrong, signature)
