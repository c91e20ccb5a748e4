"""`import tpu_embedding` loads what is used, and nothing of tools or of checkpoints."""

import ast
import pathlib
import subprocess
import sys
import types

import pytest

import tpu_embedding as te
from tests.tiers import with_ids

NOT_LOADED = (
    "orbax",
    "pyarrow",
    "yaml",
    "matplotlib",
    "grain",
    "tensorstore",
    "tensorflow",
    "tpu_embedding.strings",
    "tpu_embedding.tools",
)

USES = {
    "layer": "te.TPUEmbedding, te.Optimizer, te.value_and_grad, te.PipelinedTrainStep",
    "linen": "te.linen",
}

PROGRAM = """
import sys
import flax, jax, optax
from flax import linen, nnx
before = set(sys.modules)
import tpu_embedding as te
{use}
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


@pytest.mark.parametrize("use", with_ids(USES))
def test_modules_that_are_not_loaded(use):
    command = [sys.executable, "-c", PROGRAM.format(use=use)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = run.stdout.splitlines()
    assert "tpu_embedding" in loaded
    assert not [
        module
        for module in loaded
        for name in NOT_LOADED
        if module == name or module.startswith(f"{name}.")
    ]


def imports_for_type_checkers():
    """Yields `(module, name, name in te)` of each import under `TYPE_CHECKING`."""
    tree = ast.parse(pathlib.Path(te.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module, alias.name, alias.asname


def test_type_checkers_see_the_names_that_are_there():
    seen = {own: (module, name) for module, name, own in imports_for_type_checkers()}
    modules = {
        own: tuple(f"tpu_embedding.{place}".rsplit(".", 1))
        for own, place in te._MODULES.items()
    }
    names = {
        own: (f"tpu_embedding.{place}", own) for own, place in te._MODULE_OF.items()
    }
    assert seen == modules | names
    assert te.__all__ == [*modules, *names]


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'embedding_bag'"):
        te.embedding_bag  # noqa: B018
    assert {*te.__all__, "__version__"} <= set(dir(te))


@pytest.mark.parametrize("name", te._MODULES)
def test_modules_show_their_public_names_only(name):
    module = getattr(te, name)
    shown = {name for name in dir(module) if name[0] != "_"}
    assert shown == set(module.__all__)
    values = [getattr(module, name) for name in shown]
    assert not [value for value in values if isinstance(value, types.ModuleType)]
