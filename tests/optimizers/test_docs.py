"""The list of optimizers in the package's docstring is complete, and its bytes true."""

import inspect
import re

import jax
import optax
import pytest

from tpu_embedding import optimizers
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes
from tpu_embedding.optimizers.names import optimizer_by_name

DIM = 8
EXPORTED = [
    name
    for name, value in vars(optimizers).items()
    if not name.startswith("_") and not inspect.ismodule(value)
]
PIECES = ("from_keras_config", "clip_gradients", "clip_rows")
WITH_ARGUMENTS = {
    "frequency_estimator": (1, lambda: optimizers.frequency_estimator(0.5, 9.0, 2.0)),
    "assign": (DIM, optimizers.assign),
}
WITHOUT_BYTES = ("user_defined", "mdl_adagrad_light")


def rules():
    for name in EXPORTED:
        value = getattr(optimizers, name)
        if name in PIECES or name.startswith("scale_by"):
            continue
        if not inspect.isfunction(value):
            continue
        signature = inspect.signature(value)
        returns_rule = signature.return_annotation is optax.GradientTransformation
        if returns_rule and "rule" not in signature.parameters:
            yield name


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_is_in_the_docstring(name):
    assert re.search(rf"`{name}\b", optimizers.__doc__)


@pytest.mark.parametrize("name", [*rules(), "mdl_adagrad_light"])
def test_every_rule_has_a_row_with_the_bytes_of_its_slots(name):
    row = re.search(rf"^\* `{name}`(?:, ([\dD +]+) bytes)?: ", optimizers.__doc__, re.M)
    assert row is not None
    if name in WITHOUT_BYTES:
        return
    dim, make = WITH_ARGUMENTS.get(name, (DIM, lambda: optimizer_by_name(name)))
    said = sum(
        int(term.split()[0]) * (dim if "D" in term else 1)
        for term in row.group(1).split("+")
    )
    slots = jax.tree.leaves(slot_row_shapes(make(), dim))
    assert said == sum(slot.size * slot.dtype.itemsize for slot in slots)
