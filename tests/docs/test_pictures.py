"""The pictures in docs/ are what their script draws, and show what the code does."""

import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import tpu_embedding as te

PICTURES = pathlib.Path(__file__).parents[2] / "docs" / "pictures"


def load_script(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent))  # as for `python docs/pictures/draw.py`
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


DRAWINGS = load_script(PICTURES / "draw.py").PICTURES
MESH = load_script(PICTURES / "mesh_pictures.py")


@pytest.mark.parametrize("name", DRAWINGS)
def test_picture_is_as_drawn(name):
    assert (PICTURES / name).read_text() == DRAWINGS[name]()


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_page_shows_the_picture(name):
    pages = PICTURES.parent.rglob("*.md")
    assert any(f"pictures/{name}\n" in page.read_text() for page in pages)


@pytest.fixture
def mesh_of_the_guide():
    return Mesh(
        np.array(jax.devices()).reshape(MESH.DATA, MESH.MODEL), ("data", "model")
    )


@pytest.mark.parametrize("placement", MESH.PLACEMENTS)
def test_devices_hold_the_rows_that_the_picture_shows(placement, mesh_of_the_guide):
    table = te.TableConfig(vocabulary_size=MESH.NUM_ROWS, dim=4, name="movie")
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of_the_guide,
        placement=eval(placement, {"te": te}),
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    rows = te.functional.unstack_tables(tables, plan)["movie"]
    (stack,) = plan.stacks
    num_shards = MESH.PLACEMENTS[placement]
    assert stack.num_shards == num_shards
    (lines,) = jax.tree.leaves(tables)
    for device, shard in enumerate(by_device(lines)):
        first = MESH.first_row(device, num_shards)
        expected = rows[first::num_shards]
        np.testing.assert_array_equal(shard[: len(expected)], expected)


def test_devices_get_the_samples_that_the_picture_shows(mesh_of_the_guide):
    table = te.TableConfig(vocabulary_size=MESH.NUM_ROWS, dim=4, name="movie")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of_the_guide)
    batch = te.inputs.shard_batch(np.arange(MESH.BATCH, dtype=np.int32), plan)
    for device, shard in enumerate(by_device(batch)):
        assert shard.tolist() == list(MESH.samples_of(device))


def by_device(array):
    """Returns the part of an array on each device, in the order of the devices."""
    shards = {
        shard.device: np.asarray(shard.data) for shard in array.addressable_shards
    }
    return [shards[device] for device in jax.devices()]
