"""`import tpu_embedding` loads what is used, and nothing of tools or of checkpoints."""

import ast
import pathlib
import subprocess
import sys

import pytest

import tpu_embedding as te
from tests.tiers import quick_cases, with_ids

NOT_LOADED = (
    "orbax",
    "pyarrow",
    "yaml",
    "matplotlib",
    "grain",
    "tensorstore",
    "tensorflow",
    "tpu_embedding.tools",
    "jax.experimental.pallas",
)

USES = {
    "nothing": "",
    "layer": "te.TPUEmbedding, te.Optimizer, te.value_and_grad, te.PipelinedTrainStep",
    "plan": "te.make_plan, te.device_mesh, te.EmbeddingPlan",
    "modules": "te.functional, te.optimizers, te.gradients, te.inputs, te.metrics",
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


@pytest.mark.parametrize("use", quick_cases(with_ids(USES), "layer"))
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


THREADS = """
import threading
import tpu_embedding as te
errors, start = [], threading.Barrier(4)
def use(name):
    start.wait()
    try:
        getattr(te, name)
    except BaseException as error:
        errors.append(repr(error))
threads = [
    threading.Thread(target=use, args=[name])
    for name in ("TPUEmbedding", "inputs", "save", "optimizers")
]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""


@pytest.mark.full
def test_threads_may_use_names_first_at_once():
    subprocess.run([sys.executable, "-Werror", "-c", THREADS], check=True)


FLAX_STATE = """
import jax, pytest, tpu_embedding as te
from flax import serialization
def tables(num_rows):
    table = te.TableConfig(vocabulary_size=num_rows, dim=4, name="movie")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh=te.device_mesh())
    return te.functional.init_tables(plan, jax.random.key(0))
state = serialization.to_state_dict(tables(10))
serialization.from_state_dict(tables(10), state)
with pytest.raises(ValueError, match="saved under the plan of the model"):
    serialization.from_state_dict(tables(11), state)
"""


@pytest.mark.full
def test_flax_refuses_tables_of_another_plan_before_linen_is_used():
    subprocess.run([sys.executable, "-c", FLAX_STATE], check=True)


def test_a_name_that_stands_in_a_module_is_found():
    with pytest.raises(AttributeError, match="; it is tpu_embedding.gradients.add$"):
        te.add  # noqa: B018
    with pytest.raises(AttributeError, match="; it is tpu_embedding.nn.SlotVariables$"):
        te.SlotVariables  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        te.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'training'$"):
        te.training  # noqa: B018  # A private module of te.nn.


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
