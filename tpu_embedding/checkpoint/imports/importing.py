"""Imports the tables of a source into a model, block by block.

Everything is checked before the model changes: names, shapes, types and checksums.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from tpu_embedding.checkpoint.dynamic_tables import write_table_rows
from tpu_embedding.checkpoint.imports.match import (
    ImportedSlots,
    ImportReport,
    MatchedTable,
    TargetTable,
    match_tables,
)
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.source import RowArray, TableSource, array_of
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.checkpoint.saved_leaves import slots_of
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.dynamic.directory import directory_name, dynamic_tables
from tpu_embedding.dynamic.ids_on_host import PlacedIds, place_ids, with_placed_ids
from tpu_embedding.functional.following_slots import (
    check_no_followers,
    with_following_slots,
)
from tpu_embedding.nn.optimizer import Optimizer
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row, file_rows_of_values
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.slot_values import slot_rows, with_slot_rows
from tpu_embedding.tables.table_values import NotFinite


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
    """Replaces tables and slot variables of a model with the ones of a foreign source.

    Dense parameters and step counts stay as they are. The present tables are written
    in place, block by block: a table is never in host memory as a whole. State that an
    optimizer made from table values, such as moving averages, follows the new values.

    Args:
      source: a `TableSource`, or what `open_tables` opens.
      model: an `nnx.Module` that owns `TPUEmbedding` layers; it changes in place.
      optimizer: the model's, to import slot variables, and to let state follow the
        new values; it changes in place.
      tables: names of the model's tables to import. Defaults to all that the source
        has. In a model of several layers, names are `"path of the layer/table"`.
      rename: name of a table of the model to its name in the source, where they differ.
      slots: `"same_rule"` imports the slot variables of tables if the source has the
        ones of the optimizer's rule, under the names of any library, and no more.
        A mapping of slot names here to names in the source imports these; `{}` imports
        none.
      ids: name of a dynamic table of the model to the ids of the source's rows:
        integers of 64 bits or strings, `[rows]`. A source that has ids itself needs
        none. The table then has these ids only, and all count as just used.

    Returns:
      What was imported, dropped and kept.

    Raises:
      CheckpointError: if names, shapes or types do not fit, with every mismatch; or if
        the source is damaged. The model has not changed then. Numbers beyond the range
        of a table's type become infinite, with a warning.
      ValueError: if the optimizer is missing, and one has made state from the values of
        these tables.

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
            "import_tables needs the optimizer that was made for the model, got layers "
            f"{sorted(layers)} of the model and {sorted(optimizer.slots.get_value())} "
            "of the optimizer."
        )
    state = SplitState((model,) if optimizer is None else (model, optimizer))
    options = {"tables": tables, "rename": rename or {}, "slots": slots}
    imports, report = _match(source, state.layers, **options, ids=ids or {})
    if optimizer is None:
        line = "import_tables(source, model, optimizer)"
        for layer, tables_of_layer in zip(state.layers, imports, strict=True):
            check_no_followers(layer.followed_tables & set(tables_of_layer), line)
    pairs = zip(state.layers, imports, strict=True)
    state.rebuilt([_import_into_layer(*pair) for pair in pairs], {})
    return report


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
    """Replaces tables and slot variables of stacks with a foreign source's.

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
      The new stacks and states, and the report.

    Raises:
      ValueError: see `import_tables`; the stacks have not changed then.

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
    """Returns what to write into each layer, by the names in its plan, and the report.

    Args:
      source: see `import_tables`.
      layers: layers of the model.
      **options: of `match_tables`.

    Raises:
      CheckpointError: if anything is wrong with them.
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
    """Returns the slot variables of a stack by name; none without its optimizer."""
    slots = slots_of(layer, stack)
    return {slot.name: slot.leaf for slot in slots if slot.kind == "rows"}


def _place_ids(
    layer: LayerState, matched: Mapping[str, MatchedTable]
) -> dict[str, MatchedTable]:
    """Returns the tables to write into a layer, with places for the ids of rows."""
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
                        f"{placed.num_left_out} ids of table {name!r} find no place, "
                        "because the 64 places of their buckets are full. Give "
                        "te.Dynamic a larger capacity, 1.35 times the ids or more."
                    )
                match = dataclasses.replace(match, placed=placed)
            imports[table.name] = match
    return imports


def _import_into_layer(
    layer: LayerState, imports: Mapping[str, MatchedTable]
) -> LayerState:
    """Returns a layer with the imported tables; donates the old ones."""
    plan, tables = layer.plan, dict(layer.tables)
    placed = {k: x.placed for k, x in imports.items() if x.placed is not None}
    not_finite = NotFinite()
    for stack in plan.stacks:
        names = [table.name for table in stack.tables if table.name in imports]
        rows = {name: imports[name].source.values for name in names}
        packed = tables[stack.name]
        tables[stack.name] = _write(packed, rows, stack, plan, placed, not_finite)
        if own_placed := {name: placed[name] for name in names if name in placed}:
            directory = directory_name(stack.name)
            new = with_placed_ids(tables[directory], own_placed, stack, plan)
            tables[directory] = new
    num_rows = {name: match.source.values.shape[0] for name, match in imports.items()}
    num_rows |= {name: len(ids.sources) for name, ids in placed.items()}
    states = with_following_slots(layer.slots or {}, tables, num_rows, plan)
    for stack in plan.trained_stacks:
        if stack.name not in states:
            continue
        # Slot variables of the source replace the ones that follow the tables.
        new_slots = slot_rows(states[stack.name], stack)
        initial_values = _initial_slot_values(stack, new_slots)
        for slot, packed in new_slots.items():
            rows, fresh_rows = {}, {}
            for name in [table.name for table in stack.tables if table.name in imports]:
                match = imports[name]
                if slot in match.slots:
                    rows[name] = match.slots[slot]
                elif name in placed and initial_values.get(slot) is not None:
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
    """Returns the number that each slot variable starts from, where there is one."""
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
    """Returns packed rows with the rows of some tables replaced, in place."""
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
        # Bytes of int8 rows are always finite, so their numbers are looked at before
        # they are rounded. Other types are looked at after, as they can overflow.
        numbers = block if is_int8 else stored
        not_finite.look_at(numbers, start, f"rows of table {table!r}")
        return stored

    num_rows = {table: array.shape[0] for table, array in rows.items()}
    return write_table_rows(packed, stack, plan, read, num_rows, placed)
