"""The placement that keeps the rows of a table in host memory."""

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

import jax

from tpu_embedding.argument_checks import (
    Rule,
    broken_rules,
    convert_ints,
    int_rule,
    optional,
    raise_all,
)
from tpu_embedding.config import Placement
from tpu_embedding.host_rows.cached_rows import layout_of_cache
from tpu_embedding.host_rows.initial import columns_of
from tpu_embedding.host_rows.stack import HostStack
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout
from tpu_embedding.rows.row_storage import RowStorage

if TYPE_CHECKING:
    from tpu_embedding.plan.backend import Backend
    from tpu_embedding.plan.make_plan import NamedTable
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TrainedStackPlan

_RULES: Final = {
    "cache_rows": int_rule(1, fix="give the rows that all devices cache together"),
    "directory": optional(
        Rule(lambda x: isinstance(x, str | os.PathLike), "a path of a directory")
    ),
    "window": int_rule(1, 64, "give the batches that are read ahead"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostRows(Placement):
    """Keeps all rows of a table in host memory, and caches some on the devices.

    For tables larger than the devices' memory. `te.host_rows` brings the rows of each
    batch to the devices before the step, and takes others back. Values, slot variables
    and activations are the same, bit for bit on CPU, as with `te.Sharded()`.

    Slot variables are with their rows. Each row also takes 4 bytes on its device, for
    its slot in the cache. Only one process can use such tables.

    Attributes:
      cache_rows: rows that all devices cache together. It must hold the rows of three
        batches; a few times as many make most lookups hit. Rounded up to a multiple of
        the devices.
      directory: a directory for a file of the table, which is mapped, for tables larger
        than the host's memory. The file is scratch space, and is removed at the end.
        None keeps the rows in memory.
      window: batches that are read ahead, 1 to 64. Their rows stay in the cache.

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
        """Returns all axes: each row belongs to one device."""
        return mesh_axes

    def storage(self, num_rows: int) -> RowStorage:
        """Returns the storage of a table."""
        directory = None if self.directory is None else os.fspath(self.directory)
        return HostStorage(
            cache_rows=self.cache_rows, directory=directory, window=self.window
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostStorage(RowStorage):
    """The host holds all rows of a stack, and devices cache some; see `HostRows`."""

    holds_all_rows: ClassVar[bool] = False

    cache_rows: int
    directory: str | None
    window: int

    @property
    def stacking_key(self) -> Any:
        """Tables of a stack share files and the window."""
        return self.directory, self.window

    def joined(self, other: RowStorage) -> RowStorage:
        """Returns the storage of all these rows."""
        assert isinstance(other, HostStorage)
        return dataclasses.replace(self, cache_rows=self.cache_rows + other.cache_rows)

    def problem(self, table: "NamedTable", backend: "Backend") -> str | None:
        """Returns the setting that contradicts rows on the host."""
        vocabulary, optimizer = table.config.vocabulary, table.optimizer
        if jax.process_count() > 1:
            return (
                "te.HostRows needs a job of one process, got "
                f"{jax.process_count()} processes; use te.Sharded()"
            )
        if not vocabulary.ids_are_rows:
            return (
                "te.HostRows needs a table whose ids are row numbers; give "
                "TableConfig.vocabulary_size as an int, and hash ids by "
                "te.inputs.hash_ids"
            )
        if backend.replaces_lookup or backend.replaces_update:
            return (
                "te.HostRows needs backend='xla', which finds rows by their numbers; "
                "leave backend out"
            )
        if table.config.dtype_name == "int8":
            return (
                "te.HostRows needs rows of float32 or bfloat16; set TableConfig.dtype"
            )
        if optimizer is None:
            return None
        if optimizer.moves_every_row or optimizer.gradient_steps > 1:
            return (
                "te.HostRows needs an optimizer that moves the rows of a batch only; "
                "leave out te.optimizers.every_row"
            )
        slots = probe_rule(optimizer, table.config.dim).slots
        if any(slot.starts_from_rows for slot in slots):
            return (
                "te.HostRows cannot keep moving averages of all rows; leave out "
                "use_ema of the optimizer, or te.optimizers.with_ema"
            )
        if any(slot.row.dtype.itemsize != 4 for slot in slots):
            return "te.HostRows needs slot variables of 32 bits"
        return None

    def device_layout(self, layout: RowLayout) -> RowLayout:
        """Returns the layout of the cache of a shard."""
        assert layout.contents is not None
        slots_per_shard = -(-self.cache_rows // layout.contents.num_shards)
        return layout_of_cache(layout, min(slots_per_shard, layout.num_rows))

    def bytes_per_device(self, stack: "StackPlan") -> int:
        """Returns the memory of the map from rows to slots."""
        return 4 * stack.rows_per_shard

    def notes(self, stack: "StackPlan") -> Iterator[str]:
        """Yields what the host holds, and what the devices cache."""
        cache_rows = min(self.cache_rows, stack.num_rows)
        share = cache_rows / stack.num_rows
        where = self.directory or "host memory"
        num_bytes = 4 * stack.num_rows * columns_of(stack)[-1].stop
        yield (
            f"{stack.num_rows:,} rows in {where}, {format_bytes(num_bytes)}; "
            f"{cache_rows:,} of them ({share:.1%}) cached on devices, whose map "
            f"of rows takes {format_bytes(self.bytes_per_device(stack))} on each"
        )

    def init_rows(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> PackedRows:
        """Returns an empty cache of new rows."""
        return HostStack(stack, plan).init_rows(key)

    def init_state(
        self, table: PackedRows, stack: "TrainedStackPlan", plan: "EmbeddingPlan"
    ) -> Any:
        """Returns a new state of the optimizer of cached rows."""
        return table.host.init_state(table)  # type: ignore[attr-defined]

    def measured_state(self, table: PackedRows, state: Any) -> Any:
        """Returns a state with totals over the present rows."""
        return table.host.measured_state(table, state)  # type: ignore[attr-defined]
