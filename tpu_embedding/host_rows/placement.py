"""`te.HostRows`, and what it changes in a stack's plan."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import jax

from tpu_embedding.argument_checks import (
    Rule,
    broken_rules,
    convert_ints,
    int_rule,
    optional,
    raise_all,
    right_names,
)
from tpu_embedding.config import Placement
from tpu_embedding.host_rows.records import columns_of
from tpu_embedding.host_rows.stack import HostStack
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_storage import RowStorage

_RULES: Final = {
    "cache_rows": int_rule(1, fix="pass the number of rows that all devices cache"),
    "directory": optional(
        Rule(lambda x: isinstance(x, str | os.PathLike), "a path to a directory")
    ),
    "window": int_rule(1, 64, "pass the number of batches to read ahead"),
}


@right_names(cache_size="cache_rows", size="cache_rows")
@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows(Placement):
    """Placement that keeps all table rows in host memory, and caches some on devices.

    Use it if your tables don't fit in device memory. `te.host_rows` brings each batch's
    rows to the devices before the step, and evicts cached rows to make room. Row
    values, slot variables and activations are the same as with `te.Sharded()`. On CPU,
    they are equal bit for bit.

    Slot variables are stored with their rows. However, each table row still takes 4
    bytes on its device, for the map from rows to cache slots. On several hosts, each
    host keeps the rows that its devices own.

    Attributes:
      cache_rows: how many rows all devices cache together, rounded up to a multiple of
        the device count. The rows for three batches must fit. A cache that is a few
        times larger than this minimum already holds most rows of each batch.
      directory: path on each host's local disk for memory-mapped files, if your tables
        are larger than host memory. The files have no names, so several processes may
        share a directory. The files are freed at the end. If None, rows stay in memory.
      window: how many batches to read ahead, 1 to 64. Their cached rows are evicted
        last.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(
      ...     vocabulary_size=1000, dim=16, name="user",
      ...     placement=te.HostRows(cache_rows=100))
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> plan.stacks[0].num_rows
      1000
    """

    cache_rows: int
    directory: str | os.PathLike[str] | None = None
    window: int = 4

    def __post_init__(self):
        convert_ints(self, "cache_rows", "window")
        raise_all(broken_rules(self, _RULES))

    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Picks all mesh axes, because each row belongs to one device."""
        return mesh_axes

    @property
    def stacking_key(self) -> Any:
        """Directory and window, which a stack's tables share."""
        return HostRows, self._directory, self.window

    @property
    def _directory(self) -> str | None:
        return None if self.directory is None else os.fspath(self.directory)

    def store(self, stack: StackPlan, placements: Sequence[Placement]) -> StackPlan:
        """Plans a stack whose devices hold only the cached rows."""
        if problem := _problem(stack):
            raise ValueError(f"{problem} (table {stack.tables[0].name!r}).")
        on_host = [x for x in placements if isinstance(x, HostRows)]
        cache_rows = sum(placement.cache_rows for placement in on_host)
        slots_per_shard = -(-cache_rows // stack.num_shards)
        slots_per_shard = min(slots_per_shard, stack.rows_per_shard)
        return dataclasses.replace(
            stack,
            layout=dataclasses.replace(stack.layout, num_rows=slots_per_shard),
            storage=HostStorage(
                cache_rows=cache_rows,
                directory=self._directory,
                window=self.window,
                bytes_per_device=4 * stack.rows_per_shard,
            ),
            notes=(*stack.notes, _note(stack, cache_rows, self._directory)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStorage(RowStorage):
    """Storage with all rows on the host; see `HostRows`."""

    holds_all_rows: ClassVar[bool] = False

    cache_rows: int
    directory: str | None
    window: int

    def init_rows(
        self, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
    ) -> PackedRows:
        return HostStack(stack, plan).init_rows(key)

    def init_state(self, table: Any, stack: StackPlan, kept: Any = None) -> Any:
        return table.host.init_state(table, kept)


def _problem(stack: StackPlan) -> str | None:
    """Explains why a stack's rows can't be on the host, or returns None."""
    config, optimizer = stack.tables[0].config, stack.trained_by
    if not config.vocabulary.ids_are_rows:
        return (
            "te.HostRows needs a table whose ids are row numbers, because other ids "
            "get their rows only in the step; set TableConfig.vocabulary_size to an "
            "int, and hash ids with te.inputs.hash_ids"
        )
    if stack.backend.replaces_lookup or stack.backend.replaces_update:
        return (
            "te.HostRows works only with backend='xla', because other backends need "
            "all rows on their device; remove the backend argument"
        )
    if config.dtype_name == "int8":
        return (
            "te.HostRows does not support int8 rows; set TableConfig.dtype to "
            "float32 or bfloat16"
        )
    if optimizer is None:
        return None
    if optimizer.moves_every_row or optimizer.gradient_steps > 1:
        return (
            "te.HostRows needs an optimizer that updates only the batch's rows; "
            "remove te.optimizers.every_row"
        )
    # `fill_slots` writes the same initial record to all rows.
    slots = probe_rule(optimizer, config.dim).slots
    if any(slot.starts_from_rows for slot in slots):
        return (
            "te.HostRows cannot keep moving averages of all rows; remove the "
            "optimizer's use_ema, or te.optimizers.with_ema"
        )
    if any(slot.row.dtype.itemsize != 4 for slot in slots):
        return "te.HostRows needs an optimizer with 32-bit slot variables"
    return None


def _note(stack: StackPlan, cache_rows: int, directory: str | None) -> str:
    cache_rows = min(cache_rows, stack.num_rows)
    num_bytes = 4 * stack.num_rows * columns_of(stack)[-1].stop
    return (
        f"{stack.num_rows:,} rows in {directory or 'host memory'}, "
        f"{format_bytes(num_bytes)}; {cache_rows:,} of them "
        f"({cache_rows / stack.num_rows:.1%}) cached on the devices; the map of rows "
        f"takes {format_bytes(4 * stack.rows_per_shard)} per device"
    )
