"""Tests the converter of Criteo's text, and the source of what it writes."""

import gzip
import importlib.util
import math
import pathlib

import numpy as np
import pytest

from tests.rejections import rejects
from tests.tools.data.criteo_text import criteo_lines, write_criteo_text
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.synthetic_clicks import CATEGORY_NAMES, SyntheticCriteo
from tpu_embedding.tools.train import CriteoSource

pq = pytest.importorskip("pyarrow.parquet")

SCRIPT = pathlib.Path(__file__).parents[3] / "scripts" / "criteo_to_parquet.py"
_spec = importlib.util.spec_from_file_location("criteo_to_parquet", SCRIPT)
criteo_to_parquet = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(criteo_to_parquet)

SOURCE = CriteoSource(vocabulary_size=50, num_evaluation_samples=20)


def test_a_table_has_the_fields_of_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(criteo_to_parquet, "BLOCK_BYTES", 4000)  # several blocks
    text = tmp_path / "day_0.gz"
    text.write_bytes(gzip.compress("".join(criteo_lines(100)).encode()))
    parquet = tmp_path / "out.parquet"
    assert criteo_to_parquet.convert(text, parquet) == 100
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet"]
    rows = pq.read_table(parquet).to_pylist()
    for line, row in zip(criteo_lines(100), rows, strict=True):
        label, *fields = line.rstrip("\n").split("\t")
        dense = [math.log1p(max(int(x or 0), 0)) for x in fields[:13]]
        categories = [1 + int(x, 16) if x else 0 for x in fields[13:]]
        assert list(row.values())[0] == int(label)
        np.testing.assert_allclose(list(row.values())[1:14], dense, rtol=1e-6)
        assert list(row.values())[14:] == categories


def test_training_reads_the_table(tmp_path):
    text = write_criteo_text(tmp_path / "day_0")
    criteo_to_parquet.convert(text, tmp_path / "day_0.parquet")
    data = SOURCE.open(tmp_path, batch_size=10, seed=0)
    assert data.vocabulary_sizes == dict.fromkeys(CATEGORY_NAMES, 50)
    assert (data.num_train_samples, data.num_dense) == (80, 13)
    fields = criteo_lines(100)[80].rstrip("\n").split("\t")
    held_out = next(data.evaluation_batches())
    for name, field in zip(CATEGORY_NAMES, fields[14:], strict=True):
        expected = (1 + int(field, 16)) % 50 if field else 0
        assert held_out.features[name][0] == expected
    assert isinstance(SOURCE.open(None, batch_size=10, seed=0), SyntheticCriteo)


@pytest.mark.parametrize(
    ("field", "value", "named", "fix"),
    [
        (0, "2", "label", "day_0, lines 1 to 9"),
        (0, "", "label", ""),
        (3, "x", None, "column #3"),
        (20, "12g45678", "column 'cat_06'", "day_0, lines 1 to 9"),
        (20, "1234567", "column 'cat_06'", ""),
        (39, "12345678\t9", None, "day_0"),
    ],
)
def test_a_wrong_field_leaves_no_table(tmp_path, field, value, named, fix):
    text = write_criteo_text(tmp_path / "day_0", 9)
    lines = [line.rstrip("\n").split("\t") for line in text.read_text().splitlines()]
    lines[4][field] = value
    text.write_text("".join("\t".join(line) + "\n" for line in lines))
    with pytest.raises(DataError) as caught:
        criteo_to_parquet.convert(text, tmp_path / "out.parquet")
    assert (named or "") in str(caught.value) and fix in str(caught.value)
    assert not (tmp_path / "out.parquet").exists()


def test_text_is_to_be_converted_first(tmp_path):
    write_criteo_text(tmp_path / "train.txt")
    for path in (tmp_path, tmp_path / "train.txt"):
        with rejects(DataError, fix="criteo_to_parquet.py TEXT"):
            SOURCE.open(path, batch_size=10, seed=0)
    with pytest.raises(DataError):
        criteo_to_parquet.convert(tmp_path / "absent", tmp_path / "out.parquet")
