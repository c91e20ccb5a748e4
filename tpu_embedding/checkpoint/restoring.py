"""Restores a state from a checkpoint, under any plan."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import jax
import orbax.checkpoint as ocp
from etils import epath

from tpu_embedding.checkpoint.arrays import ArrayFile
from tpu_embedding.checkpoint.dense_leaves import restored_leaves
from tpu_embedding.checkpoint.differences import (
    DenseChoice,
    Differences,
    RulesChoice,
    SlotsChoice,
    compare_dense,
    compare_shared_values,
    compare_table,
    compare_with_staying,
    is_abstract,
)
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.format import (
    DENSE,
    ORBAX_FILE,
    TABLES,
    CheckpointRecord,
    array_name,
    check_files,
    describe,
    state_directory,
)
from tpu_embedding.checkpoint.state_parts import LayerState, StateParts
from tpu_embedding.checkpoint.table_arrays import (
    restored_layer,
    slots_of,
    table_records,
)
from tpu_embedding.functional import init_slots
from tpu_embedding.optimizers.rules.touched_rows import without_base
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.slot_values import slot_values, with_slot_values


@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """The state to restore: an argument for `CheckpointManager.restore`.

    Attributes:
      state: as in `te.restore`, and so are all others.
      plan: of its tables.
      tables: names of the tables to restore; None: all.
      rename: name of a table to its name in the checkpoint.
      slots: where slot variables come from.
      rules: whether to compare optimizers.
      dense: where other leaves come from.
    """

    state: Any
    plan: EmbeddingPlan | None = None
    tables: Collection[str] | None = None
    rename: Mapping[str, str] | None = None
    slots: SlotsChoice = "restore"
    rules: RulesChoice = "check"
    dense: DenseChoice = "restore"

    def __post_init__(self):
        _check_choice("slots", self.slots, SlotsChoice)
        _check_choice("rules", self.rules, RulesChoice)
        _check_choice("dense", self.dense, DenseChoice)
        for field in ("tables", "rename"):
            if isinstance(getattr(self, field), str):
                raise TypeError(
                    f"{field} must hold names of tables, got the string "
                    f"{getattr(self, field)!r}."
                )

    def is_wanted(self, name: str) -> bool:
        """Returns True if a table of the state is to be restored."""
        return self.tables is None or name in self.tables

    def saved_name(self, name: str) -> str:
        """Returns the name that a table of the state has in the checkpoint."""
        return (self.rename or {}).get(name, name)

    def with_slots(self, layer: LayerState) -> bool:
        """Returns True if slot variables of a layer are to be read."""
        return self.slots == "restore" and layer.slots is not None


def restore_state(directory: str | os.PathLike[str], args: RestoreState) -> Any:
    """Restores a state; see `te.restore`.

    Args:
      directory: from `te.save`, or of one step of a `CheckpointManager`.
      args: the state, and the args.
    """
    root, record = state_directory(directory), describe(directory)
    parts = StateParts(args.state, args.plan)
    _check_names(args, parts.layers)
    _compare(root, record, parts, args)
    _check_all_files(root, record, parts.layers, args)
    dense = {}
    if args.dense == "restore":
        dense = restored_leaves(root / DENSE, parts.dense, _sharding(parts.layers))
    layers = [_restored(layer, root, record, args) for layer in parts.layers]
    return parts.rebuilt(layers, dense)


def _sharding(layers: Sequence[LayerState]) -> jax.sharding.Sharding:
    """Returns the sharding of leaves that name none: copies on the layers' mesh."""
    if layers:
        return layers[0].plan.replicated
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _check_choice(name: str, value: Any, choice: Any) -> None:
    if value not in get_args(choice):
        raise ValueError(f"{name} must be one of {get_args(choice)}, got {value!r}.")


def _check_names(args: RestoreState, layers: Sequence[LayerState]) -> None:
    """Refuses tables= and rename= that name no tables of the state."""
    names = _table_names(layers)
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{field} must name tables of the state, {names}, got {unknown}."
            )


def _table_names(layers: Sequence[LayerState]) -> list[str]:
    return sorted(
        layer.name_of(table.name)
        for layer in layers
        for stack in layer.plan.stacks
        for table in stack.tables
    )


def _compare(
    root: epath.Path, record: CheckpointRecord, parts: StateParts, args: RestoreState
) -> None:
    """Raises CheckpointError with all differences, if there are any."""
    found = Differences()
    wanted = [name for name in _table_names(parts.layers) if args.is_wanted(name)]
    for name in wanted:
        saved_name = args.saved_name(name)
        if saved_name not in record.tables:
            renamed = "" if saved_name == name else f" as {saved_name!r}"
            found.add(f"table {name!r}", f"not in the checkpoint{renamed}", "missing")
    if args.tables is None:
        used = {args.saved_name(name) for name in wanted}
        for name in sorted(record.tables.keys() - used):
            found.add(f"table {name!r}", "only in the checkpoint", "extra")
    for layer in parts.layers:
        _compare_layer(found, layer, record, args)
    if args.dense == "restore":
        compare_dense(found, record.dense, parts.dense)
    if not found:
        for layer in parts.layers:
            _compare_counts(found, root, layer, record, args)
    if found:
        raise CheckpointError(f"The checkpoint {root} does not fit the state:{found}")


def _compare_layer(
    found: Differences, layer: LayerState, record: CheckpointRecord, args: RestoreState
) -> None:
    with_slots = args.with_slots(layer)
    for name, of_table in table_records(layer).items():
        saved = record.tables.get(args.saved_name(name))
        if saved is not None and args.is_wanted(name):
            compare_table(
                *(found, name, saved, of_table),
                is_abstract=is_abstract(jax.tree.leaves(layer.tables)),
                with_slots=with_slots,
                rules=args.rules,
            )


def _compare_counts(
    found: Differences,
    root: epath.Path,
    layer: LayerState,
    record: CheckpointRecord,
    args: RestoreState,
) -> None:
    """Compares what tables of a stack share now, as their counts of steps."""
    if args.slots != "restore":
        return
    for stack in layer.plan.stacks:
        names = _saved_names(layer, args)
        names = {t.name: names[t.name] for t in stack.tables if t.name in names}
        for slot in slots_of(layer, stack):
            if not names or slot.kind not in ("shared", "hyperparameter"):
                continue
            values = {}
            for name in names.values():
                array = record.tables[name].slots[slot.name]
                file = ArrayFile(root / TABLES, array_name(name, slot.name), array)
                values[name] = file.read()
            compare_shared_values(found, list(names), values, slot.name)
            if len(names) < len(stack.tables) and slot.kind == "shared":
                stay = [t.name for t in stack.tables if t.name not in names]
                compare_with_staying(found, stay, slot, next(iter(values.items())))


def _saved_names(layer: LayerState, args: RestoreState) -> dict[str, str]:
    """Returns table of the layer to its name in the files, for those to restore."""
    names = {
        table.name: layer.name_of(table.name)
        for stack in layer.plan.stacks
        for table in stack.tables
    }
    return {
        table: args.saved_name(name)
        for table, name in names.items()
        if args.is_wanted(name)
    }


def _check_all_files(
    root: epath.Path,
    record: CheckpointRecord,
    layers: Sequence[LayerState],
    args: RestoreState,
) -> None:
    """Checks the files that will be read, before any array of the state changes."""
    wanted = [f"{TABLES}/{ORBAX_FILE}"]
    for layer in layers:
        with_slots = args.with_slots(layer)
        for name in _saved_names(layer, args).values():
            slots = record.tables[name].slots if with_slots else ()
            wanted += [f"{TABLES}/{array_name(name, slot)}/" for slot in (None, *slots)]
    if args.dense == "restore":
        wanted.append(f"{DENSE}/")
    check_files(root, lambda file: file.startswith(tuple(wanted)))


def _restored(
    layer: LayerState, root: epath.Path, record: CheckpointRecord, args: RestoreState
) -> LayerState:
    names = _saved_names(layer, args)
    new = restored_layer(
        *(layer, root / TABLES, record.tables, names),
        with_slots=args.slots == "restore",
    )
    if new.slots is None or args.slots == "restore":
        return new
    # Initial slot variables may depend on the tables.
    fresh = init_slots(dict(new.tables), new.plan)
    trained = {t.name for s in new.plan.trained_stacks for t in s.tables}
    if trained <= set(names):
        return dataclasses.replace(new, slots=fresh)
    return dataclasses.replace(new, slots=_initialized(new, fresh, set(names)))


def _initialized(
    layer: LayerState, fresh: Mapping[str, Any], tables: Collection[str]
) -> dict[str, Any]:
    """Returns slots in which those of some tables have their initial values.

    Counts of a stack of which some tables stay are those of the tables that stay.
    """
    slots = dict(layer.slots or {})
    for stack in layer.plan.trained_stacks:
        own = {t.name for t in stack.tables} & set(tables)
        if not own:
            continue
        if len(own) == len(stack.tables):
            slots[stack.name] = fresh[stack.name]
            continue
        counts = {s.name for s in slots_of(layer, stack) if s.kind == "shared"}
        values = slot_values({stack.name: fresh[stack.name]}, layer.plan, "all")
        new = {
            table: {k: v for k, v in values[table].items() if k not in counts}
            for table in own
        }
        slots |= with_slot_values({stack.name: slots[stack.name]}, new, layer.plan)
        slots[stack.name] = without_base(slots[stack.name])
    return slots
