"""Reads orbax checkpoints of jax-tpu-embedding and keras-rs.

Both save stacks as they lie on SparseCores. jax-tpu-embedding saves a message beside
them that tells how. It lists tables by stack, in protobuf's text format::

    stacked_table_specs {
      stack_name: "a_b"
      num_sparsecores: 8
      table_specs { table_name: "b" row_offset_in_shard: 16 shard_rotation: 4 ... }
    }

keras-rs, and programs that save the arrays of jax-tpu-embedding by themselves, save no
such message. Their users have to say which tables a stack has, and on how many
SparseCores it was.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.orbax import LeafPath, arrays_of_item, find_items
from tpu_embedding.checkpoint.imports.rotation import (
    chosen_cores,
    divisors,
    rows_to_compare,
)
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    RuleSlots,
    SourceTable,
    TableSource,
)
from tpu_embedding.checkpoint.imports.sparse_core import (
    StackedTable,
    read_stacked,
    rows_in_shard,
    stack_in_order,
)
from tpu_embedding.config import TableConfig
from tpu_embedding.paths import local_path

_SPEC_FILE: Final = "proto.pbtxt"
_KERAS_TABLE: Final = re.compile(r"var:(.+):table")
_KERAS_SLOT: Final = re.compile(r"var:(.+):table:slot:(.+)")

RULES: Final = tuple(
    RuleSlots(rule=rule, names=dict(zip(own, theirs, strict=True)))
    for rule, own, by_name in (
        ("adagrad", ("accumulators",), ("accumulator",)),
        ("adagrad_momentum", ("accumulators", "momenta"), ("accumulator", "momentum")),
        ("adam", ("momenta", "velocities"), ("momentum", "velocity")),
        ("ftrl", ("accumulators", "linears"), ("accumulator", "linear")),
    )
    # Slot variables that were saved as a plain tuple have numbers.
    for theirs in (by_name, tuple(map(str, range(len(own)))))
)


def spec_file(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the message of jax-tpu-embedding in a checkpoint, or None."""
    steps = {item.parent for item in find_items(path).values()}
    files = [file for step in steps for file in step.glob(f"*/{_SPEC_FILE}")]
    return files[0] if len(files) == 1 else None


def tables_of_specs(path: pathlib.Path, file: pathlib.Path) -> TableSource:
    """Opens a checkpoint of jax-tpu-embedding.

    Args:
      path: directory of a CheckpointManager or of a step.
      file: the message, from `spec_file`.

    Raises:
      CheckpointError: if the checkpoint is damaged, or lacks a stack.
    """
    origin = f"jax-tpu-embedding checkpoint {file.parent.parent}"
    try:
        message = _parse_text(file.read_text())
        places = [
            _place(stack, table)
            for stack in message.get("stacked_table_specs", [])
            for table in stack["table_specs"]
        ]
    except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
    return _tables(places, _stacks(path), origin)


def open_stacked_tables(
    path: str | pathlib.Path,
    tables: Sequence[TableConfig],
    *,
    num_sparse_cores: int,
    sparse_cores_per_device: int | None = None,
    stacks: Mapping[str, Sequence[str]] | None = None,
) -> TableSource:
    """Opens stacked tables whose checkpoint does not say how they were stacked.

    Use it for orbax checkpoints of keras-rs, whose variables are `var:STACK:table`, and
    for those of jax-tpu-embedding without an `embedding_spec`.

    Args:
      path: directory of a CheckpointManager, whose latest step is read, of a step, or
        of an item.
      tables: configs of the tables; their names, rows and dims must be those that the
        checkpoint was trained with.
      num_sparse_cores: SparseCores of all devices that trained the checkpoint.
      sparse_cores_per_device: SparseCores of one device; 2 or 4, by generation. They
        decide which row is where, in all tables of a stack but the first. None: found
        from the padding rows of the stacks. A number that the padding contradicts is
        refused; where the padding cannot tell, `TableSource.assumed` says so.
      stacks: stack name to its tables in their order. None: stacks whose names are
        those of their tables, joined with `_`. Longer names than 50 characters were
        cut, so they must be given here.

    Returns:
      The tables; see `open_tables`.

    Raises:
      CheckpointError: if the checkpoint is damaged, or its stacks do not fit; or if
        `sparse_cores_per_device` is None, and nothing tells it.
    """
    found = _stacks(local_path(path))
    names = _names_in_order(found, tables, stacks or {}, path)
    if not names:
        raise CheckpointError(
            f"{path} has no stacked tables: no array 'var:STACK:table', and none "
            "'table' in a stack."
        )
    rotations = {
        cores: [
            place
            for stack_name, configs in names.items()
            for place in stack_in_order(
                stack_name,
                configs,
                num_sparse_cores=num_sparse_cores,
                sparse_cores_per_device=cores,
            )
        ]
        for cores in divisors(num_sparse_cores)
    }
    for stack_name in names:
        own = [place for place in rotations[1] if place.stack_name == stack_name]
        _check_size(stack_name, own, found[stack_name], num_sparse_cores, path)
    cores, is_told = chosen_cores(sparse_cores_per_device, rotations, found, path)
    source = _tables(rotations[cores], found, f"stacked checkpoint {path}")
    if is_told:
        return source
    assumed = {
        place.name: f"its row 0 is in SparseCore {place.rotation}, as "
        f"sparse_cores_per_device={cores} says; compare "
        f"{rows_to_compare(source.tables[place.name].values)}"
        for place in rotations[cores]
        if any(place not in places for places in rotations.values())
    }
    return dataclasses.replace(source, assumed=assumed)


def _names_in_order(
    found: Mapping[str, SourceTable],
    tables: Sequence[TableConfig],
    stacks: Mapping[str, Sequence[str]],
    path: Any,
) -> dict[str, list[TableConfig]]:
    """Returns the tables of each stack, in the order of their rows."""
    by_name = {table.name: table for table in tables if table.name}
    configs = {}
    for stack_name in found:
        names = stacks.get(stack_name) or _split(stack_name, list(by_name))
        if not names or any(name not in by_name for name in names):
            raise CheckpointError(
                f"The tables of stack {stack_name!r} of {path} are not known. Add them "
                f"to tables, which have {sorted(by_name)}, and give their names in "
                f"order by stacks={{{stack_name!r}: [...]}}."
            )
        configs[stack_name] = [by_name[name] for name in names]
    return configs


def has_keras_stacks(arrays: Mapping[LeafPath, RowArray]) -> bool:
    """Returns True if arrays are stacked variables of keras-rs."""
    return any(_KERAS_TABLE.fullmatch(path[-1]) for path in arrays)


def _stacks(path: pathlib.Path) -> dict[str, SourceTable]:
    """Returns the stacks of a checkpoint by name, with their slot variables."""
    tables: dict[str, RowArray] = {}
    slots: dict[str, dict[str, RowArray]] = {}
    for item in find_items(path).values():
        arrays = arrays_of_item(item)
        for leaf, array in arrays.items():
            if match := _KERAS_SLOT.fullmatch(leaf[-1]):
                slots.setdefault(match[1], {})[match[2]] = array
            elif match := _KERAS_TABLE.fullmatch(leaf[-1]):
                tables[match[1]] = array
            elif len(leaf) > 1 and leaf[-1] == "table" and len(array.shape) == 2:
                tables[leaf[-2]] = array
                slots[leaf[-2]] = {
                    other[-1]: slot
                    for other, slot in arrays.items()
                    if other[:-1] == (*leaf[:-1], "slot")
                }
    return {
        name: SourceTable(values=array, slots=slots.get(name, {}))
        for name, array in tables.items()
    }


def _tables(
    places: Sequence[StackedTable], stacks: Mapping[str, SourceTable], origin: str
) -> TableSource:
    """Takes the tables out of their stacks."""
    missing = sorted({p.stack_name for p in places} - set(stacks))
    if missing:
        raise CheckpointError(
            f"{origin} lacks the stacks {missing}; it has {sorted(stacks)}."
        )
    return TableSource(
        origin=origin,
        tables={
            place.name: SourceTable(
                values=read_stacked(stacks[place.stack_name].values, place, origin),
                slots={
                    name: read_stacked(slot, place, origin)
                    for name, slot in stacks[place.stack_name].slots.items()
                },
            )
            for place in places
        },
        rules=RULES,
    )


def _split(stack_name: str, names: list[str]) -> list[str]:
    """Returns the tables whose names, joined with `_`, are that of a stack.

    Returns nothing if there is no such order, or more than one.
    """
    found: list[list[str]] = []

    def extend(rest: str, chosen: list[str]) -> None:
        for name in names:
            if name in chosen or len(found) > 1:
                continue
            if rest == name:
                found.append([*chosen, name])
            elif rest.startswith(f"{name}_"):
                extend(rest[len(name) + 1 :], [*chosen, name])

    extend(stack_name, [])
    return found[0] if len(found) == 1 else []


def _check_size(
    stack_name: str,
    places: Sequence[StackedTable],
    stack: SourceTable,
    num_sparse_cores: int,
    path: Any,
) -> None:
    """Refuses a stack that has another number of rows than its tables take."""
    num_rows = num_sparse_cores * sum(
        rows_in_shard(place.vocabulary_size, num_sparse_cores) for place in places
    )
    if stack.values.shape[0] != num_rows:
        raise CheckpointError(
            f"Stack {stack_name!r} of {path} has {stack.values.shape[0]} rows, but its "
            f"tables {[place.name for place in places]} take {num_rows} on "
            f"{num_sparse_cores} SparseCores. Check num_sparse_cores, the order and "
            "the vocabulary sizes of the tables."
        )


def _place(stack: Mapping[str, Any], table: Mapping[str, Any]) -> StackedTable:
    def integer(message: Mapping[str, Any], name: str) -> int:
        return int(message.get(name, ["0"])[0])

    return StackedTable(
        name=table["table_name"][0],
        stack_name=stack["stack_name"][0],
        vocabulary_size=integer(table, "vocab_size"),
        dim=integer(table, "embedding_dim"),
        num_shards=integer(stack, "num_sparsecores"),
        row_offset=integer(table, "row_offset_in_shard"),
        rotation=integer(table, "shard_rotation"),
    )


_FIELD: Final = re.compile(
    r"""\s*(?:(?P<end>\})|(?P<name>[^\s{}:"]+)\s*(?:
    (?P<begin>:?\s*\{)|:\s*(?:"(?P<string>(?:[^"\\]|\\.)*)"|(?P<value>[^\s{}:"]+))))""",
    re.VERBOSE,
)
"""The end of a message, or a field with its value, or with the begin of a message."""


def _parse_text(text: str) -> dict[str, list[Any]]:
    """Returns the fields of a message in protobuf's text format, by name.

    Raises:
      ValueError: if it is no such message.
    """
    text = text.rstrip()
    messages: list[dict[str, list[Any]]] = [{}]
    position = 0
    while position < len(text):
        field = _FIELD.match(text, position)
        if field is None or (field["end"] and len(messages) == 1):
            raise ValueError(f"expected a field at position {position}")
        position = field.end()
        if field["end"]:
            messages.pop()
            continue
        value: Any = field["value"]
        if field["begin"]:
            value = {}
        elif field["string"] is not None:
            value = _unescaped(field["string"])
        messages[-1].setdefault(field["name"], []).append(value)
        if field["begin"]:
            messages.append(value)
    if len(messages) > 1:
        raise ValueError("a message does not end")
    return messages[0]


def _unescaped(text: str) -> str:
    """Returns a string without escapes, which stand for bytes of UTF-8."""
    return text.encode().decode("unicode_escape").encode("latin1").decode()
