"""Tests `tpu-embedding export`: a run of a few steps, exported in two formats."""

import hashlib
import json
import re

import numpy as np
import pytest
import tyro

import tpu_embedding as te
from tests.own_config import write_config
from tests.rejections import rejects
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.tools import cli
from tpu_embedding.tools.cli.export import Export


def export(*arguments):
    return tyro.cli(Export, args=[str(x) for x in arguments]).run()


@pytest.mark.full
def test_a_run_of_an_own_config_is_exported_by_the_printed_command(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    settings = ["--set", "num_steps=2", "--set", "model.dim=4", "--devices", "1"]
    options = [*settings, "--data-dir", "clicks.csv"]
    assert cli.main(["train", "clicks.py", *options]) == 0
    shown = capsys.readouterr().out
    command = re.search(r"export   tpu-embedding (export .*)", shown)[1].split()
    assert cli.main(command) == 0
    served = te.export.load(tmp_path / "runs" / "clicks" / "served")
    features = {"user": np.array([3]), "item": np.array([4])}
    assert served.tables["user"].shape == (7, 4)
    assert served(features, None)["predictions"].shape == (1,)


@pytest.mark.parametrize(
    ("forged", "name"),
    [
        ({"config": "{tmp}/run/evil.py", "sha256": "{sha256}"}, "--config"),
        ({"config": "synthetic", "settings": ["{completion}"]}, "CheckpointError"),
        *(
            ({"config": x, "settings": ["{completion}"]}, "--config")
            for x in ("os", "../configs/dlrm", ["evil.py"], None)
        ),
        (None, "--config"),  # A script leaves no origin.
        ({"config": "{tmp}/bait.csv", "data_dir": None}, "--config"),
        ({"config": "dlrm", "data_dir": "{tmp}/bait.csv"}, "--data-dir"),
    ],
)
def test_a_downloaded_run_executes_and_opens_nothing(tmp_path, forged, name, capsys):
    evil = f"open({str(tmp_path / 'executed')!r}, 'w')"
    texts = {
        "tmp": str(tmp_path),
        "sha256": hashlib.sha256(evil.encode()).hexdigest(),
        "completion": f"tyro-write-completion=bash {tmp_path / 'executed'}",
    }
    text = json.dumps({"run": {}, "origin": forged and {"settings": []} | forged})
    for word, value in texts.items():
        text = text.replace(f"{{{word}}}", value)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "run" / "evil.py").write_text(evil)
    (tmp_path / "run" / "metrics.jsonl").write_text(text + "\n")
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "served")]
    assert cli.main(arguments) == 2
    assert name in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_outputs_and_directories_are_checked_first(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with rejects(te.export.ExportError):
        export(tmp_path, tmp_path / "full")
    with rejects(CheckpointError, fix=str(tmp_path / "checkpoints")):
        export(tmp_path, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
