"""Origins: what a run keeps of its config."""

import json

from tests.rejections import rejects
from tpu_embedding.tools.train import ConfigError, DataError, load_config
from tpu_embedding.tools.train.origin import RunOrigin, config_of_run
from tpu_embedding.tools.train.run_directory import RECORDS_FILE

CONFIG = """
import dataclasses, pathlib
from helper import STEPS
from tpu_embedding.tools.train import load_config
config = dataclasses.replace(
    load_config("synthetic"), name=pathlib.Path(__file__).stem, num_steps=STEPS)
"""


def write_records(directory, *records):
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / RECORDS_FILE).write_text("".join(lines))


def write_start(directory, config, **changed):
    """Writes the record of a run of a config; `changed` are parts of its origin."""
    origin = RunOrigin(config=config).record() | changed
    run = load_config(origin["config"]).describe()
    write_records(
        directory, {"run": {}, "origin": None}, {"run": run, "origin": origin}
    )
    return run


def test_a_config_of_the_package(tmp_path):
    run = write_start(tmp_path, "two_tower")
    assert config_of_run(tmp_path).describe() == run
    changed = config_of_run(tmp_path, settings=["model.temperature=0.5"])
    assert changed.model.temperature == 0.5
    run["model"]["temperature"] = 0.5
    write_records(tmp_path, {"run": run, "origin": {"config": "two_tower"}})
    with rejects(ConfigError, fix="--set"):
        config_of_run(tmp_path)
    write_start(tmp_path, "dlrm", data_dir="/etc")
    with rejects(DataError, fix="--data-dir"):
        config_of_run(tmp_path)
    assert config_of_run(tmp_path, data_dir="/etc").name == "dlrm"


def test_a_config_of_the_user_is_passed_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("STEPS = 7")
    (tmp_path / "mine.py").write_text(CONFIG)
    origin = RunOrigin(config="mine.py", settings=("model.dim=3",), data_dir="data")
    assert origin.record() == {
        "config": str(tmp_path / "mine.py"),
        "data_dir": str(tmp_path / "data"),
    }
    options = ["--config", "mine.py", "--data-dir", "data", "--set", "model.dim=3"]
    assert origin.export_options() == options
    run = origin.load().describe()
    write_records(tmp_path, {"run": run, "origin": origin.record()})
    with rejects(ConfigError, fix="--config"):
        config_of_run(tmp_path, data_dir="data")
    config = config_of_run(tmp_path, config="mine.py", settings=["model.dim=5"])
    assert (config.name, config.num_steps, config.model.dim) == ("mine", 7, 5)
    assert "model.dim 3 -> 5" in capsys.readouterr().out


def test_encodings_of_a_config(tmp_path):
    path, text = tmp_path / "mine.py", CONFIG.replace("=STEPS", "=len('é')")
    text = text.replace("from helper import STEPS\n", "")
    latin_1 = b"# coding: latin-1\n" + text.encode("latin-1")
    for content in ("\ufeff".encode() + text.encode(), latin_1):
        path.write_bytes(content)
        assert RunOrigin(config=str(path)).load().num_steps == 1
