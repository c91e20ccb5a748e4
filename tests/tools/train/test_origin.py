"""Origins: what a run keeps of its config, and the config for a CSV file."""

import dataclasses
import gzip
import json
import os

import pytest

from tpu_embedding.tools.train import ConfigError, DataError
from tpu_embedding.tools.train.origin import RunOrigin, csv_run
from tpu_embedding.tools.train.reporting import RECORDS_FILE

CONFIG = """
import dataclasses, pathlib
from helper import STEPS
from tpu_embedding.tools.train import load_config
config = dataclasses.replace(
    load_config("synthetic"), name=pathlib.Path(__file__).stem, num_steps=STEPS)
"""


def record(directory, *origins):
    """Writes the records of starts of a run."""
    lines = [json.dumps({"run": {}, "origin": origin}) for origin in origins]
    (directory / RECORDS_FILE).write_text("\n".join(lines) + "\n")


def test_a_run_keeps_the_digest_of_its_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("STEPS = 7")
    (tmp_path / "mine.py").write_text(CONFIG)
    origin = RunOrigin(config="mine.py", settings=("model.dim=3",), data_dir="data")
    record(tmp_path, RunOrigin(config="dlrm").record(), origin.record(), None)
    monkeypatch.chdir("/")
    assert "STEPS" not in (tmp_path / RECORDS_FILE).read_text()
    kept = RunOrigin.of_run(tmp_path)
    assert kept.data_dir == str(tmp_path / "data")
    config = kept.load()
    assert (config.name, config.num_steps, config.model.dim) == ("mine", 7, 3)
    for change in (lambda path: path.write_text("raise SystemExit"), os.remove):
        change(tmp_path / "mine.py")
        with pytest.raises(ConfigError, match="gone or changed; pass.*--config"):
            kept.load()


def test_encodings_of_a_config(tmp_path):
    text = CONFIG.replace("STEPS\n", "len('é')\n").replace("=STEPS)", "=len('é'))")
    text = text.replace("from helper import len('é')\n", "")
    path = tmp_path / "mine.py"
    for content in (
        b"\xef\xbb\xbf" + text.encode(),
        b"# coding: latin-1\n" + text.encode("latin-1"),
    ):
        path.write_bytes(content)
        assert RunOrigin(config=str(path)).load().num_steps == 1


def test_a_csv_file_that_moved(tmp_path):
    (tmp_path / "clicks.CSV").write_text("a,b\n" * 40)
    record(tmp_path, RunOrigin(config=str(tmp_path / "gone.csv")).record())
    moved = str(tmp_path / "clicks.CSV")
    kept = dataclasses.replace(RunOrigin.of_run(tmp_path), data_dir=moved)
    assert kept.load().describe() == RunOrigin(config=moved).load().describe()


TRUNCATED = gzip.compress(999 * b"1,2", mtime=0)[:-9]


@pytest.mark.parametrize("content", [b"no gzip", TRUNCATED], ids=["text", "truncated"])
def test_a_damaged_csv_file(tmp_path, content):
    path = tmp_path / "clicks.csv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="clicks.csv.gz must be a CSV file"):
        RunOrigin(config=str(path)).load()


def test_a_config_of_the_package(tmp_path):
    record(tmp_path, RunOrigin(config="dlrm").record())
    assert RunOrigin.of_run(tmp_path) == RunOrigin(config="dlrm")


def test_a_run_of_a_script(tmp_path):
    record(tmp_path, None)
    with pytest.raises(ConfigError, match="a script started.*--config"):
        RunOrigin.of_run(tmp_path)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_steps"),
    [(10, 32, 20), (20_000, 64, 625), (10_000_000, 4096, 4882)],
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
