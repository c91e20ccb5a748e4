"""Origins: what a run keeps of its config, and the config for a CSV file."""

import gzip
import json

import pytest

from tpu_embedding.tools.train import ConfigError, DataError, load_config
from tpu_embedding.tools.train.origin import RunOrigin, config_of_run, csv_run
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


def test_a_csv_file_records_its_settings(tmp_path):
    path = tmp_path / "clicks.CSV"
    path.write_text("x,y,b\n" + "1,2,no\n1,2,yes\n" * 20)
    settings = ("seed=3", "model.hidden_sizes=7 5", "data.lists=x y", "data.label=b")
    origin = RunOrigin(config=str(path), settings=settings, data_dir=str(path))
    assert origin.export_options() == []
    wanted, record = origin.load(), origin.record()
    path.rename(tmp_path / "moved.tsv")
    for name in (record["config"], str(path)):  # Older versions recorded the path.
        run = {"run": wanted.describe(), "origin": record | {"config": name}}
        write_records(tmp_path, run)
        kept = config_of_run(tmp_path, data_dir="moved.tsv")
        assert (kept.data, kept.model, kept.seed) == (wanted.data, wanted.model, 3)
        assert (kept.data.task, kept.data.positive) == ("binary", "yes")


FORGED = {
    "a module": ({"config": "os"}, "'os'.*not executed"),
    "a file": ({"config": "{tmp}/evil.py"}, "evil.py'.*not executed"),
    "a list": ({"config": ["evil.py"]}, "not executed"),
    "a path in a name": ({"config": "../configs/dlrm"}, "not executed"),
    "a field": ({"run": {"data": {"tyro": "x"}}}, "'data.tyro' must be"),
    "a type": ({"run": {"model": {"dim": "4 --help"}}}, "'model.dim' must be"),
    "a bool": ({"run": {"model": {"dim": True}}}, "'model.dim' must be"),
    "a size": ({"run": {"model": {"dim": 2**40}}}, "'model.dim' must be"),
    "layers": ({"run": {"model": {"hidden_sizes": [1] * 65}}}, "hidden_sizes' must"),
    "a choice": ({"run": {"data": {"split": "first"}}}, "'data.split' must be"),
    "a section": ({"run": {"model": 4}}, "'model.model' must be"),
    "a seed": ({"run": {"seed": -1}}, "recorded seed"),
    "a rule": ({"run": {"data": {"held_out": 2.0}}}, "recorded data.*held_out"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_records_are_data(tmp_path, case, capsys):
    """A record selects a config of the package, and nothing of it is executed."""
    forged, message = FORGED[case]
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    run = load_config("csv_file").describe()
    for section, values in forged.get("run", {}).items():
        merged = isinstance(values, dict)
        run[section] = run[section] | values if merged else values
    config = forged.get("config", "csv_file")
    config = config.format(tmp=tmp_path) if isinstance(config, str) else config
    settings = [f"tyro-write-completion=bash {tmp_path / 'executed'}"]
    origin = {"config": config, "settings": settings, "sha256": None}
    write_records(tmp_path, {"run": run, "origin": origin})
    with pytest.raises(ConfigError, match=message):
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


TRUNCATED = gzip.compress(999 * b"1,2", mtime=0)[:-9]


@pytest.mark.parametrize("content", [b"no gzip", TRUNCATED], ids=["text", "truncated"])
def test_a_damaged_csv_file(tmp_path, content):
    path = tmp_path / "clicks.csv.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="clicks.csv.gz could not be read"):
        RunOrigin(config=str(path)).load()


def test_a_run_of_a_script(tmp_path):
    write_records(tmp_path, {"run": {}, "origin": None})
    with pytest.raises(ConfigError, match="a script started.*--config"):
        config_of_run(tmp_path)


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "num_steps"),
    [(10, 32, 20), (1000, 32, 93), (20_000, 64, 625), (10_000_000, 4096, 4882)],
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
    path.write_text("x,y z,is click\n1,2,1\n1,3,0\n")
    settings = ("data.label='is click'", "data.separator=' '", "data.lists=x 'y z'")
    data = RunOrigin(config=str(path), settings=settings).load().data
    assert (data.label, data.separator, data.lists) == ("is click", " ", ("x", "y z"))
    with pytest.raises(DataError, match="does not exist on this machine"):
        RunOrigin(config=str(tmp_path / "other.csv")).load()
