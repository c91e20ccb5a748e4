"""Malformed exports and deltas, which come from elsewhere, are refused whole."""

import hashlib
import json
import random
import shutil

import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.export.documents import digests_of_files, file_digest
from tpu_embedding.export.tensor_files import writable_tensor, write_tensors

ExportError = te.export.ExportError
TABLE = te.TableConfig(vocabulary_size=9, dim=2, name="movie")
MOVIE = "tables/movie.safetensors"
OUTSIDE = ("../victim", "/victim", "a/../../victim", "", ".", "a\\b", "a\0", "a//b")
KINDS = (None, True, 1.5, "x", [], {}, [[]], 10**400, -1)
TEXTS = ("", "{", "[]", "7", "null", "[" * 100_000, "\ufeff{}", '{"a": 1, "a": 1}')
HEADERS = {
    "dtype": (None, 5, "F63", ["F32"]),
    "shape": (None, "3", [-1], ["3"], [2.0], [2**70], [1] * 40, [True], {"0": 3}),
    "data_offsets": (None, [0], [0, 1.5], ["0", "4"], [-4, 0], [4, 2**70], [1, 2]),
}


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
    te.export.apply_delta(files / "program", files / "delta")


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
    """Makes the digests of an export or delta anew, as one does who means harm."""
    is_delta = (directory / "delta.json").exists()
    path = directory / ("delta.json" if is_delta else "export.json")
    document, found = json.loads(path.read_text()), digests_of_files(directory)
    found.pop(path.name)
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


def damage_header(path, draw):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, rows = json.loads(content[8 : 8 + length]), content[8 + length :]
    name, field = draw.choice(list(header)), draw.choice(list(HEADERS))
    match draw.choice(["field", "remove", "name", "text", "length", "cut"]):
        case "field":
            header[name][field] = draw.choice(HEADERS[field])
        case "remove":
            del header[name][field]
        case "name":
            header["other"] = header.pop(name)
        case "text":
            header = draw.choice([[], 7, None, {"a": 1}])
        case "length":
            rows += b"0"
        case "cut":
            rows = rows[:-1]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + rows)


@pytest.mark.parametrize("seed", range(60))
def test_malformed_files_are_refused_whole(files, seed):
    draw = random.Random(seed)
    name, document = draw.choice([("program", "export"), ("delta", "delta")])
    directory, call = files / name, load if name == "program" else apply
    if draw.random() < 0.5:
        damage_header(directory / MOVIE, draw)
        seal(directory)
        refuses(call, files)
        return
    path = directory / f"{document}.json"
    before = json.loads(path.read_text())
    damage_document(path, draw)
    try:
        refuses(call, files)
    except pytest.fail.Exception:
        after = json.loads(path.read_text())
        # Another text, null for a part that may miss: what is served is the same.
        assert set(after) == set(before)
        differs = {k for k in before if before[k] != after[k]}
        assert differs <= {"versions", "written", "platforms", "tables", "signature"}


def test_the_originals_are_taken(files):
    load(files)
    apply(files)
    load(files)


@pytest.mark.parametrize("file", [MOVIE, "export.json", "tables", "dense.safetensors"])
def test_links_out_of_the_directory_are_not_read(files, file):
    path = files / "program" / file
    path.rename(files / "elsewhere")
    path.symlink_to(files / "elsewhere")
    for call in (load, apply):
        refuses(call, files, "must name files inside of it only")


def test_linked_files_are_not_written(files):
    """A file elsewhere is a hard link to one that the delta changes."""
    (files / "linked").hardlink_to(files / "program" / MOVIE)
    before = (files / "linked").read_bytes()
    apply(files)
    assert (files / "linked").read_bytes() == before
    assert (files / "program" / MOVIE).read_bytes() != before


@pytest.mark.parametrize("name", ["program", "delta"])
def test_files_without_digests_are_refused(files, name):
    path = files / name / ("delta.json" if name == "delta" else "export.json")
    document = json.loads(path.read_text())
    del document["files"][MOVIE]
    path.write_text(json.dumps(document))
    refuses(apply, files, "digest|does not follow")


ROWS = {
    "negative": {"movie:rows": np.array([-1, 4, 8])},
    "beyond": {"movie:rows": np.array([1, 4, 9])},
    "other rows": {"movie:rows": np.array([1, 4, 7])},
    "other values": {"movie": np.full((3, 2), np.nan, np.float32)},
    "too wide": {"movie": np.zeros((3, 3), np.float32)},
    "too many": {"movie": np.zeros((4, 2), np.float32)},
    "another type": {"movie": np.zeros((3, 2), np.int32)},
    "numbers of another type": {"movie:rows": np.array([1, 4, 8], np.int32)},
    "numbers of two axes": {"movie:rows": np.array([[1], [4], [8]])},
}


@pytest.mark.parametrize("tensors", ROWS.values(), ids=ROWS)
def test_wrong_rows_are_refused(files, tensors):
    right = {"movie:rows": np.array([1, 4, 8]), "movie": np.full((3, 2), 2, np.float32)}
    (files / "delta" / MOVIE).unlink()
    write_tensors(files / "delta" / MOVIE, right | tensors)
    seal(files / "delta")
    refuses(apply, files, "must hold rows of float32|its SHA-256 must be")


def test_damage_since_the_export_is_found(files):
    tensor = writable_tensor(files / "program" / MOVIE, "movie")
    tensor[0] += 1
    assert file_digest(files / "program" / MOVIE)
    refuses(apply, files, "SHA-256")
