"""Origins: what a run keeps of its config, and the config for a CSV file."""

import gzip

import pytest

from tpu_embedding.tools.train import ConfigError, DataError
from tpu_embedding.tools.train.origin import CODE_FILE, RunOrigin, csv_run

CONFIG = """
import dataclasses, pathlib
from helper import STEPS
from tpu_embedding.tools.train import load_config
config = dataclasses.replace(
    load_config("synthetic"), name=pathlib.Path(__file__).stem, num_steps=STEPS)
"""


def test_a_run_keeps_the_code_of_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("STEPS = 7")
    (tmp_path / "mine.py").write_text(CONFIG)
    (tmp_path / "run").mkdir()
    origin = RunOrigin(config="mine.py", settings=("model.dim=3",), data_dir="data")
    origin.save(tmp_path / "run")
    monkeypatch.chdir("/")
    for text in ("config = 3", None):  # The file is changed, and then gone.
        if text is None:
            (tmp_path / "mine.py").unlink()
        else:
            (tmp_path / "mine.py").write_text(text)
        kept = RunOrigin.of_run(tmp_path / "run")
        assert kept.data_dir == str(tmp_path / "data")
        config = kept.load()
        assert (config.name, config.num_steps, config.model.dim) == ("mine", 7, 3)


def test_a_config_of_the_package(tmp_path):
    RunOrigin(config="dlrm").save(tmp_path)
    assert RunOrigin.of_run(tmp_path) == RunOrigin(config="dlrm")
    assert not (tmp_path / CODE_FILE).exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]"])
def test_damaged_records(tmp_path, text):
    (tmp_path / "origin.json").write_text(text)
    with pytest.raises(ConfigError, match="origin.json cannot be read"):
        RunOrigin.of_run(tmp_path)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_steps"),
    [(10, 32, 20), (20_000, 64, 937), (10_000_000, 4096, 7324)],
)
def test_the_config_of_a_csv_file_follows_its_rows(
    tmp_path, num_rows, batch_size, num_steps
):
    path = tmp_path / "my.clicks.csv.gz"
    path.write_bytes(gzip.compress(b"\n" * num_rows, 1))
    config = csv_run(path)
    assert (config.batch_size, config.num_steps) == (batch_size, num_steps)
    assert config.name == "my"


def test_settings_of_a_csv_file(tmp_path):
    path = tmp_path / "clicks.csv"
    path.write_text("a,b\n")
    settings = ("data.label='is click'", "data.separator=' '", "data.lists=x 'y z'")
    data = RunOrigin(config=str(path), settings=settings).load().data
    assert (data.label, data.separator, data.lists) == ("is click", " ", ("x", "y z"))
    with pytest.raises(DataError, match="is missing on this machine"):
        RunOrigin(config=str(tmp_path / "other.csv")).load()
