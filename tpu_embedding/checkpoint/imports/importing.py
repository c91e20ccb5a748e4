"""Imports a source's tables into a model, block by block.

Tables are matched by name. Names, shapes, types and checksums are checked before the
model changes, and an error lists all mismatches. The report says what was imported,
dropped and kept.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
)
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.checkpoint.saved_leaves import slots_of, write_table_rows
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.config import TableConfig
from tpu_embedding.dynamic.directory import directory_name, dynamic_tables
from tpu_embedding.dynamic.ids_64 import Ids64
from tpu_embedding.dynamic.ids_on_host import PlacedIds, place_ids, with_placed_ids
from tpu_embedding.functional.derived_state import (
    check_has_slots,
    restarted_slots,
)
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row, file_rows_of_values
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.strings import fingerprint_ids
from tpu_embedding.tables.slot_values import slot_rows, with_slot_rows
from tpu_embedding.tables.table_values import NotFinite
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.types import NO_ID_64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The outcome of an import. `print` shows it.

    Attributes:
      origin: format and path of the source.
      tables: name of each imported table to its name in the source.
      slots: name of each imported table to a dict of its imported slots, from slot name
        in the model to slot name in the source.
      dropped: slots of the imported tables that were not imported, as `"table/slot"`.
        Either the optimizer's rule has different slots, or no optimizer was passed.
      kept: tables of the model that kept their values, because the source lacks them or
        `tables` left them out.
      unused: tables of the source that were not imported.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> pretrained = {"movie": np.ones((10, 4)), "city": np.ones((50, 4))}
      >>> report = te.checkpoint.import_tables(pretrained, layer)
      >>> report.tables, report.unused
      ({'movie': 'movie'}, ('city',))
    """

    origin: str
    tables: Mapping[str, str]
    slots: Mapping[str, Mapping[str, str]]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"Imported {len(self.tables)} tables from {self.origin}:"]
        for table, name in self.tables.items():
            slots = [f"{own} of {other}" for own, other in self.slots[table].items()]
            lines.append(f"  {table} of {name}: {', '.join(['values', *slots])}")
        for heading, names in (
            ("Dropped slot variables:", self.dropped),
            ("Tables of the model that keep their values:", self.kept),
            ("Tables of the source that were not used:", self.unused),
        ):
            if names:
                lines += [heading, *(f"  {name}" for name in names)]
        return "\n".join(lines)


ImportedSlots = Literal["same_rule"] | Mapping[str, str]
"""Slots to import: `"same_rule"`, or slot name in the model to name in the source."""

_SAME_SLOTS: Final[Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    ("accumulators",): (("accumulator",), ("momentum1",), ("0",)),
    ("accumulators", "linears"): (("accumulator", "linear"), ("0", "1")),
    ("accumulators", "momenta"): (("accumulator", "momentum"), ("0", "1")),
    ("momenta", "velocities"): (
        ("momentum", "velocity"),
        ("momentum1", "momentum2"),
        ("m", "v"),
        ("0", "1"),
    ),
}
"""Slot names of this library's rules to their names in other libraries. Numbers are
positions in slots that were saved as a plain tuple."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTable:
    """A table of the model that may be imported.

    Attributes:
      name: name of the table, as in `import_tables`.
      config: config of the table.
      slots: row shape and type of each slot variable by name. Empty without an
        optimizer.
    """

    name: str
    config: TableConfig
    slots: Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedTable:
    """A table to import.

    Attributes:
      source_name: name of the table in the source.
      source: the table of the source.
      slot_names: slot variables to import: name in the model to name in the source.
      ids: uint64 ids of a dynamic table's rows. None for a static table.
      placed: places of these ids in the model, once they are known.
    """

    source_name: str
    source: SourceTable
    slot_names: Mapping[str, str]
    ids: np.ndarray | None
    placed: PlacedIds | None = None

    @property
    def slots(self) -> dict[str, RowArray]:
        """Slot variables to import, by their names in the model."""
        return {own: self.source.slots[k] for own, k in self.slot_names.items()}

    @property
    def dropped(self) -> list[str]:
        """Slot variables of the source that are not imported, as `"table/slot"`."""
        used = self.slot_names.values()
        slots = [slot for slot in self.source.slots if slot not in used]
        return [f"{self.source_name}/{slot}" for slot in slots]


@moves_arrays
def import_tables(
    source: Any,
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    *,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    slots: ImportedSlots = "same_rule",
    ids: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Imports a model's tables and slot variables from another library's files.

    Dense parameters and step counts don't change. Static tables are written in place,
    block by block, without a copy of a whole table. Optimizer state derived from
    these tables' values, such as moving averages, is reset to match the new values.
    Numbers outside the range of a table's type become infinite, with a warning.

    Args:
      source: a `TableSource`, or anything that `open_tables` accepts.
      model: an `nnx.Module` with `TPUEmbedding` layers. It is updated in place.
      optimizer: the model's optimizer, updated in place. Needed to import slot
        variables and to reset derived state.
      tables: names of the model's tables to import. Defaults to every table that the
        source has. If the model has several layers, the layer's path precedes the name:
        `"user/movie"`.
      rename: name of a table in the model to its name in the source, where they differ.
      slots: `"same_rule"` imports a table's slot variables if the source has exactly
        the same slots as the optimizer's rule, under the names of any known library. A
        mapping from slot names in the model to names in the source imports only the
        slots that it lists.
      ids: name of a dynamic table in the model to the ids `[rows]` of the source's
        rows, as 64-bit integers or strings. Needed unless the source has ids. The new
        ids replace all ids of the table and count as just used.

    Returns:
      What was imported, dropped and kept.

    Raises:
      CheckpointError: if names, shapes or types do not fit, or the source is damaged.
        The message lists every mismatch, and the model is unchanged.
      ValueError: if the optimizer was not made for the model, or if none is passed
        although the model's optimizer derives state from the values of these tables.

    Example:
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0)
      ... )
      >>> pretrained = {"films": np.ones((10, 4), np.float32)}
      >>> print(import_tables(pretrained, layer, rename={"movie": "films"}))
      Imported 1 tables from arrays:
        movie of films: values
    """
    layers = set(embedding_layers(model))
    if optimizer is not None and set(optimizer.slots.get_value()) != layers:
        raise ValueError(
            "import_tables needs the optimizer that was made for the model, got a "
            f"model with layers {sorted(layers)} and an optimizer with layers "
            f"{sorted(optimizer.slots.get_value())}."
        )
    state = SplitState((model,) if optimizer is None else (model, optimizer))
    options = {"tables": tables, "rename": rename or {}, "slots": slots}
    imports, report = _match(source, state.layers, **options, ids=ids or {})
    if optimizer is None:
        line = "import_tables(source, model, optimizer)"
        for layer, tables_of_layer in zip(state.layers, imports, strict=True):
            names = layer.tables_with_derived_state & set(tables_of_layer)
            check_has_slots(names, line)
    pairs = zip(state.layers, imports, strict=True)
    state.rebuilt([_import_into_layer(*pair) for pair in pairs], {})
    return report


@moves_arrays
def import_into_stacks(
    source: Any,
    stacks: dict[str, PackedRows],
    states: dict[str, Any],
    plan: EmbeddingPlan,
    *,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    slots: ImportedSlots = "same_rule",
    ids: Mapping[str, Any] | None = None,
) -> tuple[dict[str, PackedRows], dict[str, Any], ImportReport]:
    """Imports tables and slot variables into the stacks of the functional API.

    Args:
      source: see `import_tables`.
      stacks: stack name to packed rows, from `init_tables`; donated.
      states: stack name to optimizer state, from `init_slots`, or an empty dict;
        donated.
      plan: plan of the stacks.
      tables: see `import_tables`.
      rename: see `import_tables`.
      slots: see `import_tables`.
      ids: see `import_tables`.

    Returns:
      The new stacks, the new states and the report.

    Raises:
      CheckpointError: see `import_tables`. The stacks are unchanged.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> stacks = te.functional.init_tables(plan, jax.random.key(0))
      >>> pretrained = {"movie": np.ones((10, 4), np.float32)}
      >>> stacks, _, report = import_into_stacks(pretrained, stacks, {}, plan)
      >>> float(te.functional.unstack_tables(stacks, plan)["movie"].mean())
      1.0
    """
    layer = LayerState(path="", plan=plan, tables=stacks, slots=states)
    options = {"tables": tables, "rename": rename or {}, "slots": slots}
    (imports,), report = _match(source, [layer], **options, ids=ids or {})
    new = _import_into_layer(layer, imports)
    return dict(new.tables), dict(new.slots or {}), report


def _match(
    source: Any, layers: Sequence[LayerState], **options: Any
) -> tuple[list[dict[str, MatchedTable]], ImportReport]:
    """Returns the tables to write into each layer, by name in its plan, and the report.

    Raises:
      CheckpointError: if the tables do not fit or the source is damaged.
    """
    source = source if isinstance(source, TableSource) else open_tables(source)
    targets = []
    for layer in layers:
        for stack in layer.plan.stacks:
            slots = {k: file_row(rows) for k, rows in _slot_rows(layer, stack).items()}
            targets += [
                TargetTable(name=layer.name_of(x.name), config=x.config, slots=slots)
                for x in stack.tables
            ]
    matched = match_tables(source, targets, **options)
    for table in matched.values():
        for array in (table.source.values, *table.slots.values()):
            array.check()
    imports = [_place_ids(layer, matched) for layer in layers]
    source_names = {name: table.source_name for name, table in matched.items()}
    report = ImportReport(
        origin=source.origin,
        tables=source_names,
        slots={name: table.slot_names for name, table in matched.items()},
        dropped=tuple(slot for table in matched.values() for slot in table.dropped),
        kept=tuple(sorted({target.name for target in targets} - set(matched))),
        unused=tuple(sorted(set(source.tables) - set(source_names.values()))),
    )
    return imports, report


def _slot_rows(layer: LayerState, stack: StackPlan) -> dict[str, PackedRows]:
    slots = slots_of(layer, stack)
    return {slot.name: slot.leaf for slot in slots if slot.kind == "rows"}


def _place_ids(
    layer: LayerState, matched: Mapping[str, MatchedTable]
) -> dict[str, MatchedTable]:
    """Returns the tables to write into a layer, with places for the rows' ids."""
    imports = {}
    for stack in layer.plan.stacks:
        members = {member.table.name: member for member in dynamic_tables(stack)}
        for table in stack.tables:
            name = layer.name_of(table.name)
            if (match := matched.get(name)) is None:
                continue
            if match.ids is not None:
                placed = place_ids(match.ids, members[table.name])
                if placed.num_left_out:
                    raise CheckpointError(
                        f"{placed.num_left_out} ids of table {name!r} don't fit, "
                        "because the 64 places of their buckets are full. Set the "
                        "capacity of te.Dynamic to at least 1.35 times the ids."
                    )
                match = dataclasses.replace(match, placed=placed)
            imports[table.name] = match
    return imports


def _import_into_layer(
    layer: LayerState, imports: Mapping[str, MatchedTable]
) -> LayerState:
    """Returns a layer with the imported tables. The old arrays are donated."""
    plan, tables = layer.plan, dict(layer.tables)
    placed = {k: x.placed for k, x in imports.items() if x.placed is not None}
    not_finite = NotFinite()
    for stack in plan.stacks:
        matches = {x.name: imports[x.name] for x in stack.tables if x.name in imports}
        rows = {name: match.source.values for name, match in matches.items()}
        packed = tables[stack.name]
        tables[stack.name] = _write(packed, rows, stack, plan, placed, not_finite)
        if own_placed := {name: placed[name] for name in matches if name in placed}:
            directory = directory_name(stack.name)
            new = with_placed_ids(tables[directory], own_placed, stack, plan)
            tables[directory] = new
    states = restarted_slots(layer.slots or {}, tables, imports, plan)
    for stack in plan.trained_stacks:
        if stack.name not in states:
            continue
        matches = {x.name: imports[x.name] for x in stack.tables if x.name in imports}
        # Slot variables of the source replace the reset ones.
        new_slots = slot_rows(states[stack.name], stack)
        initial_values = {}
        if matches.keys() & placed.keys():
            initial_values = _initial_slot_values(stack, new_slots)
        for slot, packed in new_slots.items():
            rows, fresh_rows = {}, {}
            for name, match in matches.items():
                if slot in match.slots:
                    rows[name] = match.slots[slot]
                elif name in placed and initial_values.get(slot) is not None:
                    # The rows have new ids, so slots that the source lacks are reset.
                    shape = (len(placed[name].sources), *file_row(packed).shape)
                    value = np.float32(initial_values[slot])
                    fresh_rows[name] = array_of(np.broadcast_to(value, shape))
            packed = _write(packed, fresh_rows, stack, plan, {}, not_finite)
            packed = _write(packed, rows, stack, plan, placed, not_finite)
            new_slots[slot] = packed
        states[stack.name] = with_slot_rows(states[stack.name], new_slots, stack)
    not_finite.warn()
    return dataclasses.replace(layer, tables=tables, slots=states)


def _initial_slot_values(
    stack: TrainedStackPlan, slots: Iterable[str]
) -> dict[str, float | None]:
    """Returns the initial value of each slot variable, or None if it isn't constant."""
    names, probed = list(slots), probe_rule(stack.optimizer, stack.dim).slots
    if len(names) != len(probed):
        return {}
    return {k: slot.initial_value for k, slot in zip(names, probed, strict=True)}


def _write(
    packed: PackedRows,
    rows: Mapping[str, RowArray],
    stack: StackPlan,
    plan: EmbeddingPlan,
    placed: Mapping[str, PlacedIds],
    not_finite: NotFinite,
) -> PackedRows:
    layout = packed.layout
    is_int8 = layout.narrow_dtype == "int8"

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        array = rows[table]
        block = array.read(start, num_rows)
        if array.holds_int8_rows(layout.dim):
            if is_int8:
                return block
            block = decode_int8(block)
        with np.errstate(over="ignore"):
            if is_int8:
                block = np.asarray(block, np.float32)
            stored = file_rows_of_values(block, packed)
        # Encoded int8 rows are always finite, so check their values before rounding.
        # Other types can overflow, so check them after rounding.
        numbers = block if is_int8 else stored
        not_finite.look_at(numbers, start, f"rows of table {table!r}")
        return stored

    num_rows = {table: array.shape[0] for table, array in rows.items()}
    return write_table_rows(packed, stack, plan, read, num_rows, placed)


def match_tables(
    source: TableSource,
    targets: Sequence[TargetTable],
    *,
    tables: Collection[str] | None,
    rename: Mapping[str, str],
    slots: ImportedSlots,
    ids: Mapping[str, Any],
) -> dict[str, MatchedTable]:
    """Returns the tables to import, by their names in the model.

    The options are explained in `import_tables`.

    Raises:
      CheckpointError: if tables do not fit. The message lists each mismatch with a
        fix.
    """
    own = [target.name for target in targets]
    names = _names(source, own, tables, rename, ids)
    matched: dict[str, MatchedTable] = {}
    problems: list[str] = []
    for target in targets:
        if (other := names.get(target.name)) is None:
            continue
        table = source.tables[other]
        try:
            slot_names = _slot_names(target, table, slots)
            _check_rows(target, table.values)
            ids_of_rows = _ids(target, table, ids.get(target.name))
        except CheckpointError as error:
            renamed = "" if other == target.name else f" from {other!r}"
            problems.append(f"table {target.name!r}{renamed}: {error}")
            continue
        matched[target.name] = MatchedTable(
            source_name=other, source=table, slot_names=slot_names, ids=ids_of_rows
        )
    if problems:
        raise CheckpointError(
            f"These tables of {source.origin} do not fit the model:\n  "
            + "\n  ".join(problems)
        )
    return matched


def _names(
    source: TableSource,
    own: Sequence[str],
    tables: Collection[str] | None,
    rename: Mapping[str, str],
    ids: Collection[str],
) -> dict[str, str]:
    """Returns the tables to import: name in the model to name in the source."""
    wanted = own if tables is None else tables
    given = {"tables": wanted, "rename": rename, "ids": ids}
    problems = [
        f"{argument} names {name!r}, but the model has the tables {sorted(own)}."
        for argument, named in given.items()
        for name in named
        if name not in own
    ]
    names = {name: rename.get(name, name) for name in own if name in wanted}
    if tables is None:
        names = {
            name: other
            for name, other in names.items()
            if name in rename or other in source.tables
        }
    problems += [
        f"table {name!r}: the source has no table {other!r}. Pass its name there as "
        f"rename={{{name!r}: ...}}, or leave the table out of tables=."
        for name, other in names.items()
        if other not in source.tables
    ]
    if not problems and not names:
        problems = [
            f"no table of the model, {sorted(own)}, is in the source; pass "
            "rename={name in the model: name in the source}."
        ]
    if problems:
        raise CheckpointError(
            f"Table names do not match {source.origin}, which has the tables "
            f"{sorted(source.tables)}:\n  " + "\n  ".join(problems)
        )
    return names


def _check_rows(target: TargetTable, values: RowArray) -> None:
    if len(values.shape) != 2:
        raise CheckpointError(f"the shape must be [rows, dim], got {values.shape}.")
    num_rows, dim = values.shape
    if values.holds_int8_rows(target.config.dim):
        dim = target.config.dim
    elif not values.is_floating:
        raise CheckpointError(
            f"the dtype must be floating, got {values.dtype}. Convert it first."
        )
    ids_are_rows = target.config.vocabulary.ids_are_rows
    size = target.config.max_rows if ids_are_rows else num_rows
    if (num_rows, dim) != (size, target.config.dim):
        raise CheckpointError(
            f"the source has {num_rows} rows of dim {dim}, the model {size} of dim "
            f"{target.config.dim}; set TableConfig.vocabulary_size and dim, import "
            "other rows, or leave the table out of tables=."
        )


def _ids(target: TargetTable, table: SourceTable, given: Any) -> np.ndarray | None:
    """Returns a dynamic table's ids as uint64, or None for a static table."""
    given = table.ids if given is None else given
    if (given is None) != target.config.vocabulary.ids_are_rows:
        raise CheckpointError(
            "a te.Dynamic table needs ids, and a static table takes none. Pass "
            f"ids={{{target.name!r}: array}}, or set TableConfig.vocabulary_size to "
            "te.Dynamic(capacity=...)."
        )
    if given is None:
        return None
    array = given.to_numpy() if isinstance(given, Ids64) else np.asarray(given)
    if array.dtype.kind in "USO":
        array = fingerprint_ids(array)
    if array.dtype != np.uint64 and np.issubdtype(array.dtype, np.integer):
        # Negative ids keep their bits.
        array = array.astype(np.int64).view(np.uint64)
    if array.shape != table.values.shape[:1] or array.dtype != np.uint64:
        raise CheckpointError(
            "ids must have one integer or string for each of the source's "
            f"{table.values.shape[0]} rows, got shape {array.shape} and dtype "
            f"{array.dtype}."
        )
    if (array == NO_ID_64).any() or len(np.unique(array)) < len(array):
        raise CheckpointError(
            "ids must be distinct and not 2**64 - 1 (-1 if signed), which means 'no "
            "id'. Keep one row per id."
        )
    return array


def _slot_names(
    target: TargetTable, table: SourceTable, slots: ImportedSlots
) -> dict[str, str]:
    """Returns the slots to import: name in the model to name in the source."""
    if slots == "same_rule":
        own = tuple(sorted(target.slots))
        for theirs in (own, *_SAME_SLOTS.get(own, ())):
            names = dict(zip(own, theirs, strict=True))
            fits = (_slot_fits(target, table, k, x) for k, x in names.items())
            if set(theirs) == set(table.slots) and all(fits):
                return names
        return {}
    names = dict(slots)
    for own, theirs in names.items():
        if not _slot_fits(target, table, own, theirs):
            shapes = [f"{k} {list(slot.shape)}" for k, slot in target.slots.items()]
            known = f"{', '.join(shapes)} per row" if shapes else "no slot variables"
            raise CheckpointError(
                f"slots={{{own!r}: {theirs!r}}} must map a slot of the table to a slot "
                f"of the same shape. The table has {known}, and the source has "
                f"{ ({k: str(x) for k, x in table.slots.items()}) }."
            )
    return names


def _slot_fits(target: TargetTable, table: SourceTable, own: str, theirs: str) -> bool:
    slot, array = target.slots.get(own), table.slots.get(theirs)
    if slot is None or array is None:
        return False
    fits = np.can_cast(array.dtype, slot.dtype)
    if jnp.issubdtype(slot.dtype, jnp.floating):
        fits = array.is_floating
    return fits and array.shape == (table.values.shape[0], *slot.shape)
