"""Imports the tables of a source into a model, block by block.

Everything is checked before the model changes: names, shapes, types and checksums.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from tpu_embedding.checkpoint.dynamic_tables import rows_of_sources
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
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
from tpu_embedding.dynamic.directory import directory_name, dynamic_tables
from tpu_embedding.dynamic.ids_on_host import place_ids, with_placed_ids
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
from tpu_embedding.tables.row_stream import write_blocks
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
    """Replaces tables and slot variables of a model by those of a foreign source.

    Dense parameters and step counts stay as they are. The present tables are written
    in place; block by block, a table never is in host memory as a whole. State that an
    optimizer derived from the values of these tables, such as moving averages, restarts
    from the new values.

    Args:
      source: a `TableSource`, or what `open_tables` opens.
      model: an `nnx.Module` that owns `TPUEmbedding` layers; it changes in place.
      optimizer: the model's, to import slot variables, and to restart derived state
        from the new values; it changes in place.
      tables: names of the model's tables to import; None: all that the source has. In
        a model of several layers, names are `"path of the layer/table"`.
      rename: name of a table of the model to its name in the source, where they differ.
      slots: `"same_rule"` imports the slot variables of tables if the source has those
        of the optimizer's rule, under the names of any library, and no others.
        A mapping of slot names here to those of the source imports these; `{}` imports
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
      ValueError: if the optimizer is missing, and one has derived state from the values
        of these tables.

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
    parts = SplitState((model,) if optimizer is None else (model, optimizer))
    options = {"tables": tables, "rename": rename or {}, "slots": slots}
    matched, report = _match(source, parts.layers, **options, ids=ids or {})
    if optimizer is None:
        line = "import_tables(source, model, optimizer)"
        for layer in parts.layers:
            names = layer.tables_with_derived_state & set(_of_layer(matched, layer))
            check_has_slots(names, line)
    parts.rebuilt([_written(layer, matched) for layer in parts.layers], {})
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
    """Replaces tables and slot variables of stacks by those of a foreign source.

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
    matched, report = _match(source, [layer], **options, ids=ids or {})
    new = _written(layer, matched)
    return dict(new.tables), dict(new.slots or {}), report


def _match(
    source: Any, layers: Sequence[LayerState], **options: Any
) -> tuple[dict[str, MatchedTable], ImportReport]:
    """Returns what to write into each table, and the report.

    Args:
      source: see `import_tables`.
      layers: layers of the model.
      **options: of `match_tables`.

    Raises:
      CheckpointError: if anything is wrong with them.
    """
    source = source if isinstance(source, TableSource) else open_tables(source)
    targets = [table for layer in layers for table in _targets(layer)]
    matched = match_tables(source, targets, **options)
    for table in matched.values():
        for array in (table.values, *table.slots.values()):
            array.check()
    imports = {k: x for layer in layers for k, x in _placed(layer, matched).items()}
    names = {name: table.source for name, table in matched.items()}
    report = ImportReport(
        origin=source.origin,
        tables=names,
        slots={name: table.slot_names for name, table in matched.items()},
        dropped=tuple(slot for table in matched.values() for slot in table.dropped),
        kept=tuple(sorted({target.name for target in targets} - set(names))),
        unused=tuple(sorted(set(source.tables) - set(names.values()))),
    )
    return imports, report


def _of_layer(
    imports: Mapping[str, MatchedTable], layer: LayerState
) -> dict[str, MatchedTable]:
    """Returns the tables of a layer, by their names in its plan."""
    return {k: imports[full] for k, full in layer.names.items() if full in imports}


def _slots_of(layer: LayerState, stack: StackPlan) -> dict[str, PackedRows]:
    """Returns the slot variables of a stack; none without its optimizer."""
    states = layer.slots or {}
    if not isinstance(stack, TrainedStackPlan) or stack.name not in states:
        return {}
    return slot_rows(states[stack.name], stack)


def _targets(layer: LayerState) -> Iterator[TargetTable]:
    """Yields the tables of a layer, by their names in the model."""
    for stack in layer.plan.stacks:
        slots = {k: file_row(packed) for k, packed in _slots_of(layer, stack).items()}
        for table in stack.tables:
            name = layer.name_of(table.name)
            yield TargetTable(name=name, config=table.config, slots=slots)


def _placed(
    layer: LayerState, matched: Mapping[str, MatchedTable]
) -> dict[str, MatchedTable]:
    """Returns the matched tables of a layer, with rows in their order here."""
    imports = {}
    for stack in layer.plan.stacks:
        members = {x.table.name: x for x in dynamic_tables(stack)}
        for table in stack.tables:
            name = layer.name_of(table.name)
            if (match := matched.get(name)) is None:
                continue
            if match.ids is None:
                imports[name] = match
                continue
            placed = place_ids(match.ids, members[table.name])
            if placed.num_left_out:
                raise CheckpointError(
                    f"{placed.num_left_out} ids of table {name!r} find no place, "
                    "because the 64 places of their buckets are full. Give "
                    "te.Dynamic a larger capacity, 1.35 times the ids or more."
                )
            gathered = {
                own: _gathered(array, placed.sources)
                for own, array in match.slots.items()
            }
            imports[name] = dataclasses.replace(
                match,
                values=_gathered(match.values, placed.sources),
                slots=_new_slots(layer, stack, len(placed.sources)) | gathered,
                placed=placed,
            )
    return imports


def _new_slots(
    layer: LayerState, stack: StackPlan, num_rows: int
) -> dict[str, RowArray]:
    """Returns slot variables of a dynamic table as new, where they are known."""
    found = _slots_of(layer, stack)
    if not isinstance(stack, TrainedStackPlan) or not found:
        return {}
    slots = probe_rule(stack.optimizer, stack.dim).slots
    if len(slots) != len(found):
        return {}
    return {
        name: array_of(
            np.broadcast_to(
                np.float32(slot.initial_value), (num_rows, *file_row(packed).shape)
            )
        )
        for (name, packed), slot in zip(found.items(), slots, strict=True)
        if slot.initial_value is not None
    }


def _written(layer: LayerState, matched: Mapping[str, MatchedTable]) -> LayerState:
    """Returns a layer with the imported tables; donates the old ones."""
    imports, plan = _of_layer(matched, layer), layer.plan
    not_finite = NotFinite()
    stacks = dict(layer.tables)
    for stack in plan.stacks:
        rows = _rows_of(stack, None, imports)
        if rows:
            packed = stacks[stack.name]
            stacks[stack.name] = _write(packed, rows, stack, plan, not_finite)
        placed = {k: ids for k in rows if (ids := imports[k].placed) is not None}
        if placed:
            name = directory_name(stack.name)
            stacks[name] = with_placed_ids(stacks[name], placed, stack, plan)
    states = restarted_slots(layer.slots or {}, stacks, imports, plan)
    for stack in plan.trained_stacks:
        if stack.name in states:
            # Slot variables of the source replace those that restarted.
            new = slot_rows(states[stack.name], stack)
            for slot, packed in new.items():
                if rows := _rows_of(stack, slot, imports):
                    new[slot] = _write(packed, rows, stack, plan, not_finite)
            states[stack.name] = with_slot_rows(states[stack.name], new, stack)
    not_finite.warn()
    return dataclasses.replace(layer, tables=stacks, slots=states)


def _rows_of(
    stack: StackPlan, slot: str | None, imports: Mapping[str, MatchedTable]
) -> dict[str, RowArray]:
    """Returns the rows to import into a stack, or into one of its slot variables."""
    names = [table.name for table in stack.tables if table.name in imports]
    if slot is None:
        return {name: imports[name].values for name in names}
    slots = {name: imports[name].slots for name in names}
    return {name: found[slot] for name, found in slots.items() if slot in found}


def _gathered(array: RowArray, sources: np.ndarray) -> RowArray:
    """Returns rows in another order; the whole array is on the host once one is read.

    Args:
      array: rows of the source.
      sources: row of the source for each row of the result; -1: zeros.
    """
    whole = functools.cache(lambda: array.read(0, array.shape[0]))

    def read(start: int, num_rows: int) -> np.ndarray:
        return rows_of_sources(whole(), sources[start : start + num_rows])

    return RowArray((len(sources), *array.shape[1:]), array.dtype, read)


def _write(
    packed: PackedRows,
    rows: Mapping[str, RowArray],
    stack: StackPlan,
    plan: EmbeddingPlan,
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
        seen = block if is_int8 else stored
        not_finite.look_at(seen, start, f"rows of table {table!r}")
        return stored

    ranges = {table: (0, array.shape[0]) for table, array in rows.items()}
    return write_blocks(packed, stack, plan, read, ranges)
