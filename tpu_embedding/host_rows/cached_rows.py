"""Rows on the host, and the slots in which each device caches some of them.

Caching a row doesn't change its row id, the device that owns it or its position in any
sort. A lookup and an update turn row ids into slots once per round, by `locate`. All
other code sees the same row ids as with all rows on the devices, so sums, rules and
random bits are the same bit for bit.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, no_type_check

import jax
import jax.numpy as jnp
from flax import serialization

from tpu_embedding.rows.packed_rows import PackedRows, gather_in_bounds
from tpu_embedding.types import PADDING_ROW_ID

if TYPE_CHECKING:
    from tpu_embedding.host_rows.stack import HostStack


@no_type_check  # Fields may also be shapes or shardings.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedRows(PackedRows):
    """The cached rows of a slot variable, addressed by cache slot.

    Attributes:
      lines: the cached rows of each shard.
      layout: packing of a shard's cached rows.
      host: all rows of the stack, on the host. The field is static, so a step
        recompiles for another model's rows.
      column: index of this slot variable in the host's records; the table has index 0.
      owner: number of the optimizer state that the slot variable belongs to; 0 for the
        table.
      version: int32 `[1]` per shard, incremented by every exchange. The host keeps the
        same count to detect stale copies, whose slots may hold other rows by now.
    """

    holds_all_rows: ClassVar[bool] = False

    host: "HostStack"
    column: int
    version: Any
    owner: int = 0

    def read_windows(self, windows, exchange, receivers):
        """Flushes the cache, then yields the windows' blocks from the host."""
        return self.host.read_windows(self, windows, exchange, receivers)

    def write_windows(self, windows, exchange, read):
        """Replaces the windows' rows on the host and in the cache."""
        return self.host.write_windows(self, windows, exchange, read)

    def tree_flatten_with_keys(self):
        """Returns the arrays with their names, and the static fields."""
        leaves, static = self.tree_flatten()
        names = f"cached_{self.layout.leaf_name}", *self.ARRAYS[1:]
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, leaves, strict=True)), static

    def tree_flatten(self):
        """Returns the arrays and the static fields."""
        static = self.layout, self.host, self.column, self.owner
        return tuple(getattr(self, name) for name in self.ARRAYS), static

    def check_current(self):
        """Raises ValueError if the host has newer rows than these."""
        self.host.check_current(self)

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
    """The cached rows of a table and the slot of each row, per shard or global.

    Attributes:
      slot_of_row: int32 `[rows of the shard]`; -1 for rows that aren't cached.
      num_lost: int32 `[1]` per shard, number of updates dropped because their row
        wasn't cached.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ("lines", "version", "slot_of_row", "num_lost")

    slot_of_row: Any
    num_lost: Any

    def locate(self, row_ids):
        """Finds the slots of rows: `PADDING_ROW_ID` for rows that aren't cached.

        The returned copy has counted these rows in `num_lost`.
        """
        last = self.slot_of_row.shape[0] - 1
        slots = gather_in_bounds(self.slot_of_row, jnp.minimum(row_ids, last))
        slots = jnp.where(row_ids <= last, slots, PADDING_ROW_ID)
        num_lost = self.num_lost + jnp.sum(slots < 0, dtype=jnp.int32)
        places = jnp.where(slots >= 0, slots, PADDING_ROW_ID)
        return dataclasses.replace(self, num_lost=num_lost), places


def _reject_flax(*args: Any) -> Any:
    raise ValueError(
        "flax.serialization would save only the cached rows of a table with "
        "te.HostRows. Save all rows with te.save, and restore them with te.restore."
    )


for kind in (CachedRows, MappedRows):
    serialization.register_serialization_state(kind, _reject_flax, _reject_flax)
