"""Malformed exports and deltas, which come from elsewhere, are refused whole."""

import hashlib
import json
import random
import shutil

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.export.documents import digests_of_files

ExportError = te.export.ExportError
TABLE = te.TableConfig(vocabulary_size=9, dim=2, name="movie")
MOVIE = "tables/movie.safetensors"
OUTSIDE = ("../victim", "/victim", "a/../../victim", "", ".", "a\\b", "a\0", "a//b")
KINDS = (None, True, 1.5, "x", [], {}, [[]], 10**400, -1)
TEXTS = ("", "{", "[]", "7", "null", "[" * 100_000, "\ufeff{}")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A program, a later one of other values, and the delta between them."""
    path = tmp_path_factory.mktemp("originals")
    features = {"movie": te.FeatureConfig(table=TABLE)}
    layer = te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    example = {"movie": np.zeros((2, 3), np.int32)}
    te.export.save(layer, path / "program", example)
    values = layer.embedding_tables()["movie"].copy()
    values[[1, 4, 8]] = 2
    layer.set_embedding_tables({"movie": values})
    te.export.save(layer, path / "later", example)
    te.export.save_delta(path / "later", path / "program", path / "delta")
    (path / "victim").write_bytes(b"untouched")
    return path


@pytest.fixture
def files(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "files")


def load(files):
    te.export.load(files / "program")


def apply(files):
    te.export.apply_delta(files / "program", files / "delta", files / "made")


def refuses(call, files, match=None):
    """Checks that a call raises an error of ours, and writes nothing."""

    def content():
        paths = (path for path in files.rglob("*") if path.is_file())
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    before = content()
    with pytest.raises(ExportError, match=match):
        call(files)
    assert content() == before


def seal(directory):
    """Makes the digests of an export anew, as one does who means harm."""
    path = directory / "export.json"
    document = json.loads(path.read_text())
    found = document["files"] | digests_of_files(directory)
    path.write_text(json.dumps(document | {"files": found}))


def nodes(document, path=()):
    """Yields the paths to all values of a document but itself."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from nodes(value, (*path, key))


def damage_document(path, draw):
    """Gives one field another kind, removes or renames it, or breaks the text."""
    document = json.loads(path.read_text())
    if draw.random() < 0.1:
        path.write_text(draw.choice(TEXTS))
        return
    *outer, last = draw.choice(list(nodes(document)))
    parent = document
    for key in outer:
        parent = parent[key]
    value = parent[last]
    if isinstance(parent, dict) and draw.random() < 0.3:
        parent[draw.choice(OUTSIDE)] = parent.pop(last)
    else:
        others = [x for x in KINDS if not isinstance(x, type(value))]
        parent[last] = draw.choice(others)
    path.write_text(json.dumps(document))


def damage_tensors(path, draw):
    """Changes the header of a file of tensors, or the length of its rows."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, rows = json.loads(content[8 : 8 + length]), content[8 + length :]
    entry = header[draw.choice(list(header))]
    match draw.choice(["field", "name", "text", "length"]):
        case "field":
            field = draw.choice(["dtype", "shape", "data_offsets"])
            entry[field] = draw.choice([None, 5, "F63", [-1], [2**70], [1] * 40])
        case "name":
            header = {"other": entry}
        case "text":
            header = draw.choice([[], 7, None, {"a": 1}])
        case "length":
            rows = draw.choice([rows + b"0", rows[:-1]])
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + rows)


@pytest.mark.parametrize("seed", range(30))
def test_malformed_files_are_refused_whole(files, seed):
    draw = random.Random(seed)
    name = draw.choice(["program", "delta"])
    directory, call = files / name, load if name == "program" else apply
    if draw.random() < 0.5:
        damage_tensors(directory / MOVIE, draw)
        seal(directory)
        refuses(call, files)
        return
    path = directory / draw.choice([x.name for x in sorted(directory.glob("*.json"))])
    before = json.loads(path.read_text())
    damage_document(path, draw)
    try:
        refuses(call, files)
    except pytest.fail.Exception:
        after = json.loads(path.read_text())
        # No number that is served depends on these fields.
        differs = {k for k in before if before[k] != after[k]}
        assert differs <= {"versions", "written", "signature"}


def test_the_originals_are_taken_and_nothing_is_written_elsewhere(files):
    """A file elsewhere is a hard link to one that the delta changes."""
    (files / "linked").hardlink_to(files / "program" / MOVIE)
    before = (files / "linked").read_bytes()
    load(files)
    apply(files)
    te.export.load(files / "made")
    assert (files / "linked").read_bytes() == before
    assert (files / "made" / MOVIE).read_bytes() != before


ROWS = {
    "negative": {"movie:rows": np.array([-1, 4, 8])},
    "beyond": {"movie:rows": np.array([1, 4, 9])},
    "other rows": {"movie:rows": np.array([1, 4, 7])},
    "other values": {"movie": np.full((3, 2), np.nan, np.float32)},
    "too wide": {"movie": np.zeros((3, 3), np.float32)},
    "too many": {"movie": np.zeros((4, 2), np.float32)},
    "another type": {"movie": np.zeros((3, 2), np.int32)},
    "numbers of another type": {"movie:rows": np.array([1, 4, 8], np.float32)},
}


@pytest.mark.parametrize("tensors", ROWS.values(), ids=ROWS)
def test_wrong_rows_are_refused(files, tensors):
    right = {"movie:rows": np.array([1, 4, 8]), "movie": np.full((3, 2), 2, np.float32)}
    safetensors.numpy.save_file(right | tensors, files / "delta" / MOVIE)
    refuses(apply, files, "must hold rows of 'movie'|must have the SHA-256")
