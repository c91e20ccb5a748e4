"""The optimizer catalogue is complete and true, and docstrings have the equations."""

import inspect
import pathlib
import re

import jax
import optax
import pytest

from tpu_embedding import optimizers
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes
from tpu_embedding.optimizers.names import optimizer_by_name

DIM = 8
CATALOGUE = (
    pathlib.Path(__file__).parents[2] / "docs" / "guides" / "optimizer_catalogue.md"
).read_text()
EXPORTED = [
    name
    for name, value in vars(optimizers).items()
    if not name.startswith("_") and not inspect.ismodule(value)
]
NO_OPTIMIZERS = ("from_keras_config", "clip_gradients", "clip_rows")
WITH_ARGUMENTS = {
    "frequency_estimator": (1, lambda: optimizers.frequency_estimator(0.5, 9.0, 2.0)),
    "assign": (DIM, optimizers.assign),
}
WITHOUT_BYTES = ("user_defined", "mdl_adagrad_light")
DEFINED_SYMBOLS = {"w", "g", "t", "D", "lr"}
FUNCTIONS = {"sqrt", "sign", "mean", "min", "max", "abs", "clip", "norm", "RMS"}
# A condition or remark stands right of an equation, after two spaces or more.
EQUATION = re.compile(r" *(?P<target>[\w*, ]+?) [-+]?= (?P<value>.+?)(?:  +|$)", re.M)


def make_optimizers():
    """Yields the names of the exported functions that make an optimizer."""
    for name in EXPORTED:
        value = getattr(optimizers, name)
        if name in NO_OPTIMIZERS or name.startswith("scale_by"):
            continue
        if not inspect.isfunction(value):
            continue
        signature = inspect.signature(value)
        returns_rule = signature.return_annotation is optax.GradientTransformation
        if returns_rule and "rule" not in signature.parameters:
            yield name


NAMES = list(make_optimizers())


def table_row(name):
    """Returns the cells of an optimizer in the table at the top of the catalogue."""
    row = re.search(rf"^\| `{re.escape(name)}` \|(.*)\|$", CATALOGUE, re.M)
    assert row is not None, name
    return [cell.strip() for cell in row.group(1).split("|")]


def section(name):
    """Returns the catalogue's text about one optimizer."""
    text = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", CATALOGUE, re.M | re.DOTALL)
    assert text is not None, name
    return text.group(1)


def parse_bytes(cell, dim):
    """Evaluates a number of bytes, such as "4 D + 4"."""
    return sum(
        int(term.split()[0]) * (dim if "D" in term else 1) for term in cell.split("+")
    )


def check_equations(equations, prose, parameters):
    """Checks that the row is updated, and that the text defines every symbol."""
    found = list(EQUATION.finditer(equations))
    targets = {
        x for match in found for x in re.findall(r"[A-Za-z_]\w*", match["target"])
    }
    assert "w" in targets
    defined = set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"`[^`]+`", prose))))
    values = " ".join(match["value"] for match in found)
    used = targets | set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", values))
    assert not used - defined - set(parameters) - FUNCTIONS
    return used


def number_of_slots_in(cell):
    return len(re.findall(r"`[a-z_]+`|a clock", cell))


def parameters_of(name):
    return inspect.signature(getattr(optimizers, name)).parameters


def test_optimizers_are_found():
    assert len(NAMES) >= 24


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_is_in_the_catalogue(name):
    assert re.search(rf"`(?:te\.optimizers\.)?{name}\b", CATALOGUE)


@pytest.mark.parametrize("name", [*NAMES, "mdl_adagrad_light"])
def test_every_optimizer_has_a_row_with_the_bytes_of_its_slots(name):
    slots_cell, bytes_cell, example_cell = table_row(name)
    assert section(name)
    if name in WITHOUT_BYTES:
        assert not example_cell
        return
    dim, make = WITH_ARGUMENTS.get(name, (DIM, lambda: optimizer_by_name(name)))
    slots = jax.tree.leaves(slot_row_shapes(make(), (dim,)))
    assert parse_bytes(bytes_cell, dim) == sum(
        slot.size * slot.dtype.itemsize for slot in slots
    )
    assert number_of_slots_in(slots_cell) == len(slots)
    assert slots_cell.count("`[rows]`") == sum(
        slot.size == 1 for slot in slots if dim > 1
    ) + (dim == 1)
    assert parse_bytes(bytes_cell, 64) == int(example_cell)


def test_the_bytes_of_centered_rmsprop_are_true():
    slots_cell, bytes_cell, example_cell = table_row("rmsprop(centered=True)")
    slots = jax.tree.leaves(slot_row_shapes(optimizers.rmsprop(centered=True), (DIM,)))
    assert parse_bytes(bytes_cell, DIM) == sum(4 * slot.size for slot in slots)
    assert number_of_slots_in(slots_cell) == len(slots) == 3
    assert parse_bytes(bytes_cell, 64) == int(example_cell)


@pytest.mark.parametrize("name", NAMES)
def test_every_section_has_the_equation_and_defines_its_symbols(name):
    text = section(name)
    equations = "\n".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    prose = re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL)
    slots = table_row(name)[0]
    extra = DEFINED_SYMBOLS | {"learning_rate"} | set(parameters_of(name))
    check_equations(equations, prose + slots, extra)


@pytest.mark.parametrize("name", NAMES)
def test_every_docstring_has_the_equation_and_defines_its_symbols(name):
    text, _, arguments = inspect.getdoc(getattr(optimizers, name)).partition("\nArgs:")
    lines = text.splitlines()
    equations = "\n".join(line for line in lines if line.startswith("    "))
    prose = "\n".join(line for line in lines if not line.startswith("    "))
    used = check_equations(equations, prose, parameters_of(name))
    assert {"w", "g"} <= used or name == "frequency_estimator"
    for parameter in parameters_of(name):
        options = inspect.signature(optimizers.with_options).parameters
        if parameter not in options or parameter == "learning_rate":
            assert re.search(rf"^  {parameter}: ", arguments, re.M), parameter
    assert ">>> " in arguments or ">>> " in text


@pytest.mark.parametrize("name", NAMES)
def test_every_docstring_names_its_source(name):
    assert re.search(r"^Source: ", inspect.getdoc(getattr(optimizers, name)), re.M)


def test_the_package_docstring_points_to_the_catalogue():
    assert "docs/guides/optimizer_catalogue.md" in optimizers.__doc__
    assert len(optimizers.__doc__.splitlines()) <= 35
