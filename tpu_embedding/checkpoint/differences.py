"""Finds all differences between a checkpoint and the state to restore."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import numpy as np

from tpu_embedding.checkpoint.format import TableRecord
from tpu_embedding.optimizers.rules.touched_rows import is_base_of_deltas
from tpu_embedding.tables.slot_values import NamedSlot

SlotsChoice = Literal["restore", "initialize"]
"""`"restore"`: slot variables come from the checkpoint. `"initialize"`: they start
anew, as at the first step."""

RulesChoice = Literal["check", "ignore"]
"""`"check"`: the optimizer of each table must be that of the checkpoint, learning rates
apart. `"ignore"`: slot variables are restored if their names and shapes are equal."""

DenseChoice = Literal["restore", "keep"]
"""`"restore"`: other leaves of the state come from the checkpoint. `"keep"`: they
stay."""

_WAYS_OUT: Final = {
    "missing": "Give tables= the tables to restore, or rename={new name: old name}.",
    "extra": "Give tables= the tables to restore, to leave the others out.",
    "shape": "Load such a table by te.checkpoint.read_table and te.with_table_values.",
    "abstract": "Give a state of arrays, whose new rows have their initial values.",
    "rule": "Restore with the optimizer of the checkpoint. Or start its slot variables "
    "anew by slots='initialize', or take them over by rules='ignore'.",
    "shared": "Give these tables different optimizers, so that they are not stacked. "
    "Or start their slot variables anew by slots='initialize'.",
    "dense": "Give dense='keep' to restore tables only. The path of a leaf starts with "
    "its place: restore a model that was saved in (model, optimizer) as (model,).",
}


class Differences:
    """Differences between a checkpoint and a state, each with a way out."""

    def __init__(self):
        self._lines: list[str] = []
        self._ways_out: dict[str, None] = {}

    def add(self, owner: str, problem: str, way_out: str) -> None:
        """Adds a difference.

        Args:
          owner: the table or leaf.
          problem: the values of both.
          way_out: key of the way out.
        """
        self._lines.append(f"{owner}: {problem}")
        self._ways_out[_WAYS_OUT[way_out]] = None

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __str__(self) -> str:
        """Returns one line per difference, then the ways out."""
        return "\n  ".join(["", *self._lines]) + "\n" + "\n".join(self._ways_out)


def compare_table(
    found: Differences,
    name: str,
    saved: TableRecord,
    wanted: TableRecord,
    *,
    is_abstract: bool,
    with_slots: bool,
    rules: RulesChoice,
) -> None:
    """Adds the differences of one table.

    Args:
      found: differences so far.
      name: of the table in the state.
      saved: the table of the checkpoint.
      wanted: the table of the state.
      is_abstract: True if the state has shapes in place of arrays.
      with_slots: True if its slot variables are to be restored.
      rules: whether to compare optimizers.
    """
    owner = f"table {name!r}"
    for field in ("dim", "dtype"):
        here, there = getattr(saved, field), getattr(wanted, field)
        if here != there:
            found.add(owner, f"{field} {here} in the checkpoint, {there} now", "shape")
    if saved.vocabulary_size != wanted.vocabulary_size:
        sizes = (
            f"vocabulary_size {saved.vocabulary_size} in the checkpoint, "
            f"{wanted.vocabulary_size} now"
        )
        if saved.vocabulary_size > wanted.vocabulary_size:
            found.add(owner, sizes, "shape")
        elif is_abstract:
            found.add(owner, sizes, "abstract")
    if with_slots:
        _compare_slots(found, owner, saved, wanted, rules)


def _compare_slots(
    found: Differences,
    owner: str,
    saved: TableRecord,
    wanted: TableRecord,
    rules: RulesChoice,
) -> None:
    if saved.rule is None or wanted.rule is None:
        if saved.rule is not wanted.rule:
            texts = [
                "no optimizer" if t.rule is None else "an optimizer"
                for t in (saved, wanted)
            ]
            found.add(owner, f"{texts[0]} in the checkpoint, {texts[1]} now", "rule")
        return
    if rules == "check":
        for line in value_differences(saved.rule, wanted.rule):
            found.add(f"optimizer of {owner}", line, "rule")
    for name in sorted(saved.slots.keys() | wanted.slots.keys()):
        here, there = saved.slots.get(name), wanted.slots.get(name)
        if here is None:
            found.add(owner, f"slot {name!r} not in the checkpoint", "rule")
        elif there is None:
            found.add(owner, f"slot {name!r} only in the checkpoint", "rule")
        elif not _is_same_row(here, there):
            problem = f"slot {name!r} {here} in the checkpoint, {there} now"
            found.add(owner, problem, "rule")


def _is_same_row(here: Any, there: Any) -> bool:
    """Returns True if two arrays differ at most in their number of rows."""
    start = 0 if here.chunk_rows is None or there.chunk_rows is None else 1
    return (
        here.dtype == there.dtype
        and len(here.shape) == len(there.shape)
        and here.shape[start:] == there.shape[start:]
    )


def compare_shared_values(
    found: Differences,
    stack_tables: Sequence[str],
    values: Mapping[str, Any],
    slot: str,
) -> None:
    """Adds a difference if tables of one stack have different values of a count.

    Args:
      found: differences so far.
      stack_tables: tables of the stack in the state.
      values: table to value in the checkpoint.
      slot: name of the value.
    """
    first, *others = values.values()
    if any(not np.array_equal(first, other) for other in others):
        found.add(
            f"tables {sorted(stack_tables)}",
            f"they share {slot!r} now, and the checkpoint has "
            + ", ".join(f"{value} for {name!r}" for name, value in values.items()),
            "shared",
        )


def compare_with_staying(
    found: Differences,
    tables: Sequence[str],
    slot: NamedSlot,
    saved: tuple[str, Any],
) -> None:
    """Adds a difference if a count belongs to trained tables that are not restored.

    Args:
      found: differences so far.
      tables: tables of the stack that stay.
      slot: the count in the state. Tables that are not trained yet have none to lose.
      saved: table of the checkpoint, and its count.
    """
    if isinstance(slot.leaf, jax.ShapeDtypeStruct) or is_base_of_deltas(slot.name):
        return
    count = np.asarray(slot.leaf)
    if count.any() and not np.array_equal(count, saved[1]):
        found.add(
            f"tables {sorted(tables)}",
            f"they stay, with {slot.name!r} {count}, and share it with the restored "
            f"tables; the checkpoint has {saved[1]} for {saved[0]!r}",
            "shared",
        )


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


def value_differences(saved: Any, wanted: Any, path: str = "") -> list[str]:
    """Returns one line per value that differs between two nested dicts."""
    if not (isinstance(saved, dict) and isinstance(wanted, dict)):
        if saved == wanted:
            return []
        return [f"{path}: {saved!r} in the checkpoint, {wanted!r} now"]
    found = []
    for key in sorted(saved.keys() | wanted.keys()):
        key_path = f"{path}.{key}" if path else key
        if key not in saved:
            found.append(f"{key_path}: not in the checkpoint")
        elif key not in wanted:
            found.append(f"{key_path}: only in the checkpoint")
        else:
            found += value_differences(saved[key], wanted[key], key_path)
    return found


def is_abstract(leaves: Collection[Any]) -> bool:
    """Returns True if some leaves are shapes."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
