"""A checkpoint that commit 82cbd73 wrote still restores.

It has three tables, of adam with a schedule and of adagrad, one of them bfloat16, in
chunks of 8 rows, and a dense leaf, a number and a random key.
"""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.checkpoint import describe, read_table

ARCHIVE = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_format_1.zip"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of the checkpoint, and its numbers by table and slot."""
    directory = tmp_path_factory.mktemp("recorded")
    shutil.unpack_archive(ARCHIVE, directory)
    with np.load(directory / "expected.npz") as arrays:
        return directory / "checkpoint", dict(arrays)


def plan_of(devices):
    adagrad = te.optimizers.adagrad(0.1)
    adam = te.optimizers.adam(optax.linear_schedule(0.1, 0.0, 100))
    tables = [
        te.TableConfig(vocabulary_size=43, dim=4, name="movie", optimizer=adam),
        te.TableConfig(
            vocabulary_size=7, dim=4, name="user", optimizer=adagrad, dtype="bfloat16"
        ),
        te.TableConfig(vocabulary_size=9, dim=4, name="genre", optimizer=adagrad),
    ]
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(features, mesh_of(devices))


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 3])
def test_it_restores(recorded, devices):
    directory, expected = recorded
    plan = plan_of(devices)
    tables = te.functional.init_tables(plan, jax.random.key(1))
    state = {
        "tables": tables,
        "slots": te.functional.init_slots(tables, plan),
        "step": 0,
        "rate": jnp.zeros(3),
        "key": jax.random.key(0),
    }
    state = te.restore(directory, state, plan=plan)
    assert (state["step"], state["key"]) == (5, jax.random.key(3))
    np.testing.assert_array_equal(state["rate"], np.arange(3))
    found = {
        f"{name}.values": np.asarray(values, np.float32)
        for name, values in te.functional.unstack_tables(state["tables"], plan).items()
    }
    for name, slots in te.functional.slot_values(state["slots"], plan, "all").items():
        found |= {f"{name}.{slot}": values for slot, values in slots.items()}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)


def test_it_is_read_without_its_plan(recorded):
    directory, expected = recorded
    assert describe(directory).description == {"run": "recorded"}
    assert describe(directory).tables["movie"].values.chunk_rows == 8
    rows = read_table(directory, "movie", [42, 3])
    np.testing.assert_array_equal(rows, expected["movie.values"][[42, 3]])
