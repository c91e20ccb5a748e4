"""Exports and deltas that others wrote: read as they are meant, or refused whole."""

import hashlib
import json
import random
import shutil

import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.dynamic_models import DynamicTrainer
from tests.export.malformed_files import (
    OUTSIDE,
    mutate_document,
    mutate_header,
    mutate_rows,
    seal_delta,
    seal_export,
    write_delta,
)
from tpu_embedding.export.tensor_files import (
    TensorFile,
    TensorSpec,
    read_tensors,
    writable_tensor,
    write_tensors,
)

ExportError = te.export.ExportError
RULE = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))
TABLE = te.TableConfig(vocabulary_size=9, dim=2, name="movie")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A program's export, an export of tables, and a delta behind it."""
    path = tmp_path_factory.mktemp("originals")
    features = {"movie": te.FeatureConfig(table=TABLE)}
    layer = te.TPUEmbedding(features, RULE, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    te.export.save(layer, path / "program", {"movie": np.zeros((2, 3), np.int32)})
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    te.export.save_tables(layer, path / "bfloat16", dtype="bfloat16")
    te.export.save_tables(layer, path / "tables", optimizer=optimizer)
    # An export of the same chain in another type.
    record = json.loads((path / "tables/export.json").read_text())["deltas"]
    other = json.loads((path / "bfloat16/export.json").read_text())
    text = json.dumps(other | {"deltas": record})
    (path / "bfloat16/export.json").write_text(text)

    def loss_fn(layer):
        return sum(x.sum() for x in layer({"movie": np.array([[1, 4, 8]])}).values())

    _, gradients = te.value_and_grad(loss_fn)(layer)
    optimizer.update(layer, gradients)
    te.export.save_delta(layer, optimizer, path / "delta")
    return path


@pytest.fixture
def files(originals, tmp_path):
    """Copies of the originals, beside a file that nobody may touch."""
    for name in ("program", "tables", "delta"):
        shutil.copytree(originals / name, tmp_path / name)
    shutil.copy(tmp_path / "tables/tables/movie.safetensors", tmp_path / "victim")
    return tmp_path


def content_of(directory):
    """Returns the digest of each file below a directory."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


def refuses(call, directory, match=None):
    """Checks that a call raises an error of ours, and writes nothing."""
    before = content_of(directory)
    with pytest.raises(ExportError, match=match):
        call()
    assert content_of(directory) == before


def apply(files):
    te.export.apply_delta(files / "tables", files / "delta")


def load(files):
    te.export.load(files / "program")


def damage(files, draw):
    """Damages one file of one of the originals; returns the call that reads it."""
    match draw.choice(["program", "export", "delta", "header", "header", "rows"]):
        case "program":
            path, call = files / "program" / "export.json", load
            path.write_text(mutate_document(json.loads(path.read_text()), draw))
        case "export":
            path, call = files / "tables" / "export.json", apply
            path.write_text(mutate_document(json.loads(path.read_text()), draw))
        case "delta":
            path, call = files / "delta" / "delta.json", apply
            write_delta(path, mutate_document(json.loads(path.read_text()), draw))
        case "header":
            name = draw.choice(["program", "tables", "delta"])
            mutate_header(files / name / "tables" / "movie.safetensors", draw)
            (seal_delta if name == "delta" else seal_export)(files / name)
            call = load if name == "program" else apply
        case "rows":
            path, call = files / "delta" / "tables" / "movie.safetensors", apply
            mutate_rows(path, draw.choice(["row_ids", "values"]), draw)
            seal_delta(files / "delta")
    return call


@pytest.mark.parametrize("part", range(10))
def test_malformed_files_are_refused_whole(originals, tmp_path, part):
    for seed in range(30 * part, 30 * part + 30):
        files = tmp_path / str(seed)
        shutil.copytree(originals, files)
        (files / "victim").write_bytes(b"untouched")
        call = damage(files, random.Random(seed))
        try:
            refuses(lambda call=call, files=files: call(files), files)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_originals_are_taken(files):
    load(files)
    apply(files)


@pytest.mark.parametrize("file", OUTSIDE)
@pytest.mark.parametrize("verify", [True, False])
def test_files_outside_are_not_read(files, file, verify):
    path = files / "program" / "export.json"
    document = json.loads(path.read_text())
    digest = hashlib.sha256((files / "victim").read_bytes()).hexdigest()
    document["tables"]["movie"]["file"] = file
    document["files"][file] = digest
    path.write_text(json.dumps(document))
    refuses(
        lambda: te.export.load(files / "program", verify=verify),
        files,
        "must name the file 'tables/movie.safetensors' for 'movie'",
    )


@pytest.mark.parametrize(
    "link", ["tables/movie.safetensors", "export.json", "tables", "dense.safetensors"]
)
def test_links_out_of_the_directory_are_not_read(files, link):
    path = files / "program" / link
    path.rename(files / "elsewhere")
    path.symlink_to(files / "elsewhere")
    refuses(lambda: load(files), files, "must name files inside of it only")


def test_links_out_of_the_directory_are_not_written(files):
    path = files / "tables" / "tables" / "movie.safetensors"
    path.unlink()
    path.symlink_to(files / "victim")
    refuses(lambda: apply(files), files, "must name files inside of it only")


def test_hard_links_are_not_written(files):
    path = files / "tables" / "tables" / "movie.safetensors"
    path.unlink()
    path.hardlink_to(files / "victim")
    refuses(lambda: apply(files), files, "must be a copy, without hard links, got 2")


def test_rows_that_a_type_cannot_hold_are_refused(originals, files):
    shutil.rmtree(files / "tables")
    shutil.copytree(originals / "bfloat16", files / "tables")
    path = files / "delta/tables/movie.safetensors"
    stored = writable_tensor(path, "values")
    stored[:] = np.finfo(np.float32).max
    stored.flush()
    seal_delta(files / "delta")
    refuses(lambda: apply(files), files, "values of table 'movie' must be finite")


def test_a_planted_link_is_replaced(files):
    """A name that writing uses on its way leads to another file."""
    (files / "tables" / ".export.json.partial").symlink_to(files / "victim")
    before = (files / "victim").read_bytes()
    apply(files)
    assert (files / "victim").read_bytes() == before


@pytest.mark.parametrize("call", [load, apply])
def test_files_without_digests_are_refused(files, call):
    directory = files / ("program" if call is load else "tables")
    path = directory / "export.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"files": {}}))
    flipped = bytearray((directory / "tables/movie.safetensors").read_bytes())
    flipped[-1] ^= 1
    (directory / "tables/movie.safetensors").write_bytes(flipped)
    message = "a digest of each file that is read, but has none of 'tables/movie"
    refuses(lambda: call(files), files, message)


ROWS = {
    "last row by -1": ("row_ids", lambda x: np.r_[-1, x[1:]], "must be 0 or more"),
    "repeated": ("row_ids", lambda x: np.r_[x[:1], x[:-1]], "rising, each id once"),
    "falling": ("row_ids", lambda x: x[::-1].copy(), "rising, each id once"),
    "beyond": ("row_ids", lambda x: np.r_[x[:-1], 9], "must be below 9"),
    "NaN": ("values", lambda x: np.full_like(x, np.nan), "must be finite"),
    "inf": ("values", lambda x: np.full_like(x, np.inf), "must be finite"),
}


@pytest.mark.parametrize(("tensor", "change", "message"), ROWS.values(), ids=ROWS)
def test_wrong_rows_are_refused(files, tensor, change, message):
    stored = writable_tensor(files / "delta/tables/movie.safetensors", tensor)
    stored[:] = change(stored)
    stored.flush()
    seal_delta(files / "delta")
    refuses(lambda: apply(files), files, message)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("values", (3, 3), np.float32),
        ("values", (4, 2), np.float32),
        ("values", (6,), np.float32),
        ("values", (3, 2), np.int32),
        ("row_ids", (3,), np.int64),
        ("row_ids", (2,), np.int32),
        ("row_ids", (3, 1), np.int32),
    ],
)
def test_wrong_shapes_are_refused(files, name, shape, dtype):
    specs = {"row_ids": ((3,), np.int32), "values": ((3, 2), np.float32)}
    specs[name] = shape, dtype
    path = files / "delta/tables/movie.safetensors"
    path.unlink()
    TensorFile(path, {k: TensorSpec(x, np.dtype(t)) for k, (x, t) in specs.items()})
    seal_delta(files / "delta")
    refuses(lambda: apply(files), files, f"must hold .* as tensor {name!r}, got")


@pytest.fixture(scope="module")
def dynamic_originals(tmp_path_factory):
    """An export of a dynamic table of 128 places, and a delta behind it."""
    path = tmp_path_factory.mktemp("dynamic")
    trainer = DynamicTrainer(rule=RULE, num_devices=1, default_row="none").train(2)
    te.export.save_tables(trainer.model, path / "tables", optimizer=trainer.optimizer)
    trainer.train()
    te.export.save_delta(trainer.model, trainer.optimizer, path / "delta")
    return path


DYNAMIC_ROWS = {
    "repeated": ("ids", lambda ids: {"ids": np.r_[ids[:1], ids[:-1]]}, "rising"),
    "evicted, too": ("evicted", lambda ids: {"evicted": ids[:1]}, "none of the ids"),
    "more than places": ("number of ids", lambda ids: {"ids": BEYOND}, "at most"),
    "falling": ("ids", lambda ids: {"ids": ids[::-1].copy()}, "rising"),
}
BEYOND = np.arange(10_000, dtype=np.uint64)


@pytest.mark.parametrize(
    ("field", "change", "message"), DYNAMIC_ROWS.values(), ids=DYNAMIC_ROWS
)
def test_wrong_ids_are_refused(dynamic_originals, tmp_path, field, change, message):
    for name in ("tables", "delta"):
        shutil.copytree(dynamic_originals / name, tmp_path / name)
    path = tmp_path / "delta/tables/user.safetensors"
    tensors = {k: x.copy() for k, x in read_tensors(path).items()}
    tensors |= change(tensors["ids"])
    tensors["values"] = np.zeros((len(tensors["ids"]), 8), np.float32)
    path.unlink()
    write_tensors(path, tensors)
    document = json.loads((tmp_path / "delta/delta.json").read_text())
    entry = document["tables"]["user"]
    entry["num_rows"] = len(tensors["ids"])
    entry["dynamic"]["num_evicted"] = len(tensors["evicted"])
    (tmp_path / "delta/delta.json").write_text(json.dumps(document))
    seal_delta(tmp_path / "delta")
    refuses(lambda: apply(tmp_path), tmp_path, f"{field} of table 'user' .*{message}")
