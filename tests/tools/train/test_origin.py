"""Origins: what a run keeps of its config."""

import json

import pytest

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
    with pytest.raises(ConfigError, match="model.temperature 0.5 -> .*--set"):
        config_of_run(tmp_path)


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
    with pytest.raises(ConfigError, match="mine.py'.*not executed.*--config"):
        config_of_run(tmp_path, data_dir="data")
    config = config_of_run(tmp_path, config="mine.py", settings=["model.dim=5"])
    assert (config.name, config.num_steps, config.model.dim) == ("mine", 7, 5)
    assert "changed since the run: model.dim 3 -> 5" in capsys.readouterr().out


def test_recorded_data_are_passed_again(tmp_path):
    write_start(tmp_path, "dlrm", data_dir="/etc")
    with pytest.raises(DataError, match="'/etc'.*--data-dir"):
        config_of_run(tmp_path)
    assert config_of_run(tmp_path, data_dir="/etc").name == "dlrm"


FORGED = {
    "a module": "os",
    "a file": "{tmp}/evil.py",
    "a list": ["evil.py"],
    "a path in a name": "../configs/dlrm",
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_records_are_data(tmp_path, case):
    """A record selects a config of the package, and nothing of it is executed."""
    config = FORGED[case]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    config = config.format(tmp=tmp_path) if isinstance(config, str) else config
    settings = [f"tyro-write-completion=bash {tmp_path / 'executed'}"]
    origin = {"config": config, "settings": settings, "sha256": None}
    run = load_config("synthetic").describe()
    write_records(tmp_path, {"run": run, "origin": origin})
    with pytest.raises(ConfigError, match="not executed"):
        config_of_run(tmp_path)
    assert not (tmp_path / "executed").exists()


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


def test_a_run_of_a_script(tmp_path):
    write_records(tmp_path, {"run": {}, "origin": None})
    with pytest.raises(ConfigError, match="a script started.*--config"):
        config_of_run(tmp_path)
