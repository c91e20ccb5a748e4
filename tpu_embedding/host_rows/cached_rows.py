"""Rows on the host; each device holds some of them, in slots of a cache.

A row keeps its number, its owner and its place in every sort. Only `rows/access.py`
turns numbers into slots. So sums, rules and random bits see the numbers that they see
with all rows on the devices, and give the same bits.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
from flax import serialization

from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, gather_in_bounds
from tpu_embedding.types import PADDING_ROW_ID

if TYPE_CHECKING:
    from tpu_embedding.host_rows.stack import HostStack


@no_type_check  # It also holds shapes and shardings instead of arrays.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows(PackedRows):
    """The cached rows of a slot variable; ids are slots.

    Attributes:
      lines: lines of `layout_of_cache(layout, ...)` per shard.
      layout: packing of all rows of a shard.
      host: the rest of the rows. It is static: a step that was compiled for these rows
        compiles again for the rows of another model.
      column: number of the array in the records of the host; 0 is the table.
      owner: number of the optimizer state that has the slot variable; 0 is the table.
      version: int32 `[1]` per shard. The host counts along, and so notices an old copy
        of the rows, whose slots have other rows.
    """

    holds_all_rows: ClassVar[bool] = False

    host: "HostStack"
    column: int
    version: Any
    owner: int = 0

    def held_rows(self):
        """Returns the cached rows, by slot."""
        layout = layout_of_cache(self.layout, self.host.slots_per_shard)
        return PackedRows(lines=self.lines, layout=layout)

    def with_held_rows(self, held, row_ids):
        """Returns these rows with other cached rows."""
        return dataclasses.replace(self, lines=held.lines)

    def read_windows(self, windows, exchange):
        """Yields the blocks of windows, from the host after a flush."""
        return self.host.read_windows(self, windows, exchange)

    def write_windows(self, windows, exchange, read):
        """Replaces the rows of windows on the host, and in the cache."""
        return self.host.write_windows(self, windows, exchange, read)

    def _static(self):
        return self.layout, self.host, self.column, self.owner

    def _leaves(self):
        name = f"cached_{self.layout.leaf_name}"
        return {name: self.lines, "version": self.version}

    def tree_flatten_with_keys(self):
        """Returns the arrays under their names, and what is static."""
        leaves = self._leaves().items()
        key = jax.tree_util.GetAttrKey
        return tuple((key(name), leaf) for name, leaf in leaves), self._static()

    def tree_flatten(self):
        """Returns the arrays, and what is static."""
        return tuple(self._leaves().values()), self._static()

    def check_current(self):
        """Raises ValueError if the host has newer rows than these."""
        self.host.check_current(self)

    def zeros(self, sharding):
        """Returns empty slots, if the arrays are shapes."""
        return self.host.empty_slot(self.column)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        """Returns the rows with these arrays."""
        layout, host, column, owner = static
        fields = dict(zip(cls.ARRAYS, leaves, strict=True))
        return cls(layout=layout, host=host, column=column, owner=owner, **fields)

    ARRAYS: ClassVar[tuple[str, ...]] = ("lines", "version")


@no_type_check
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedRows(CachedRows):
    """The cached rows of a table, and the slot of each row. Per shard, or global.

    Attributes:
      slot_of_row: int32 `[rows of the shard]`; -1 for a row that is on the host only.
      num_lost: int32 `[1]` per shard, changes that were dropped because the shard lacks
        the row.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("lines", "version", "slot_of_row", "num_lost")

    slot_of_row: Any
    num_lost: Any

    def _leaves(self):
        return {
            **super()._leaves(),
            "slot_of_row": self.slot_of_row,
            "num_lost": self.num_lost,
        }

    def zeros(self, sharding):
        """Returns an empty cache, if the arrays are shapes."""
        self.host.empty()
        return self.host.empty_rows()

    def places(self, row_ids):
        """Returns the slots of rows; `PADDING_ROW_ID` for rows without one."""
        slots = self._slots(row_ids)
        return jnp.where(slots >= 0, slots, PADDING_ROW_ID)

    def with_held_rows(self, held, row_ids):
        """Returns these rows with other cached rows; counts rows without a slot."""
        num_lost = self.num_lost + self.num_missing(row_ids)
        return dataclasses.replace(self, lines=held.lines, num_lost=num_lost)

    def where_held(self, rows, row_ids):
        """Returns rows with NaN for those without a slot, such as never to be used."""
        is_missing = (self._slots(row_ids) < 0).reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(is_missing, jnp.full((), jnp.nan, rows.dtype), rows)

    def num_missing(self, row_ids):
        """Returns how many rows have no slot; padding does not count."""
        return jnp.sum(self._slots(row_ids) < 0, dtype=jnp.int32)

    def _slots(self, row_ids):
        """Returns the slots of rows: -1 on the host, `PADDING_ROW_ID` for padding."""
        last = self.slot_of_row.shape[0] - 1
        slots = gather_in_bounds(self.slot_of_row, jnp.minimum(row_ids, last))
        return jnp.where(row_ids <= last, slots, PADDING_ROW_ID)


def _reject_flax(*args: Any) -> Any:
    raise ValueError(
        "flax.serialization would save the cached rows of a table with te.HostRows "
        "only; save all rows by te.save, and restore them by te.restore."
    )


for kind in (CachedRows, MappedRows):
    serialization.register_serialization_state(kind, _reject_flax, _reject_flax)


def layout_of_cache(layout: RowLayout, slots_per_shard: int) -> RowLayout:
    """Returns the packing of the cached rows of a shard, given the one of all rows."""
    return dataclasses.replace(layout, num_rows=slots_per_shard, contents=None)
