"""The core does not know its verticals: it calls seams that others can implement."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding import functional
from tpu_embedding.vocabularies import Vocabulary, VocabularyInputs

PACKAGE = pathlib.Path(te.__file__).parent

# What names a vertical, who may import it, and files that offer its public names.
VERTICALS = {
    "dynamic": (
        r"\b(?i:dynamic(?!_slice|_update|_index)|Ids64|insert_ids|directory_name)",
        ("dynamic/", "checkpoint/", "export/", "tools/"),
        {
            "__init__.py",
            "config.py",
            "functional/__init__.py",
            "nn/embedding.py",
            "nn/linen/training.py",
            "nn/optimizer.py",
        },
    ),
    "host_rows": (
        r"host_rows|HostRows|HostStack|HostStorage|CachedRows|MappedRows",
        ("host_rows/", "tools/"),
        {"__init__.py", "functional/__init__.py", "nn/linen/__init__.py"},
    ),
}


@pytest.mark.parametrize("name", VERTICALS)
def test_the_core_does_not_name_a_vertical(name):
    names, may_know, offer = VERTICALS[name]
    paths = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(names, path.read_text())
    }
    assert {path for path in paths if not path.startswith(may_know)} == offer


PROGRAM = """
import sys
sys.modules["tpu_embedding." + sys.argv[1]] = None  # An import of it raises.
import jax
import tpu_embedding as te
table = te.TableConfig(vocabulary_size=10, dim=4)
layer_plan = te.make_plan({"a": te.FeatureConfig(table=table)}, optimizer="adagrad")
tables = te.functional.init_tables(layer_plan, jax.random.key(0))
slots = te.functional.init_slots(tables, layer_plan)
ids = te.inputs.prepare_features({"a": [3, 4]}, layer_plan)
found = te.functional.lookup(tables, ids, layer_plan)
gradients = te.functional.compute_gradients(
    found.routing, found.activations, layer_plan
)
te.functional.apply_gradients(tables, slots, gradients, layer_plan)
te.TPUEmbedding, te.Optimizer, te.linen, te.PipelinedTrainStep
if sys.argv[1] == "host_rows":
    te.save, te.restore
"""


@pytest.mark.full
@pytest.mark.parametrize("name", VERTICALS)
def test_the_core_works_without_the_folder(name):
    subprocess.run([sys.executable, "-c", PROGRAM, name], check=True)


class YearInputs(VocabularyInputs):
    """Ids are years from 1900 on."""

    def check(self, ids, holds_padding, feature, where):
        return super().check(ids - 1900, holds_padding, feature, where)

    def find_rows(self, tables, features, plan):
        return jax.tree.map(lambda ids: functional.RowIds(jnp.asarray(ids)), features)


@dataclasses.dataclass(frozen=True)
class Years(Vocabulary):
    """A vocabulary of years."""

    number: int
    ids_are_rows = False
    inputs = YearInputs()

    @property
    def max_rows(self):
        return self.number


@pytest.mark.parametrize("num_devices", [1, 2])
def test_another_vocabulary_implements_the_seam(num_devices):
    table = te.TableConfig(vocabulary_size=Years(120), dim=4, name="t")
    plan = te.make_plan({"year": te.FeatureConfig(table=table)}, mesh_of(num_devices))
    tables = functional.init_tables(plan, jax.random.key(0))
    assert [*tables] == ["stack_0"]
    rows = np.arange(120 * 4, dtype=np.float32).reshape(120, 4)
    tables = functional.with_table_values(tables, {"t": rows}, plan)
    batch = te.inputs.prepare_features({"year": np.array([1900, 2019])}, plan)
    found = functional.lookup(tables, batch, plan)
    np.testing.assert_array_equal(found.activations["year"], rows[[0, 119]])
    with rejects(TypeError):
        functional.compute_gradients(found.routing, found.activations, plan)
    with rejects(ValueError):
        te.inputs.prepare_features({"year": np.array([2020])}, plan)
