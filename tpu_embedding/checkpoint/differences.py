"""Finds all differences between a checkpoint and the state to restore."""

from collections.abc import Collection, Mapping
from typing import Any, Final, Literal

import jax
import numpy as np

from tpu_embedding.checkpoint.records import ArrayRecord, TableRecord
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.tables.slot_values import NamedSlot

SlotsChoice = Literal["restore", "initialize"]
"""`"restore"`: slot variables come from the checkpoint. `"initialize"`: they start
anew, as at the first step."""

RulesChoice = Literal["check", "ignore"]
"""`"check"`: the optimizer of each table must be that of the checkpoint, learning rates
apart. `"ignore"`: slot variables are restored if their names and shapes are equal, and
the others start anew."""

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

_WAYS_OUT: Final = {
    "missing": "Give tables= the tables to restore, or rename={new name: old name}.",
    "extra": "Give tables= the tables to restore, to leave the others out.",
    "shape": "Load such a table by te.checkpoint.read_table and "
    "te.functional.with_table_values.",
    "dynamic": "Give the table the kind of vocabulary and the default_row of the "
    "checkpoint, or leave it out by tables=.",
    "dtype": "Give dtypes='convert' to round the rows to the types of now.",
    "abstract": "Give a state of arrays, whose new rows have their initial values.",
    "rule": "Restore with the optimizer of the checkpoint. Or give rules='ignore': it "
    "takes over slot variables of equal names and shapes, and starts the others anew. "
    "Or start all of them anew by slots='initialize'.",
    "shared": "Give these tables different optimizers, so that they are not stacked. "
    "Or start their slot variables anew by slots='initialize'.",
    "dense": "Give dense='keep' to restore tables only. The path of a leaf starts with "
    "its place: restore a model that was saved in (model, optimizer) as (model,).",
}


class Differences:
    """Differences between a checkpoint and a state, each with a way out."""

    def __init__(self):
        self._problems: dict[str, list[str]] = {}
        self._ways_out: dict[str, dict[str, None]] = {}

    def add(self, owner: str, problem: str, way_out: str) -> None:
        """Adds a difference.

        Args:
          owner: the table or leaf.
          problem: the values of both.
          way_out: key of the way out.
        """
        self._problems.setdefault(owner, []).append(problem)
        self._ways_out.setdefault(owner, {})[_WAYS_OUT[way_out]] = None

    def __bool__(self) -> bool:
        return bool(self._problems)

    def __str__(self) -> str:
        """Returns one line per owner, and the ways out below owners that share them."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for owner, problems in self._problems.items():
            ways_out = tuple(self._ways_out[owner])
            groups.setdefault(ways_out, []).append(f"{owner}: {'; '.join(problems)}")
        return "".join(
            "\n  ".join(["", *lines]) + "\n" + " ".join(ways_out)
            for ways_out, lines in groups.items()
        )


def compare_table(
    found: Differences,
    name: str,
    saved: TableRecord,
    wanted: TableRecord,
    *,
    is_abstract: bool,
    with_slots: bool,
    rules: RulesChoice,
    dtypes: DtypesChoice,
) -> None:
    """Adds the differences of one table.

    Args:
      found: differences so far.
      name: the table's name in the state.
      saved: the table of the checkpoint.
      wanted: the table of the state.
      is_abstract: True if the state has shapes in place of arrays.
      with_slots: True if its slot variables are to be restored.
      rules: whether to compare optimizers.
      dtypes: whether to compare types of rows.
    """
    owner = f"table {name!r}"
    if saved.dim != wanted.dim:
        found.add(
            owner, f"dim {saved.dim} in the checkpoint, {wanted.dim} now", "shape"
        )
    is_convertible = wanted.dtype in _CONVERTIBLE
    if saved.dtype != wanted.dtype and (dtypes == "check" or not is_convertible):
        text = f"dtype {saved.dtype} in the checkpoint, {wanted.dtype} now"
        found.add(owner, text, "dtype" if is_convertible else "shape")
    if saved.dynamic is not None or wanted.dynamic is not None:
        _compare_dynamic(found, owner, saved, wanted)
    elif saved.vocabulary_size != wanted.vocabulary_size:
        sizes = (
            f"vocabulary_size {saved.vocabulary_size} in the checkpoint, "
            f"{wanted.vocabulary_size} now"
        )
        if saved.vocabulary_size > wanted.vocabulary_size:
            found.add(owner, sizes, "shape")
        elif is_abstract:
            found.add(owner, sizes, "abstract")
    if with_slots and rules == "check":
        _compare_slots(found, owner, saved, wanted)


def _compare_dynamic(
    found: Differences, owner: str, saved: TableRecord, wanted: TableRecord
) -> None:
    """Adds what no restore bridges; the capacities of both may differ."""
    here, there = (
        "a fixed vocabulary"
        if dynamic is None
        else f"a te.Dynamic vocabulary with default_row {dynamic['default_row']!r}"
        for dynamic in (saved.dynamic, wanted.dynamic)
    )
    if here != there:
        found.add(owner, f"{here} in the checkpoint, {there} now", "dynamic")


def _compare_slots(
    found: Differences,
    owner: str,
    saved: TableRecord,
    wanted: TableRecord,
) -> None:
    if saved.optimizer is None or wanted.optimizer is None:
        if saved.optimizer is not wanted.optimizer:
            here, there = (
                "no optimizer" if table.optimizer is None else "an optimizer"
                for table in (saved, wanted)
            )
            found.add(owner, f"{here} in the checkpoint, {there} now", "rule")
        return
    for key, value in saved.optimizer.items():
        if value != (now := wanted.optimizer[key]):
            text = f"optimizer {key} {value} in the checkpoint, {now} now"
            found.add(owner, text, "rule")
    for name in sorted(saved.slots.keys() | wanted.slots.keys()):
        here, there = saved.slots.get(name), wanted.slots.get(name)
        if name == _ROUNDING_SLOT and saved.dtype != wanted.dtype:
            continue
        if here is None:
            found.add(owner, f"slot {name!r} not in the checkpoint", "rule")
        elif there is None:
            found.add(owner, f"slot {name!r} only in the checkpoint", "rule")
        elif not _is_same_row(here, there):
            problem = f"slot {name!r} {here} in the checkpoint, {there} now"
            found.add(owner, problem, "rule")


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
        if name in saved.slots and _is_same_row(saved.slots[name], array):
            names[name] = name
        elif counts and _is_count(name, array):
            names[name] = counts[0]
    return names


def _is_count(name: str, array: ArrayRecord) -> bool:
    return name.split("/")[-1] == "count" and str(array) == "int32[]"


def _is_same_row(here: ArrayRecord, there: ArrayRecord) -> bool:
    """Returns True if two arrays differ at most in their number of rows."""
    start = 1 if here.has_rows and there.has_rows else 0
    return (
        here.dtype == there.dtype
        and len(here.shape) == len(there.shape)
        and here.shape[start:] == there.shape[start:]
    )


def compare_shared(
    found: Differences, stack: StackPlan, slot: NamedSlot, values: Mapping[str, Any]
) -> None:
    """Adds a difference if tables of one stack would share a value that differs.

    Args:
      found: differences so far.
      stack: stack of the layer.
      slot: a count or hyper-parameter of the stack in the state.
      values: name of each restored table to its value in the checkpoint.
    """
    first, *others = values.values()
    if any(not np.array_equal(first, other) for other in others):
        texts = ", ".join(f"{value} for {name!r}" for name, value in values.items())
        problem = f"they share {slot.name!r} now, and the checkpoint has {texts}"
        found.add(f"tables {sorted(values)}", problem, "shared")
    stay = sorted({table.name for table in stack.tables} - set(values))
    # Tables that are not trained yet have no count to lose.
    if not stay or slot.kind != "shared" or is_abstract([slot.leaf]):
        return
    count = np.asarray(slot.leaf)
    if count.any() and not np.array_equal(count, first):
        problem = (
            f"they stay, with {slot.name!r} {count}, and share it with the restored "
            f"tables; the checkpoint has {first} for {next(iter(values))!r}"
        )
        found.add(f"tables {stay}", problem, "shared")


def compare_dense(
    found: Differences, saved: Mapping[str, str], wanted: Mapping[str, Any]
) -> None:
    """Adds the differences of the other leaves.

    Parts of the state that the caller does not have are left out: those whose path
    starts with another place.

    Args:
      found: differences so far.
      saved: path to type and shape.
      wanted: path to leaf.
    """
    places = {name.partition(".")[0] for name in wanted}
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            found.add(name, "not in the checkpoint", "dense")
        elif name not in wanted:
            if name.partition(".")[0] in places:
                found.add(name, "only in the checkpoint", "dense")
        elif saved[name] != (there := describe_leaf(wanted[name])):
            found.add(name, f"{saved[name]} in the checkpoint, {there} now", "dense")


def describe_leaf(leaf: Any) -> str:
    """Returns type and shape of a leaf, such as `float32[2, 3]`."""
    if isinstance(leaf, bool | int | float):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"


def is_abstract(leaves: Collection[Any]) -> bool:
    """Returns True if some leaves are shapes."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
