"""Compares parts of a checkpoint with the state: a table, its optimizer, a leaf.

`restoring.py` walks over the parts, and collects the differences.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np

from tpu_embedding.checkpoint.records import ArrayRecord, TableRecord
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.tables.slot_values import NamedSlot

SlotsChoice = Literal["restore", "initialize"]
"""`"restore"`: slot variables come from the checkpoint. `"initialize"`: they start
again, as at the first step."""

RulesChoice = Literal["check", "ignore"]
"""`"check"`: each table must have the optimizer of the checkpoint, learning rates
apart. `"ignore"`: slot variables are restored if their names and shapes are equal, and
start again if not."""

DtypesChoice = Literal["check", "convert"]
"""`"check"`: tables must have the types of the checkpoint. `"convert"`: rows become
float32 or bfloat16, whichever the tables of the state are."""

_CONVERTIBLE: Final = ("float32", "bfloat16")
"""Types to which rows are converted: they hold the numbers of all types."""

DenseChoice = Literal["restore", "keep"]
"""`"restore"`: other leaves of the state come from the checkpoint. `"keep"`: they
stay."""

_ROUNDING_SLOT: Final = "step"
"""Count of updates of narrow tables, from which their rounding is drawn."""

_FIXES: Final = {
    "missing": "Pass tables=[the tables to restore], or rename={new name: old name}.",
    "extra": "Pass tables=[the tables to restore].",
    "shape": "Load such a table with te.checkpoint.read_table and "
    "te.functional.with_table_values.",
    "dynamic": "Use the kind of vocabulary and the default_row of the "
    "checkpoint, or leave it out of tables=.",
    "dtype": "Pass dtypes='convert' to round the rows to the state's types.",
    "abstract": "Pass a state of arrays, whose new rows have their initial values.",
    "rule": "Restore with the optimizer of the checkpoint, or pass rules='ignore' to "
    "keep slots that fit, or slots='initialize' to keep none.",
    "shared": "Give these tables different optimizers, so that they are not stacked. "
    "Or start their slot variables again with slots='initialize'.",
    "dense": "Pass dense='keep' to restore tables only. Restore a model that was saved "
    "in (model, optimizer) as (model,).",
}


_MAX_LEAVES: Final = 2
"""Leaves of the state that are listed; usually many differ in the same way."""

_MAX_LINE: Final = 160
"""Characters of differences that are written in one paragraph."""


class Difference(NamedTuple):
    """One difference between a checkpoint and a state.

    Attributes:
      owner: the table or leaf.
      problem: the values of both.
      fix: key of what to do about it.
    """

    owner: str
    problem: str
    fix: str


def format_differences(differences: Sequence[Difference]) -> str:
    """Returns the differences of each owner, and the fixes after them."""
    problems: dict[str, list[str]] = {}
    for difference in differences:
        problems.setdefault(difference.owner, []).append(difference.problem)
    lines = [f"{owner}: {'; '.join(texts)}" for owner, texts in problems.items()]
    leaves = {
        difference.owner for difference in differences if difference.fix == "dense"
    }
    if (hidden := len(leaves) - _MAX_LEAVES) > 0:  # Other leaves differ alike.
        lines = [*lines[:-hidden], f"and {hidden} more"]
    keys = dict.fromkeys(difference.fix for difference in differences)
    fixes = [_FIXES[x] for x in keys if x != "extra" or "missing" not in keys]
    if sum(map(len, lines)) < _MAX_LINE:
        return f" {'; '.join(lines)}. {' '.join(fixes)}"
    return "\n  " + "\n".join(["\n  ".join(lines), *fixes])


def table_differences(
    name: str,
    saved: TableRecord,
    wanted: TableRecord,
    rows: Literal["arrays", "shapes"],
    dtypes: DtypesChoice,
) -> Iterator[Difference]:
    """Yields the differences of one table, its slot variables apart.

    Args:
      name: the table's name in the state.
      saved: the table of the checkpoint.
      wanted: the table of the state.
      rows: contents of the state.
      dtypes: whether to compare types of rows.
    """
    owner = f"table {name!r}"
    if saved.dim != wanted.dim:
        dims = f"dim {saved.dim} in the checkpoint, {wanted.dim} now"
        yield Difference(owner, dims, "shape")
    is_convertible = wanted.dtype in _CONVERTIBLE
    if saved.dtype != wanted.dtype and (dtypes == "check" or not is_convertible):
        text = f"dtype {saved.dtype} in the checkpoint, {wanted.dtype} now"
        yield Difference(owner, text, "dtype" if is_convertible else "shape")
    saved_kind, wanted_kind = _vocabulary_kind(saved), _vocabulary_kind(wanted)
    if saved_kind != wanted_kind:
        text = f"{saved_kind} in the checkpoint, {wanted_kind} now"
        yield Difference(owner, text, "dynamic")
    elif saved.dynamic is None and saved.vocabulary_size != wanted.vocabulary_size:
        sizes = (
            f"vocabulary_size {saved.vocabulary_size} in the checkpoint, "
            f"{wanted.vocabulary_size} now"
        )
        if saved.vocabulary_size > wanted.vocabulary_size:
            yield Difference(owner, sizes, "shape")
        elif rows == "shapes":
            yield Difference(owner, sizes, "abstract")


def _vocabulary_kind(table: TableRecord) -> str:
    """Returns what must be equal of two vocabularies; capacities may differ."""
    if table.dynamic is None:
        return "a fixed vocabulary"
    default_row = table.dynamic["default_row"]
    return f"a te.Dynamic vocabulary with default_row {default_row!r}"


def optimizer_differences(
    name: str, saved: TableRecord, wanted: TableRecord
) -> Iterator[Difference]:
    """Yields the differences of the optimizer and slot variables of one table.

    Args:
      name: the table's name in the state.
      saved: the table of the checkpoint.
      wanted: the table of the state.
    """
    owner = f"table {name!r}"
    if saved.optimizer is None or wanted.optimizer is None:
        if saved.optimizer is not wanted.optimizer:
            text = "an optimizer in the checkpoint, no optimizer now"
            if saved.optimizer is None:
                text = "no optimizer in the checkpoint, an optimizer now"
            yield Difference(owner, text, "rule")
        return
    for key, value in saved.optimizer.items():
        if value != (now := wanted.optimizer[key]):
            text = f"optimizer {key} {value} in the checkpoint, {now} now"
            yield Difference(owner, text, "rule")
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
            text = f"slot {slot!r} {saved_slot} in the checkpoint, {wanted_slot} now"
            yield Difference(owner, text, "rule")


def saved_slots(saved: TableRecord, wanted: TableRecord) -> dict[str, str]:
    """Returns the slot variables that a table takes over, with their saved names.

    They have equal names and shapes. A count of steps has another name where a rule has
    one more or one less: such a count takes over the first one of the checkpoint.

    Args:
      saved: the table of the checkpoint.
      wanted: the table of the state.
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
    """Yields a difference if tables of one stack would share a value that differs.

    Args:
      stack: stack of the layer.
      slot: a count or hyper-parameter of the stack in the state.
      values: name of each restored table to its value in the checkpoint.
    """
    first, *others = values.values()
    if any(not np.array_equal(first, other) for other in others):
        texts = ", ".join(f"{value} for {name!r}" for name, value in values.items())
        problem = f"they share {slot.name!r} now, and the checkpoint has {texts}"
        yield Difference(f"tables {sorted(values)}", problem, "shared")
    stay = sorted({table.name for table in stack.tables} - set(values))
    # Tables that are not trained yet have no count to lose.
    if not stay or slot.kind != "shared" or isinstance(slot.leaf, jax.ShapeDtypeStruct):
        return
    count = np.asarray(slot.leaf)
    if count.any() and not np.array_equal(count, first):
        problem = (
            f"they stay, with {slot.name!r} {count}, and share it with the restored "
            f"tables; the checkpoint has {first} for {next(iter(values))!r}"
        )
        yield Difference(f"tables {stay}", problem, "shared")


def dense_differences(
    saved: Mapping[str, str], wanted: Mapping[str, Any]
) -> Iterator[Difference]:
    """Yields the differences of the other leaves.

    The caller may restore only the model of a saved `(model, optimizer)`. So leaves are
    compared only if their path starts with a position that the caller's state has.

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
            text = f"{saved[name]} in the checkpoint, {there} now"
            yield Difference(name, text, "dense")


def describe_leaf(leaf: Any) -> str:
    """Returns type and shape of a leaf, such as `float32[2, 3]`."""
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"
