"""Imports tables from a source into a model, block by block.

`match_tables` pairs arrays by name and never guesses, because a slot variable with a
different name may mean something else, even if its shape fits. Names, shapes, types and
checksums are all checked before the model changes. docs/guides/importing.md shows how
to import.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.source import RowArray, TableSource, array_of
from tpu_embedding.checkpoint.records import CheckpointError, TableRecord
from tpu_embedding.checkpoint.saved_leaves import table_records, write_table_rows
from tpu_embedding.checkpoint.split_state import LayerState, SplitState
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
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
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
      origin: source format and path.
      tables: imported table names, mapped to names in the source.
      slots: for each imported table, a dict from slot names in the model to array names
        in the source.
      dropped: slot arrays in the source that were not imported, although their tables
        were. Either you passed no optimizer, or its rule has no such slots, or `rename`
        left them out.
      kept: model tables that kept their values, because the source lacks them or
        `tables` left them out.
      unused: source tables that were not imported.

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
            slots = [f"{own} of {array}" for own, array in self.slots[table].items()]
            lines.append(f"  {table} of {name}: {', '.join(['values', *slots])}")
        for heading, names in (
            ("Dropped slot variables:", self.dropped),
            ("Tables of the model that keep their values:", self.kept),
            ("Tables of the source that were not used:", self.unused),
        ):
            if names:
                lines += [heading, *(f"  {name}" for name in names)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedTable:
    """A table to import.

    Attributes:
      slot_names: slot names in the model, mapped to array names in the source.
      ids: uint64 ids for the rows. None for a static table.
    """

    source_name: str
    values: RowArray
    slot_names: Mapping[str, str]
    slots: Mapping[str, RowArray]
    ids: np.ndarray | None
    placed: PlacedIds | None = None


@moves_arrays
def import_tables(
    source: Any,
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    *,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    ids: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Imports a model's tables and slot variables from another library's files.

    Dense parameters and step counts don't change. Static tables are written in place,
    block by block, without a copy of a whole table. Optimizer state derived from table
    values, such as moving averages, is reset to match the new values. Note that numbers
    outside the range of a table's type become infinite, with a warning.

    Args:
      source: a `TableSource`, or anything that `open_tables` accepts.
      model: an `nnx.Module` with `TPUEmbedding` layers. It is updated in place.
      optimizer: the model's optimizer, updated in place. Needed to import slot
        variables and to reset derived state.
      tables: names of the model tables to import. Defaults to every table that the
        source has. If the model has several layers, the layer path precedes the name:
        `"user/movie"`.
      rename: maps names in the model to names in the source, where they differ. In the
        model, tables are named `"movie"`, and slot variables `"movie/accumulators"`.
        `print(source)` shows you the source's names. If you list slot variables of a
        table, only these slots are imported. Otherwise, the source must have either
        exactly the optimizer rule's slot variables or none.
      ids: maps a dynamic table's name to the ids `[rows]` of its source rows, as 64-bit
        integers or strings. The new ids replace all old ids and count as just used.

    Returns:
      A report of what was imported, dropped and kept.

    Raises:
      CheckpointError: if names, shapes or types don't fit, or the source is damaged.
        The message lists every mismatch, and the model is unchanged.
      ValueError: if the optimizer was not made for the model. Without an optimizer,
        also raised if the model's optimizer derives state from the imported tables.

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
        rule = f"be the model's, {sorted(layers)}"
        found = sorted(optimizer.slots.get_value())
        raise invalid("import_tables: the optimizer's layers", rule, found)
    state = SplitState((model,) if optimizer is None else (model, optimizer))
    options = {"tables": tables, "rename": rename or {}, "ids": ids or {}}
    imports, report = _match(source, state.layers, **options)
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
    ids: Mapping[str, Any] | None = None,
) -> tuple[dict[str, PackedRows], dict[str, Any], ImportReport]:
    """Imports tables and slot variables into the stacks of the functional API.

    Args:
      source: see `import_tables`.
      stacks: packed rows by stack name, from `init_tables`. They are donated.
      states: optimizer states by stack name, from `init_slots`, or an empty dict. They
        are donated.
      plan: plan that the stacks were made for.
      tables: see `import_tables`.
      rename: see `import_tables`.
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
    options = {"tables": tables, "rename": rename or {}, "ids": ids or {}}
    (imports,), report = _match(source, [layer], **options)
    new = _import_into_layer(layer, imports)
    return dict(new.tables), dict(new.slots or {}), report


def _match(
    source: Any, layers: Sequence[LayerState], **options: Any
) -> tuple[list[dict[str, MatchedTable]], ImportReport]:
    """Finds the tables to write into each layer, by their names in the layer's plan."""
    source = source if isinstance(source, TableSource) else open_tables(source)
    targets = {
        layer.name_of(table): record
        for layer in layers
        for table, record in table_records(layer).items()
    }
    matched = match_tables(source, targets, **options)
    # Whole arrays are verified now. If damage were found only after the first row was
    # written, the model would have changed.
    for table in matched.values():
        for array in (table.values, *table.slots.values()):
            array.check()
    imports = [_place_ids(layer, matched) for layer in layers]
    source_names = {name: table.source_name for name, table in matched.items()}
    slot_names = {name: table.slot_names for name, table in matched.items()}
    used = {name for slots in slot_names.values() for name in slots.values()}
    slots_of_tables = {
        f"{name}/{slot}"
        for name in source_names.values()
        for slot in (source.tables[name].slots if name in source.tables else ())
    }
    report = ImportReport(
        origin=source.origin,
        tables=source_names,
        slots=slot_names,
        dropped=tuple(sorted(slots_of_tables - used)),
        kept=tuple(sorted(targets.keys() - matched.keys())),
        unused=tuple(sorted(set(source.tables) - {*source_names.values(), *used})),
    )
    return imports, report


def _place_ids(
    layer: LayerState, matched: Mapping[str, MatchedTable]
) -> dict[str, MatchedTable]:
    """Selects the tables to write into a layer, with places for their ids."""
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
                    text = f"{placed.num_left_out} ids of table {name!r} don't fit, "
                    text += "because the 64 places of their buckets are full. Set the "
                    text += "capacity of te.Dynamic to at least 1.35 times the ids."
                    raise about(CheckpointError(text), "ids", placed.num_left_out)
                match = dataclasses.replace(match, placed=placed)
            imports[table.name] = match
    return imports


def _import_into_layer(
    layer: LayerState, imports: Mapping[str, MatchedTable]
) -> LayerState:
    """Writes the imported tables into a layer. The old arrays are donated."""
    plan, tables = layer.plan, dict(layer.tables)
    placed = {k: x.placed for k, x in imports.items() if x.placed is not None}
    not_finite = NotFinite()
    for stack in plan.stacks:
        matches = {x.name: imports[x.name] for x in stack.tables if x.name in imports}
        rows = {name: match.values for name, match in matches.items()}
        packed = tables[stack.name]
        tables[stack.name] = _write(packed, rows, stack, plan, placed, not_finite)
        if own_placed := {name: placed[name] for name in matches if name in placed}:
            directory = directory_name(stack.name)
            new = with_placed_ids(tables[directory], own_placed, stack, plan)
            tables[directory] = new
    # Derived state is reset first. Moving averages in the source then replace the reset
    # values below.
    states = restarted_slots(layer.slots or {}, tables, imports, plan)
    for stack in plan.trained_stacks:
        if stack.name not in states:
            continue
        matches = {x.name: imports[x.name] for x in stack.tables if x.name in imports}
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
    stack: StackPlan, slots: Iterable[str]
) -> dict[str, float | None]:
    """Probes the rule for initial slot values. None means that they differ by row."""
    names, probed = list(slots), probe_rule(stack.optimizer, stack.dim).slots
    # Wrappers, such as gradient accumulation, have slots that the rule doesn't know.
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
                return block  # Decoding and encoding again could change the codes.
            block = decode_int8(block)
        # Silences NumPy's warning, because `not_finite` reports overflow once for all
        # blocks.
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
    targets: Mapping[str, TableRecord],
    *,
    tables: Collection[str] | None,
    rename: Mapping[str, str],
    ids: Mapping[str, Any],
) -> dict[str, MatchedTable]:
    """Finds source arrays for the model's tables. One error lists all mismatches."""
    arrays = source.arrays
    own = [*targets]
    slots = [
        f"{table}/{key}"
        for table, target in targets.items()
        if rename.get(table, table) in arrays
        for key, slot in target.slots.items()
        if slot.has_rows
    ]
    given = {
        "tables": (tables or (), own),
        "rename": (rename, own + slots),
        "ids": (ids, own),
    }
    problems: list[ValueError] = [
        invalid(argument, f"name one of {known}", name)
        for argument, (named, known) in given.items()
        for name in named
        if name not in known
    ]
    matched: dict[str, MatchedTable] = {}
    for table, target in targets.items():
        name = rename.get(table, table)
        # Tables named in rename= must be in the source. Other tables may be missing.
        is_wanted = name in arrays or table in rename
        if not (is_wanted if tables is None else table in tables):
            continue
        try:
            if name not in arrays:
                line = f"Write rename={{{table!r}: 'array of the source'}}."
                field = f"table {table!r}: rename"
                raise invalid(field, "name an array", name, line, CheckpointError)
            values = arrays[name]
            _check_values(table, target, values)
            slot_names = _slot_names(table, target, name, source, rename)
            matched[table] = MatchedTable(
                source_name=name,
                values=values,
                slot_names=slot_names,
                slots={slot: arrays[array] for slot, array in slot_names.items()},
                ids=_ids(table, target, values, ids.get(table)),
            )
        except CheckpointError as error:
            problems.append(error)
    if not problems and not matched:
        line = "Write rename={'table of the model': 'array of the source'}."
        problems = [invalid("source", f"include {own}", [*arrays], line)]
    if problems:
        lines = "\n  ".join(map(str, problems))
        text = f"The tables do not fit the model:\n  {lines}\nThe source is {source}"
        first: Any = problems[0]
        raise about(CheckpointError(text), first.field, first.value)
    return matched


def _check_values(table: str, target: TableRecord, values: RowArray) -> None:
    shape = [*values.shape]
    wanted = [target.vocabulary_size, target.dim]
    # A dynamic table takes any row count. `_place_ids` raises if ids don't fit.
    if target.dynamic is not None:
        wanted = [*shape[:1], target.dim]
    if values.holds_int8_rows(target.dim):
        shape[-1] = target.dim
    elif not values.is_floating:
        field, dtype = f"table {table!r}: dtype", values.dtype.name
        raise invalid(field, "be floating", dtype, "Convert it.", CheckpointError)
    if shape != wanted:
        line = "Set TableConfig.vocabulary_size and dim, or import other rows."
        field = f"table {table!r}: shape"
        raise invalid(field, f"be {wanted}", shape, line, CheckpointError)


def _slot_names(
    table: str,
    target: TableRecord,
    name: str,
    source: TableSource,
    rename: Mapping[str, str],
) -> dict[str, str]:
    """Maps slot names in the model to array names in the source."""
    slots = {key: slot for key, slot in target.slots.items() if slot.has_rows}
    names = {x: rename[f"{table}/{x}"] for x in slots if f"{table}/{x}" in rename}
    theirs = source.tables[name].slots if name in source.tables else {}
    # Equal names are paired only if both sides have the same set of names. Momentum and
    # Adam, for example, both have `momenta`, but use them differently.
    if slots and theirs and not names:
        names = {x: f"{name}/{x}" for x in sorted({*slots, *theirs})}
    arrays, rows = source.arrays, source.arrays[name].shape[:1]
    shapes = {f"{table}/{k}": [*rows, *x.shape[1:]] for k, x in slots.items()}
    for slot, array_name in names.items():
        array, wanted = arrays.get(array_name), slots.get(slot)
        if wanted is not None and array is not None:
            # Floating slots may be rounded like tables, but integers, such as counts
            # per row, must keep their values.
            fits = array.is_floating
            if not jnp.issubdtype(jnp.dtype(wanted.dtype), jnp.floating):
                fits = np.can_cast(array.dtype, wanted.dtype)
            if fits and array.shape == (*rows, *wanted.shape[1:]):
                continue
        rule = f"be an array of the source and one of the model's {shapes}"
        line = "If arrays of the source have the same meaning, write "
        line += f"rename={dict.fromkeys(shapes, 'array of the source')}. "
        line += "To import the values alone, pass no optimizer."
        field = f"table {table!r}: slot {slot}"
        raise invalid(field, rule, array_name, line, CheckpointError)
    return names


def _ids(
    table: str, target: TableRecord, values: RowArray, given: Any
) -> np.ndarray | None:
    """Converts ids to uint64, or returns None for a static table."""
    field = f"table {table!r}: ids"
    if (given is None) != (target.dynamic is None):
        rule = "be one per row of a te.Dynamic table, and None for others"
        line = f"Pass ids={{{table!r}: array}} or set TableConfig.vocabulary_size."
        raise invalid(field, rule, given, line, CheckpointError)
    if given is None:
        return None
    array = given.to_numpy() if isinstance(given, Ids64) else np.asarray(given)
    if array.dtype.kind in "USO":
        array = fingerprint_ids(array)
    if array.dtype != np.uint64 and np.issubdtype(array.dtype, np.integer):
        # Negative ids keep their bits, as in lookups.
        array = array.astype(np.int64).view(np.uint64)
    if array.shape != values.shape[:1] or array.dtype != np.uint64:
        rule = f"have one integer or string for each of {values.shape[0]} rows"
        raise invalid(field, rule, array, "", CheckpointError)
    if (array == NO_ID_64).any() or len(np.unique(array)) < len(array):
        rule = "be distinct and not 2**64 - 1 (-1 if signed), which means 'no id'"
        raise invalid(field, rule, array, "Keep one row per id.", CheckpointError)
    return array
