"""A delta, applied to the older export, gives the newer one."""

import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.checkpoint.states import make_layer
from tests.rejections import rejects
from tpu_embedding.export import deltas

ExportError = te.export.ExportError
SHAPES = {"a/é": (37, 4), "b": (5, 4), "c": (64, 4)}


def content_of(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(x.relative_to(directory)): x.read_bytes() for x in paths}


@pytest.fixture
def exports(tmp_path, monkeypatch):
    """Three exports, and the two deltas between them."""
    monkeypatch.setattr(deltas, "_BLOCK_BYTES", 100)  # Six rows of a table at a time.
    layer = make_layer(SHAPES)
    for i in range(3):
        te.export.save_tables(layer, tmp_path / f"export{i}")
        values = layer.embedding_tables()["c"].copy()
        values[[i, 63]] += 1
        layer.set_embedding_tables({"c": values})
    for i in range(2):
        new, old = tmp_path / f"export{i + 1}", tmp_path / f"export{i}"
        te.export.save_delta(new, old, tmp_path / f"delta{i}")
    return tmp_path


def test_a_chain_of_changed_rows_gives_the_later_export(exports):
    stored = safetensors.numpy.load_file(exports / "delta0/tables/c.safetensors")
    assert stored["c:rows"].tolist() == [0, 63]
    assert not (exports / "delta0/tables/b.safetensors").exists()
    for i in range(2):
        older = exports / ("made1" if i else "export0")
        te.export.apply_delta(older, exports / f"delta{i}", exports / f"made{i + 1}")
        made = content_of(exports / f"made{i + 1}")
        assert made == content_of(exports / f"export{i + 1}")


def test_exports_without_a_delta(exports):
    for name, delta in (("made", "delta1"), ("export0", "delta0")):
        with rejects(ExportError):
            te.export.apply_delta(exports / "export0", exports / delta, exports / name)
    for name, shapes in (("other", ["b"]), ("smaller", SHAPES)):
        layer = make_layer(dict.fromkeys(shapes, (5, 4)))
        te.export.save_tables(layer, exports / name)
        with rejects(ExportError, fix=name):
            te.export.save_delta(exports / name, exports / "export0", exports / "delta")
    assert not (exports / "made").exists() and not (exports / "delta").exists()
