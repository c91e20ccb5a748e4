"""Restores a state from a checkpoint, under any plan."""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import jax
import orbax.checkpoint as ocp
from etils import epath

from tpu_embedding.checkpoint.dense_leaves import restored_leaves
from tpu_embedding.checkpoint.differences import (
    DenseChoice,
    Differences,
    DtypesChoice,
    RulesChoice,
    SlotsChoice,
    compare_dense,
    compare_shared_values,
    compare_table,
    compare_with_staying,
    is_abstract,
    saved_slots,
)
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.format import (
    DENSE,
    ORBAX_FILE,
    TABLES,
    CheckpointRecord,
    check_files,
    describe,
    one_save,
)
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.checkpoint.table_arrays import (
    SavedTables,
    restored_slots,
    restored_tables,
    saved_steps,
    slots_of,
    table_records,
)
from tpu_embedding.functional.following_slots import with_measured_totals
from tpu_embedding.functional.steps import init_slots
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tables.slot_values import slot_values, with_slot_values


@dataclasses.dataclass
class RestoreState(ocp.args.CheckpointArgs):
    """The state to restore: an argument for `CheckpointManager.restore`.

    Attributes:
      state: see `te.restore`, which explains all attributes.
      plan: the tables' plan.
      tables: names of the tables to restore; None: all.
      rename: name of a table to its name in the checkpoint.
      slots: where slot variables come from.
      rules: whether to compare optimizers.
      dense: where other leaves come from.
      dtypes: whether to convert rows to other types.
    """

    state: Any
    plan: EmbeddingPlan | None = None
    tables: Collection[str] | None = None
    rename: Mapping[str, str] | None = None
    slots: SlotsChoice = "restore"
    rules: RulesChoice = "check"
    dense: DenseChoice = "restore"
    dtypes: DtypesChoice = "check"

    def __post_init__(self):
        for field, choices in (
            ("slots", get_args(SlotsChoice)),
            ("rules", get_args(RulesChoice)),
            ("dense", get_args(DenseChoice)),
            ("dtypes", get_args(DtypesChoice)),
        ):
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"{field} must be one of {choices}, got {value!r}.")
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
    with one_save(directory) as root:
        record = describe(root)
        parts = SplitState(args.state, args.plan)
        _check_names(args, parts.layers)
        pairs = [
            (layer, _saved_tables(layer, root, record, args)) for layer in parts.layers
        ]
        for layer, saved in pairs:
            _check_followers(layer, saved)
        _compare(root, record, pairs, parts.dense, args)
        _check_all_files(root, pairs, args)
        dense = {}
        if args.dense == "restore":
            dense = restored_leaves(root / DENSE, parts.dense, _sharding(parts.layers))
        layers = [_restored(layer, saved, args) for layer, saved in pairs]
    return parts.rebuilt(layers, dense)


_Pairs = Sequence[tuple[LayerState, SavedTables]]
"""Each layer, with what it takes over from the files."""


def _check_followers(layer: LayerState, saved: SavedTables) -> None:
    """Refuses tables alone, if an optimizer has made state from their values."""
    if layer.slots is None:
        for each in layer.followed_tables:
            each.check_without_optimizer(
                saved.names, "te.restore(directory, (model, optimizer))"
            )


def _sharding(layers: Sequence[LayerState]) -> jax.sharding.Sharding:
    """Returns the sharding of leaves that name none: copies on the layers' mesh."""
    if layers:
        return layers[0].plan.replicated
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _check_names(args: RestoreState, layers: Sequence[LayerState]) -> None:
    """Refuses tables= and rename= that name no tables of the state."""
    names = sorted(name for layer in layers for name in layer.names.values())
    for field in ("tables", "rename"):
        given = getattr(args, field) or ()
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"{field} must name tables of the state, {names}, got {unknown}."
            )


def _compare(
    root: epath.Path,
    record: CheckpointRecord,
    pairs: _Pairs,
    dense: Mapping[str, Any],
    args: RestoreState,
) -> None:
    """Raises CheckpointError with all differences, if there are any."""
    found = Differences()
    names = {
        layer.name_of(table): saved_name
        for layer, saved in pairs
        for table, saved_name in saved.names.items()
    }
    for name, saved_name in sorted(names.items()):
        if saved_name not in record.tables:
            renamed = "" if saved_name == name else f" as {saved_name!r}"
            found.add(f"table {name!r}", f"not in the checkpoint{renamed}", "missing")
    if args.tables is None:
        for name in sorted(record.tables.keys() - set(names.values())):
            found.add(f"table {name!r}", "only in the checkpoint", "extra")
    for layer, saved in pairs:
        _compare_layer(found, layer, saved, args)
    if args.dense == "restore":
        compare_dense(found, record.dense, dense)
    if not found:
        for layer, saved in pairs:
            _compare_counts(found, layer, saved)
    if found:
        raise CheckpointError(f"The checkpoint {root} does not fit the state:{found}")


def _compare_layer(
    found: Differences, layer: LayerState, saved: SavedTables, args: RestoreState
) -> None:
    wanted = table_records(layer)
    for table, saved_name in saved.names.items():
        name = layer.name_of(table)
        if saved_name in saved.records:
            compare_table(
                *(found, name, saved.records[saved_name], wanted[name]),
                is_abstract=is_abstract(jax.tree.leaves(layer.tables)),
                with_slots=args.with_slots(layer),
                rules=args.rules,
                dtypes=args.dtypes,
            )


def _compare_counts(found: Differences, layer: LayerState, saved: SavedTables) -> None:
    """Compares what tables of a stack share now, such as hyper-parameters.

    Their counts may differ, and what follows from these, such as the learning rate of a
    schedule: `restored_slots` takes those of the table with the most steps.
    """
    for stack in layer.plan.stacks:
        steps = saved_steps(layer, stack, saved)
        for slot in slots_of(layer, stack):
            files = saved.open(stack, slot.name)
            if not files or slot.kind not in ("shared", "hyperparameter"):
                continue
            # The table with the most steps comes first.
            order = sorted(files, key=lambda x: steps.get(x, ()), reverse=True)
            values = {saved.names[table]: files[table].read() for table in order}
            if len(set(steps.values())) <= 1:
                compare_shared_values(found, list(files), values, slot.name)
            if len(files) < len(stack.tables) and slot.kind == "shared":
                stay = [t.name for t in stack.tables if t.name not in files]
                compare_with_staying(found, stay, slot, next(iter(values.items())))


def _check_all_files(root: epath.Path, pairs: _Pairs, args: RestoreState) -> None:
    """Checks the files that will be read, before any array of the state changes."""
    arrays = [name for _, saved in pairs for name in saved.array_names()]
    wanted = (f"{TABLES}/{ORBAX_FILE}", *(f"{TABLES}/{name}/" for name in arrays))
    if args.dense == "restore":
        wanted += (f"{DENSE}/",)
    check_files(root, lambda file: file.startswith(wanted))


def _restored(layer: LayerState, saved: SavedTables, args: RestoreState) -> LayerState:
    new = restored_tables(layer, saved)
    if new.slots is None:
        return new
    if args.slots == "initialize" or saved.lacks_slots(layer):
        new = dataclasses.replace(new, slots=_initialized(new, saved.names))
    if args.slots != "restore":
        return new
    new = restored_slots(new, saved)
    # The tables may hold other rows than the saved ones, or round them otherwise.
    slots = with_measured_totals(
        new.slots or {}, dict(new.tables), saved.names, new.plan
    )
    return dataclasses.replace(new, slots=slots)


def _saved_tables(
    layer: LayerState, root: epath.Path, record: CheckpointRecord, args: RestoreState
) -> SavedTables:
    """Returns the tables and slot variables that a layer takes over."""
    names = {
        table: args.saved_name(name)
        for table, name in layer.names.items()
        if args.is_wanted(name)
    }
    slots = {}
    if args.with_slots(layer):
        wanted = table_records(layer)
        slots = {
            table: saved_slots(record.tables[name], wanted[layer.name_of(table)])
            for table, name in names.items()
            if name in record.tables
        }
    return SavedTables(root / TABLES, record.tables, names, slots)


def _initialized(layer: LayerState, tables: Collection[str]) -> dict[str, Any]:
    """Returns slots in which those of some tables have their initial values.

    All tables share one step count. If some tables stay, it is theirs.
    """
    # Initial slot variables may depend on the tables.
    fresh = init_slots(dict(layer.tables), layer.plan)
    trained = {t.name for s in layer.plan.trained_stacks for t in s.tables}
    if trained <= set(tables) or is_abstract(jax.tree.leaves(layer.slots)):
        return fresh
    slots = dict(layer.slots or {})
    for stack in layer.plan.trained_stacks:
        own = {t.name for t in stack.tables} & set(tables)
        if not own:
            continue
        counts = {s.name for s in slots_of(layer, stack) if s.kind == "shared"}
        values = slot_values({stack.name: fresh[stack.name]}, layer.plan, "all")
        new = {
            table: {k: v for k, v in values[table].items() if k not in counts}
            for table in own
        }
        slots |= with_slot_values({stack.name: slots[stack.name]}, new, layer.plan)
    return slots
