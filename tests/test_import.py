"""`import tpu_embedding` loads what is used, and nothing of tools or of checkpoints."""

import importlib
import subprocess
import sys
import types

import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.lazy_names import lazy_names

NOT_LOADED = (
    "orbax",
    "pyarrow",
    "yaml",
    "matplotlib",
    "grain",
    "tensorstore",
    "tensorflow",
    "tpu_embedding.recommenders",
    "tpu_embedding.strings",
    "tpu_embedding.tools",
)

PROGRAM = """
import sys
import flax, jax, optax
from flax import linen, nnx
before = set(sys.modules)
import tpu_embedding as te
te.TPUEmbedding, te.Optimizer, te.value_and_grad, te.PipelinedTrainStep, te.linen
print(*sorted(set(sys.modules) - before), sep="\\n")
"""


def test_modules_that_are_not_loaded():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    loaded = run.stdout.splitlines()
    assert "tpu_embedding" in loaded
    assert not [
        module
        for module in loaded
        for name in NOT_LOADED
        if module == name or module.startswith(f"{name}.")
    ]


@pytest.mark.parametrize("package", ["", ".functional", ".inputs", ".nn"])
def test_lazy_names_are_there(package):
    module = importlib.import_module(f"tpu_embedding{package}")
    names = lazy_names(module.__name__)
    assert names
    for name, (parent, attribute) in names.items():
        value = getattr(module, name)
        owner = importlib.import_module(parent)
        assert value is getattr(owner, attribute)
    assert {*names} <= {*module.__all__}


def test_unknown_names_are_rejected():
    with rejects(AttributeError, fix="embedding_bag"):
        te.embedding_bag  # noqa: B018
    assert {*te.__all__, "__version__"} <= set(dir(te))


MODULES = [
    name for name in te.__all__ if isinstance(getattr(te, name), types.ModuleType)
]


@pytest.mark.parametrize("name", MODULES)
def test_modules_show_their_public_names_only(name):
    module = getattr(te, name)
    shown = {name for name in dir(module) if name[0] != "_"}
    assert shown == set(module.__all__)
    values = [getattr(module, name) for name in shown]
    assert not [value for value in values if isinstance(value, types.ModuleType)]
