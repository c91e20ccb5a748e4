"""Compares parts of a checkpoint with the state: a table, its optimizer, or a leaf."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np

from tpu_embedding.checkpoint.records import ArrayRecord, TableRecord
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.tables.slot_values import NamedSlot

SlotsChoice = Literal["restore", "initialize"]
"""`"restore"` reads slot variables from the checkpoint. `"initialize"` resets them to
their initial values."""

RulesChoice = Literal["check", "ignore"]
"""`"check"` requires each table's optimizer to match the checkpoint, except for
hyper-parameters such as the learning rate. `"ignore"` restores slot variables with
equal names, types and shapes, and resets the rest."""

DtypesChoice = Literal["check", "convert"]
"""`"check"` requires tables to have their saved types. `"convert"` converts rows to
the state's type, float32 or bfloat16."""

_CONVERTIBLE: Final = ("float32", "bfloat16")
"""Types to which rows of any type can be converted."""

DenseChoice = Literal["restore", "keep"]
"""`"restore"` reads the other leaves from the checkpoint. `"keep"` leaves them
unchanged."""

_ROUNDING_SLOT: Final = "step"
"""Update count of narrow tables, which seeds their stochastic rounding."""

_FIXES: Final = {
    "missing": "Pass tables=[the tables to restore], or rename={new name: old name}.",
    "extra": "Pass tables=[the tables to restore].",
    "shape": "Load such a table with te.checkpoint.read_table and "
    "te.functional.with_table_values.",
    "dynamic": "Use the kind of vocabulary and the default_row of the "
    "checkpoint, or leave it out of tables=.",
    "dtype": "Pass dtypes='convert' to round the rows to the state's types.",
    "abstract": "Pass a state of arrays, whose new rows have their initial values.",
    "rule": "Restore with the checkpoint's optimizer, or pass rules='ignore' to "
    "keep slots that fit, or slots='initialize' to keep none.",
    "shared": "Give these tables different optimizers, so that they are not stacked. "
    "Or start their slot variables again with slots='initialize'.",
    "dense": "Pass dense='keep' to restore tables only. Restore a model that was saved "
    "in (model, optimizer) as (model,).",
}

_MAX_LEAVES: Final = 2
"""Leaves of the state that are listed; usually many differ in the same way."""


class Difference(NamedTuple):
    """One difference between a checkpoint and a state.

    Attributes:
      owner: the table or leaf.
      problem: the value on each side.
      fix: key of the fix in `_FIXES`.
    """

    owner: str
    problem: str
    fix: str


def format_differences(differences: Sequence[Difference]) -> str:
    """Returns the differences, followed by their fixes."""
    hidden = [x for x in differences if x.fix == "dense"][_MAX_LEAVES:]
    texts = [f"{x.owner}: {x.problem}" for x in differences if x not in hidden]
    texts += [f"and {len(hidden)} more"] if hidden else []
    keys = dict.fromkeys(x.fix for x in differences)
    fixes = [_FIXES[x] for x in keys if x != "extra" or "missing" not in keys]
    return f"{'; '.join(texts)}. {' '.join(fixes)}"


def _changed(name: str, saved: Any, now: Any) -> str:
    return f"{name} {saved} in the checkpoint, {now} now".lstrip()


def table_differences(
    name: str,
    saved: TableRecord,
    wanted: TableRecord,
    rows: Literal["arrays", "shapes"],
    dtypes: DtypesChoice,
) -> Iterator[Difference]:
    """Yields the differences of one table, except its slot variables.

    Args:
      name: the table's name in the state.
      saved: the checkpoint's table.
      wanted: the state's table.
      rows: whether the state holds arrays or only shapes.
      dtypes: whether row types must be equal.
    """
    owner = f"table {name!r}"
    if saved.dim != wanted.dim:
        yield Difference(owner, _changed("dim", saved.dim, wanted.dim), "shape")
    is_convertible = wanted.dtype in _CONVERTIBLE
    if saved.dtype != wanted.dtype and (dtypes == "check" or not is_convertible):
        text = _changed("dtype", saved.dtype, wanted.dtype)
        yield Difference(owner, text, "dtype" if is_convertible else "shape")
    saved_kind, wanted_kind = _vocabulary_kind(saved), _vocabulary_kind(wanted)
    if saved_kind != wanted_kind:
        yield Difference(owner, _changed("", saved_kind, wanted_kind), "dynamic")
    elif saved.dynamic is None and saved.vocabulary_size != wanted.vocabulary_size:
        sizes = saved.vocabulary_size, wanted.vocabulary_size
        text = _changed("vocabulary_size", *sizes)
        if sizes[0] > sizes[1]:
            yield Difference(owner, text, "shape")
        elif rows == "shapes":
            yield Difference(owner, text, "abstract")


def _vocabulary_kind(table: TableRecord) -> str:
    """Returns the part of a vocabulary that must match. Capacities may differ."""
    if table.dynamic is None:
        return "a fixed vocabulary"
    default_row = table.dynamic["default_row"]
    return f"a te.Dynamic vocabulary with default_row {default_row!r}"


def optimizer_differences(
    name: str, saved: TableRecord, wanted: TableRecord
) -> Iterator[Difference]:
    """Yields the differences in one table's optimizer and slot variables."""
    owner = f"table {name!r}"
    if saved.optimizer is None or wanted.optimizer is None:
        if saved.optimizer is not wanted.optimizer:
            text = "an optimizer in the checkpoint, but none now"
            if saved.optimizer is None:
                text = "an optimizer now, but none in the checkpoint"
            yield Difference(owner, text, "rule")
        return
    for key, value in saved.optimizer.items():
        if value != (now := wanted.optimizer[key]):
            yield Difference(owner, _changed(f"optimizer {key}", value, now), "rule")
    if saved.optimizer != wanted.optimizer:
        return  # So their slot variables also differ.
    for slot in sorted(saved.slots.keys() | wanted.slots.keys()):
        saved_slot, wanted_slot = saved.slots.get(slot), wanted.slots.get(slot)
        if slot == _ROUNDING_SLOT and saved.dtype != wanted.dtype:
            continue
        if saved_slot is None:
            yield Difference(owner, f"slot {slot!r} not in the checkpoint", "rule")
        elif wanted_slot is None:
            yield Difference(owner, f"slot {slot!r} only in the checkpoint", "rule")
        elif saved_slot.row != wanted_slot.row:
            text = _changed(f"slot {slot!r}", saved_slot, wanted_slot)
            yield Difference(owner, text, "rule")


def saved_slots(saved: TableRecord, wanted: TableRecord) -> dict[str, str]:
    """Returns the name in the checkpoint of each slot variable to restore.

    A slot variable is restored if the checkpoint has one of the same name, type and
    shape. The names of step counts depend on how many a rule has, so a count whose name
    the checkpoint lacks is restored from the checkpoint's first count.
    """
    counts = [name for name, array in saved.slots.items() if _is_count(name, array)]
    names = {}
    for name, array in wanted.slots.items():
        if name in saved.slots and saved.slots[name].row == array.row:
            names[name] = name
        elif counts and _is_count(name, array):
            names[name] = counts[0]
    return names


def _is_count(name: str, array: ArrayRecord) -> bool:
    return name.split("/")[-1] == "count" and str(array) == "int32[]"


def shared_differences(
    stack: StackPlan, slot: NamedSlot, values: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yields a difference if stacked tables disagree on a value that they share.

    Args:
      stack: stack of the layer.
      slot: a count or hyper-parameter of the stack in the state.
      values: restored table name to its value in the checkpoint.
    """
    first, *others = values.values()
    if any(not np.array_equal(first, other) for other in others):
        texts = ", ".join(f"{value} for {name!r}" for name, value in values.items())
        problem = f"they share {slot.name!r} now, but the checkpoint has {texts}"
        yield Difference(f"tables {sorted(values)}", problem, "shared")
    stay = sorted({table.name for table in stack.tables} - set(values))
    # Tables that have not been trained have a zero count, which may be overwritten.
    if not stay or slot.kind != "shared" or isinstance(slot.leaf, jax.ShapeDtypeStruct):
        return
    count = np.asarray(slot.leaf)
    if count.any() and not np.array_equal(count, first):
        problem = (
            f"they are not restored and share {slot.name!r} {count} with the restored "
            f"tables, but the checkpoint has {first} for {next(iter(values))!r}"
        )
        yield Difference(f"tables {stay}", problem, "shared")


def dense_differences(
    saved: Mapping[str, str], wanted: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yields the differences of the other leaves.

    The caller may restore only the model of a saved `(model, optimizer)`. So saved
    leaves may be missing from the state if their path starts with a position that the
    state lacks.

    Args:
      saved: path to type and shape.
      wanted: path to leaf.
    """
    positions = {name.partition(".")[0] for name in wanted}
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            yield Difference(name, "not in the checkpoint", "dense")
        elif name not in wanted:
            if name.partition(".")[0] in positions:
                yield Difference(name, "only in the checkpoint", "dense")
        elif saved[name] != (there := describe_leaf(wanted[name])):
            yield Difference(name, _changed("", saved[name], there), "dense")


def describe_leaf(leaf: Any) -> str:
    """Returns a leaf's type and shape, such as `float32[2, 3]`."""
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"
