"""Imports the tables of a source into a model, block by block.

Everything is checked before the model changes: names, shapes, types, checksums and the
range of narrow types.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.argument_checks import takes
from tpu_embedding.checkpoint.dynamic_tables import restored_directory
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.match import (
    ImportedRows,
    ImportedSlots,
    ImportOptions,
    MatchedTable,
    TargetTable,
    match_tables,
)
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.placed_rows import place_table
from tpu_embedding.checkpoint.imports.report import ImportReport
from tpu_embedding.checkpoint.imports.slot_names import rule_of
from tpu_embedding.checkpoint.imports.source import RowArray, TableSource
from tpu_embedding.checkpoint.split_state import LayerState
from tpu_embedding.checkpoint.table_arrays import initial_row_values
from tpu_embedding.functional.following_slots import with_following_slots
from tpu_embedding.nn.training import MODEL, Optimizer, embedding_layers
from tpu_embedding.plan.dynamic_rows import dynamic_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.file_rows import decode_int8, file_row, file_rows_of_values
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import rows_per_block, write_blocks
from tpu_embedding.tables.slot_values import named_slots, slot_rows, with_slot_rows
from tpu_embedding.tables.table_values import NotFinite, check_range


@takes("te.checkpoint.", model=MODEL)
def import_tables(
    source: Any,
    model: nnx.Module,
    optimizer: Optimizer | None = None,
    *,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    slots: ImportedSlots = "same_rule",
    rows: ImportedRows = "equal",
    ids: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Replaces tables and slot variables of a model by those of a foreign source.

    Dense parameters and step counts stay as they are. The present tables are written
    in place; block by block, a table never is in host memory as a whole. State that an
    optimizer made from table values, such as moving averages, follows the new values.

    Args:
      source: a `TableSource`, or what `open_tables` opens.
      model: an `nnx.Module` that owns `TPUEmbedding` layers; it changes in place.
      optimizer: the model's, to import slot variables, and to let state follow the
        new values; it changes in place.
      tables: names of the model's tables to import; None: all that the source has. In
        a model of several layers, names are `"path of the layer/table"`.
      rename: name of a table of the model to its name in the source, where they differ.
      slots: `"same_rule"` imports the slot variables of tables whose optimizer is of
        the rule that the source's slot variables belong to. `"none"` imports none. A
        mapping of slot names here to those of the source imports these.
      rows: `"equal"` refuses tables of another number of rows. `"shared"` imports the
        rows that both have, from the first one on; further rows keep their values.
        Of a dynamic table, `"equal"` refuses ids that find no place, because their
        bucket is full. `"shared"` leaves out the least valuable ids of such buckets.
      ids: name of a dynamic table of the model to the ids of the source's rows:
        integers of 64 bits or strings, `[rows]`. A source that has ids itself needs
        none. The table then has these ids only.

    Returns:
      What was imported, dropped and kept.

    Raises:
      CheckpointError: if names, shapes or types do not fit, with every mismatch; or if
        the source is damaged. The model has not changed then.
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
    layers = embedding_layers(model)
    if not layers:
        raise ValueError(
            "import_tables needs a model with TPUEmbedding layers; for stacks without "
            "layers call import_into_stacks."
        )
    states: Mapping[str, Any] = {} if optimizer is None else optimizer.slots.get_value()
    if optimizer is not None and set(states) != set(layers):
        raise ValueError(
            "import_tables needs the optimizer that was made for the model, got layers "
            f"{sorted(layers)} of the model and {sorted(states)} of the optimizer."
        )
    targets = {
        path: _ModelStacks(layer.plan, layer.tables.get_value(), states.get(path, {}))
        for path, layer in layers.items()
    }
    options = ImportOptions(
        tables=tables, rename=rename, slots=slots, rows=rows, ids=ids
    )
    matched, report = _match(source, targets, options)
    if optimizer is None:
        line = "import_tables(source, model, optimizer)"
        for path, layer in layers.items():
            layer.followed_tables.check_without_optimizer(matched[path], line)
    new_states = {}
    for path, layer in layers.items():
        new_tables, new_states[path] = targets[path].write(matched[path])
        layer.tables.set_value(new_tables)
    if optimizer is not None:
        optimizer.slots.set_value(new_states)
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
    rows: ImportedRows = "equal",
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
      rows: see `import_tables`.
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
    target = _ModelStacks(plan, stacks, states)
    options = ImportOptions(
        tables=tables, rename=rename, slots=slots, rows=rows, ids=ids
    )
    matched, report = _match(source, {"": target}, options)
    return *target.write(matched[""]), report


_Matched = Mapping[str, MatchedTable]
"""Name of a table of one plan to its match."""

_RowsToWrite = Mapping[str, tuple[RowArray, int]]
"""Table name to the rows of a source and their number."""


def _match(
    source: Any, targets: Mapping[str, "_ModelStacks"], options: ImportOptions
) -> tuple[dict[str, _Matched], ImportReport]:
    """Returns the tables to import, by the layer's path and their names in the layer.

    Raises:
      CheckpointError: if anything is wrong with them.
    """
    source = source if isinstance(source, TableSource) else open_tables(source)
    prefixes = {path: f"{path}/" if len(targets) > 1 else "" for path in targets}
    found, report = match_tables(
        source,
        [
            target
            for path, stacks in targets.items()
            for target in stacks.tables(prefixes[path])
        ],
        options,
    )
    for table in found.values():
        for array in (table.values, *table.slots.values()):
            array.check()
    matched: dict[str, _Matched] = {
        path: {
            table.name: found[prefixes[path] + table.name]
            for stack in stacks.plan.stacks
            for table in stack.tables
            if prefixes[path] + table.name in found
        }
        for path, stacks in targets.items()
    }
    matched = {path: targets[path].placed(of) for path, of in matched.items()}
    left_out = {
        prefixes[path] + name: table
        for path, of_layer in matched.items()
        for name, table in of_layer.items()
        if table.num_left_out
    }
    if left_out and options.rows == "equal":
        raise CheckpointError(
            f"These ids of {source.origin} find no place in the model, because the 64 "
            "places of their buckets are full:\n  "
            + "\n  ".join(
                f"table {name!r}: {table.num_left_out} of {table.num_ids} ids; give "
                "te.Dynamic a larger capacity, 1.35 times the ids or more, or pass "
                "rows='shared' to keep the most valuable ids of each bucket."
                for name, table in left_out.items()
            )
        )
    counts = {name: table.num_left_out for name, table in left_out.items()}
    report = dataclasses.replace(report, without_place=counts)
    for path, stacks in targets.items():
        stacks.check(matched[path])
    return matched, report


@dataclasses.dataclass(frozen=True)
class _ModelStacks:
    """Stacks of one plan, and their optimizer states, into which tables are imported.

    Attributes:
      plan: gives the place of each table in the stacks.
      stacks: stack name to packed rows; directories of ids, too.
      states: stack name to optimizer state; empty without an optimizer.
    """

    plan: EmbeddingPlan
    stacks: Mapping[str, Any]
    states: Mapping[str, Any]

    def tables(self, prefix: str) -> Iterator[TargetTable]:
        """Yields the tables, with a prefix before their names."""
        for stack in self.plan.stacks:
            state = self.states.get(stack.name)
            slots, reason = None, "the table has no optimizer"
            if isinstance(stack, TrainedStackPlan):
                reason = "no optimizer was given"
                if state is not None:
                    slots = {
                        name: file_row(packed)
                        for name, packed in slot_rows(state, stack).items()
                    }
            for table in stack.tables:
                yield TargetTable(
                    name=prefix + table.name,
                    vocabulary_size=table.config.max_rows,
                    dim=table.config.dim,
                    slots=slots,
                    rule=rule_of(state),
                    no_slots_because=reason,
                    is_dynamic=stack.is_dynamic,
                )

    def placed(self, matched: _Matched) -> _Matched:
        """Returns the tables with the places of the ids of dynamic ones."""
        result = dict(matched)
        for stack in self.plan.stacks:
            for i, member in enumerate(dynamic_tables(stack)):
                name = member.table.name
                if name in matched:
                    directory = self.stacks[directory_name(stack.name)]
                    result[name] = place_table(
                        matched[name],
                        member,
                        # Equal on all shards.
                        clock=int(_of_a_shard(directory.clock)[0]),
                        init_key=_of_a_shard(directory.init_keys)[i],
                        new_slots=self._new_slots(stack),
                    )
        return result

    def _new_slots(self, stack: StackPlan) -> dict[str, tuple[tuple[int, ...], float]]:
        """Returns row shape and initial value of slot variables that have one."""
        if not isinstance(stack, TrainedStackPlan) or stack.name not in self.states:
            return {}
        slots = list(named_slots(self.states[stack.name], stack))
        values = initial_row_values(stack, slots)
        return {
            slot.name: (file_row(slot.leaf).shape, value)
            for slot in slots
            if (value := values.get(slot.name)) is not None
        }

    def check(self, matched: _Matched) -> None:
        """Refuses numbers beyond the range of the type that will hold them."""
        for stack, slot, packed in self._arrays():
            name = "values" if slot is None else f"values of slot {slot!r}"
            _check_ranges(packed, _rows_of(stack, slot, matched), name)

    def write(self, matched: _Matched) -> tuple[dict[str, PackedRows], dict[str, Any]]:
        """Returns the stacks and states with the imported tables; donates the old."""
        not_finite = NotFinite()

        def written(stack, slot, packed):
            rows = _rows_of(stack, slot, matched)
            name = "values" if slot is None else f"values of slot {slot!r}"

            def look(table: str, start: int, block: np.ndarray) -> None:
                not_finite.look_at(block, start, f"{name} of table {table!r}")

            return _write(packed, rows, stack, self.plan, look) if rows else packed

        stacks = dict(self.stacks)
        for stack, slot, packed in self._arrays():
            if slot is None:
                stacks[stack.name] = written(stack, slot, packed)
        stacks |= self._directories(matched)
        num_rows = {name: table.num_rows for name, table in matched.items()}
        states = with_following_slots(self.states, stacks, num_rows, self.plan)
        # Slot variables of the source replace those that follow the tables.
        slots: dict[str, dict[str, PackedRows]] = {name: {} for name in states}
        for stack, slot, packed in dataclasses.replace(self, states=states)._arrays():
            if slot is not None:
                slots[stack.name][slot] = written(stack, slot, packed)
        for stack in self.plan.trained_stacks:
            if stack.name in states:
                state = with_slot_rows(states[stack.name], slots[stack.name], stack)
                states[stack.name] = state
        not_finite.warn()
        return stacks, states

    def _directories(self, matched: _Matched) -> dict[str, Any]:
        """Returns the new directories of stacks of dynamic tables."""
        layer = LayerState(path="", plan=self.plan, tables=self.stacks, slots=None)
        result = {}
        for stack in self.plan.stacks:
            placed = {
                table.name: ids
                for table in stack.tables
                if table.name in matched and (ids := matched[table.name].placed)
            }
            if placed:
                name = directory_name(stack.name)
                result[name] = restored_directory(layer, stack, placed)
        return result

    def _arrays(self) -> Iterator[tuple[StackPlan, str | None, PackedRows]]:
        """Yields the tables of each stack, and its slot variables by name."""
        for stack in self.plan.stacks:
            if stack.name in self.stacks:
                yield stack, None, self.stacks[stack.name]
            if isinstance(stack, TrainedStackPlan) and stack.name in self.states:
                for slot, packed in slot_rows(self.states[stack.name], stack).items():
                    yield stack, slot, packed


def _rows_of(stack: StackPlan, slot: str | None, matched: _Matched) -> _RowsToWrite:
    """Returns the rows to import into a stack, or into one of its slot variables."""
    rows = {}
    for table in stack.tables:
        match = matched.get(table.name)
        if match and slot is None:
            rows[table.name] = match.values, match.num_rows
        elif match and slot is not None and slot in match.slots:
            rows[table.name] = match.slots[slot], match.num_rows
    return rows


def _of_a_shard(array: Any) -> np.ndarray:
    """Returns the part of an array that lies on one device of this process."""
    return np.asarray(array.addressable_shards[0].data)


def _check_ranges(packed: PackedRows, rows: _RowsToWrite, name: str) -> None:
    """Refuses numbers that the rows' type cannot hold, reading the rows in blocks."""
    dtype = packed.layout.narrow_dtype or packed.lines_dtype.name
    for table, (array, num_rows) in rows.items():
        if not _may_overflow(array, dtype):
            continue
        size = rows_per_block(array.dtype.itemsize * int(np.prod(array.shape[1:])))
        for start in range(0, num_rows, size):
            block = array.read(start, min(size, num_rows - start))
            if array.holds_int8_rows(packed.layout.dim):
                block = decode_int8(block)
            check_range(block, start, dtype, f"{name} of table {table!r}")


def _may_overflow(array: RowArray, dtype: str) -> bool:
    """Returns True if an array may hold numbers that another type lacks."""
    if array.dtype == np.uint8:  # Codes, with scale and bias in float32.
        return dtype in ("bfloat16", "float16")
    if dtype == "int8":
        return True
    if not array.is_floating:
        return False
    return bool(jnp.finfo(array.dtype).max > jnp.finfo(dtype).max)


def _write(
    packed: PackedRows,
    rows: _RowsToWrite,
    stack: StackPlan,
    plan: EmbeddingPlan,
    look: Callable[[str, int, np.ndarray], None],
) -> PackedRows:
    """Returns packed rows with the rows of some tables replaced, in place.

    It shows each block that it reads to `look(table, start, rows)`.
    """
    layout, dtype = packed.layout, packed.lines_dtype

    def read(table: str, start: int, num_rows: int) -> np.ndarray:
        array = rows[table][0]
        block = array.read(start, num_rows)
        if array.holds_int8_rows(layout.dim):
            if layout.narrow_dtype == "int8":
                return block
            block = decode_int8(block)
        look(table, start, block)
        if layout.narrow_dtype is None:
            return np.asarray(block, dtype)
        return file_rows_of_values(block, layout)

    ranges = {table: (0, num_rows) for table, (_, num_rows) in rows.items()}
    return write_blocks(packed, stack, plan, read, ranges)
