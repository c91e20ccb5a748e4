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
from tests.rejections import rejects
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
each_path = pytest.mark.parametrize("path", with_ids(PATHS))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the home directory is in it."""
    for folder in ("home", "sub", "elsewhere/deep", "with space", "a%20b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def state(seed=0):
    return {
        "tables": te.functional.init_tables(PLAN, jax.random.key(seed)),
        "step": seed,
    }


@each_path
def test_checkpoints(here, path):
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
    target = pathlib.Path(os.path.realpath(os.path.expanduser(path)))
    values = {"movie": np.arange(40, dtype=np.float32).reshape(10, 4)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target / "orbax", values)
    safetensors.numpy.save_file(values, target / "some.safetensors")
    for name in ("orbax", "some.safetensors"):
        source = open_tables(os.path.join(path, name))
        np.testing.assert_array_equal(
            source.tables["movie"].values.read(0, 10), values["movie"]
        )
    layer = te.TPUEmbedding(None, plan=PLAN, rngs=nnx.Rngs(0))
    te.export.save_tables(layer, os.path.join(path, "served"))
    assert (target / "served" / "export.json").is_file()


@pytest.mark.parametrize("missing", ["", "tables.movie.values/zarr.json"])
def test_what_is_missing_is_named(here, missing):
    te.save("ck", state(), plan=PLAN)
    if missing:
        (here / "ck" / missing).unlink()
    else:
        shutil.rmtree(here / "ck")
    with rejects(CheckpointError, fix="movie" if missing else "ck"):
        te.restore("ck", state(), plan=PLAN)


def test_other_stores_are_rejected(here):
    with rejects(CheckpointError, fix="gs://"):
        te.save("file:///tmp/ck", state(), plan=PLAN)
