"""Both configs can be traced, and use public names only."""

import ast
import importlib

import pytest

from tests.benchmarks.dlrm_v4 import FOLDER, FULL, SMALL
from tests.tools.train.runs import check_traced

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
