"""The command runs both configs, which use public names only."""

import ast
import importlib

import pytest

from tests.benchmarks.dlrm_v4 import FOLDER, FULL, SMALL
from tests.tools.train.runs import check_traced, losses_of, start_command

PUBLIC = ("tpu_embedding", "tpu_embedding.tools.train")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_only_public_names_are_imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tpu_embedding"):
            for name in (alias.name for alias in node.names):
                assert node.module in PUBLIC or f"{node.module}.{name}" in PUBLIC
                assert hasattr(importlib.import_module(node.module), name)


@pytest.mark.full
@pytest.mark.parametrize("config", [FULL, SMALL], ids=["full", "small"])
def test_the_step_can_be_traced(config):
    check_traced(config, "model.hstu.num_layers=1")


@pytest.mark.exhaustive
def test_the_command_trains_the_small_config(tmp_path):
    settings = (
        *("num_steps=2", "batch_size=6", "log_every=1", "evaluate_every=0"),
        *("data.num_users=40", "data.num_days=6", "model.hstu.num_layers=1"),
    )
    process = start_command(
        tmp_path / "run", "--devices", "2", settings=settings, config=SMALL
    )
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert sorted(losses_of(tmp_path / "run")) == [1, 2]
    assert "result: " in output
    assert '"run_stop"' in (tmp_path / "run" / "mlperf.log").read_text()
