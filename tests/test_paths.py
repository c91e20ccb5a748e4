"""Paths as users write them: every function and every command takes them all."""

import os
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import with_ids
from tpu_embedding.checkpoint import CheckpointError, open_tables

PLAN = te.make_plan(
    te.FeatureConfig(table=te.TableConfig(vocabulary_size=10, dim=4, name="movie")),
    mesh_of(1),
)
PATHS = {
    "relative": "ck",
    "percent": "a%20b/ck",
    "home as pathlib": pathlib.Path("~/ck"),
    "parent of a link": "link/../ck",
}
"""How a directory may be written. Folder `link` points to `elsewhere/deep`."""
each_path = pytest.mark.parametrize(
    "path",
    with_ids(PATHS),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the home directory is in it."""
    for folder in ("home", "sub", "elsewhere/deep", "with space", "a%20b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def written(path, here):
    return path.format(here=here) if isinstance(path, str) else path


def state(seed=0):
    return {
        "tables": te.functional.init_tables(PLAN, jax.random.key(seed)),
        "step": seed,
    }


@each_path
def test_checkpoints(here, path):
    path = written(path, here)
    te.save(path, state(4), plan=PLAN)
    assert te.restore(path, state(), plan=PLAN)["step"] == 4
    rows = te.checkpoint.read_table(path, "movie")
    wanted = te.functional.unstack_tables(state(4)["tables"], PLAN)["movie"]
    np.testing.assert_array_equal(rows, wanted)
    assert te.checkpoint.describe(path).dense == {"step": "int"}
    assert not (here / "~").exists()


@each_path
def test_files_of_tables(here, path):
    """Imports from orbax and safetensors, and exports."""
    target = pathlib.Path(os.path.realpath(os.path.expanduser(written(path, here))))
    values = {"movie": np.arange(40, dtype=np.float32).reshape(10, 4)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target / "orbax", values)
    safetensors.numpy.save_file(values, target / "some.safetensors")
    for name in ("orbax", "some.safetensors"):
        source = open_tables(os.path.join(written(path, here), name))
        np.testing.assert_array_equal(
            source.tables["movie"].values.read(0, 10), values["movie"]
        )
    layer = te.TPUEmbedding(None, plan=PLAN, rngs=nnx.Rngs(0))
    te.export.save_tables(layer, os.path.join(written(path, here), "served"))
    assert (target / "served" / "export.json").is_file()


def not_there(path):
    shutil.rmtree(path)


def empty_directory(path):
    shutil.rmtree(path)
    path.mkdir()


def missing_file(path):
    (path / "tables.movie.values/zarr.json").unlink()


def missing_chunk(path):
    (path / "tables.movie.values/c/0/0").unlink()


MISSING = {
    function.__name__: (function, message)
    for function, message in (
        (not_there, "holds no checkpoint"),
        (empty_directory, "holds no checkpoint"),
        (missing_file, "movie.* is missing"),
        (missing_chunk, "movie.* is missing"),
    )
}


@pytest.mark.parametrize(("change", "message"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_named(here, change, message):
    te.save("ck", state(), plan=PLAN)
    change(here / "ck")
    with pytest.raises(CheckpointError, match=message):
        te.restore("ck", state(), plan=PLAN)


def test_other_stores_are_refused(here):
    with pytest.raises(CheckpointError, match="local or start with gs:// or s3://"):
        te.save("file:///tmp/ck", state(), plan=PLAN)
