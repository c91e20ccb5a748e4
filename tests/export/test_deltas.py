"""A delta, applied to the older export, gives the newer one."""

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.dynamic_models import DynamicTrainer, dynamic_batch
from tpu_embedding.export import deltas

ExportError = te.export.ExportError
SIZES = {"a/é": 37, "b": 5, "c": 64}


def layer_of(num_devices=1, seed=0):
    tables = [
        te.TableConfig(vocabulary_size=size, dim=4, name=name)
        for name, size in SIZES.items()
    ]
    features = {t.name: te.FeatureConfig(table=t) for t in tables}
    return te.TPUEmbedding(features, mesh=mesh_of(num_devices), rngs=nnx.Rngs(seed))


def change(layer, rows):
    """Changes some rows of table "c" of a layer."""
    values = layer.embedding_tables()["c"].copy()
    values[rows] += 1
    layer.set_embedding_tables({"c": values})


def content_of(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(x.relative_to(directory)): x.read_bytes() for x in paths}


@pytest.fixture
def exports(tmp_path):
    """Three exports, and the two deltas between them."""
    layer = layer_of()
    for i in range(3):
        te.export.save_tables(layer, tmp_path / f"export{i}")
        change(layer, [i, 63])
    for i in range(2):
        new, old = tmp_path / f"export{i + 1}", tmp_path / f"export{i}"
        te.export.save_delta(new, old, tmp_path / f"delta{i}")
    return tmp_path


def test_a_delta_holds_the_rows_that_differ(exports):
    stored = safetensors.numpy.load_file(exports / "delta0/tables/c.safetensors")
    assert stored["c:rows"].tolist() == [0, 63]
    assert not (exports / "delta0/tables/b.safetensors").exists()


def test_a_chain_gives_the_later_export(exports):
    for i in range(2):
        older = exports / ("made1" if i else "export0")
        te.export.apply_delta(older, exports / f"delta{i}", exports / f"made{i + 1}")
        made = content_of(exports / f"made{i + 1}")
        assert made == content_of(exports / f"export{i + 1}")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_devices", "dtype"),
    [
        (1, "int8"),
        pytest.param(2, "bfloat16", marks=pytest.mark.full),
    ],
)
def test_programs_of_every_type(tmp_path, num_devices, dtype, monkeypatch):
    monkeypatch.setattr(deltas, "_BLOCK_BYTES", 100)
    trainer = DynamicTrainer(num_devices=num_devices, default_row="learned")
    model = trainer.train(2).model
    for name in ("old", "new"):
        te.export.save(model, tmp_path / name, dynamic_batch(8), dtype=dtype)
        trainer.train(2)  # Users come, and others are evicted.
    te.export.save_delta(tmp_path / "new", tmp_path / "old", tmp_path / "delta")
    before = te.export.load(tmp_path / "old").tables["user:ids"]
    te.export.apply_delta(tmp_path / "old", tmp_path / "delta", tmp_path / "made")
    assert content_of(tmp_path / "made") == content_of(tmp_path / "new")
    after = te.export.load(tmp_path / "made").tables["user:ids"]
    assert set(np.ravel(before)) - set(np.ravel(after)), "ids were evicted"


def test_deltas_of_other_exports_are_refused(exports):
    with pytest.raises(ExportError, match="does not follow the export"):
        te.export.apply_delta(exports / "export0", exports / "delta1", exports / "made")
    with pytest.raises(ExportError, match="must be a new directory"):
        te.export.apply_delta(
            exports / "export0", exports / "delta0", exports / "export0"
        )
    assert not (exports / "made").exists()


def test_exports_that_have_no_delta(exports):
    layer = te.TPUEmbedding(
        te.FeatureConfig(table=te.TableConfig(vocabulary_size=5, dim=8, name="b")),
        rngs=nnx.Rngs(0),
    )
    te.export.save_tables(layer, exports / "other")
    with pytest.raises(ExportError, match="exports with the same files"):
        te.export.save_delta(exports / "other", exports / "export0", exports / "delta")
    wider = {
        name: te.TableConfig(vocabulary_size=9, dim=4, name=name) for name in SIZES
    }
    features = {name: te.FeatureConfig(table=table) for name, table in wider.items()}
    layer = te.TPUEmbedding(features, rngs=nnx.Rngs(0))
    te.export.save_tables(layer, exports / "wider")
    with pytest.raises(ExportError, match=r"one shape and dtype, got float32\[9, 4\]"):
        te.export.save_delta(exports / "wider", exports / "export0", exports / "delta")
    assert not (exports / "delta").exists()
