"""Rows that are stored on the host, with slots that cache some of them on devices.

Lookups and updates call `locate` once per round, and only `locate` turns row ids into
slots. The rest of the code sees the same row ids and owners as if all rows were on the
devices. So sums, rules and random bits are equal bit for bit.
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
    """Cached rows of a slot variable, addressed by cache slot."""

    holds_all_rows: ClassVar[bool] = False

    # Static, so a step recompiles for a different model's rows.
    host: "HostStack"
    # Column of the host's records. The table is column 0.
    column: int
    # int32 `[1]` per shard. Each exchange increments the version. The host keeps the
    # same count, to detect stale copies. Slots of a stale copy may be reused by now.
    version: Any
    # Number of the optimizer state that the rows belong to, or 0 for the table.
    owner: int = 0

    def read_windows(self, windows, exchange, receivers):
        return self.host.read_windows(self, windows, exchange, receivers)

    def write_windows(self, windows, exchange, read):
        return self.host.write_windows(self, windows, exchange, read)

    def tree_flatten_with_keys(self):
        leaves, static = self.tree_flatten()
        # A checkpointer that matches arrays by name must not mistake a cache for a
        # whole table.
        names = f"cached_{self.layout.leaf_name}", *self.ARRAYS[1:]
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, leaves, strict=True)), static

    def tree_flatten(self):
        static = self.layout, self.host, self.column, self.owner
        return tuple(getattr(self, name) for name in self.ARRAYS), static

    def check_current(self):
        self.host.check_current(self)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        layout, host, column, owner = static
        fields = dict(zip(cls.ARRAYS, leaves, strict=True))
        return cls(layout=layout, host=host, column=column, owner=owner, **fields)

    ARRAYS: ClassVar[tuple[str, ...]] = ("lines", "version")


@no_type_check
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedRows(CachedRows):
    """A table's cached rows, and each row's slot. Shapes are per shard or global."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("lines", "version", "slot_of_row", "num_lost")

    # int32 cache slot of each local row, or -1 for rows that aren't cached.
    slot_of_row: Any
    # int32 `[1]` per shard: number of updates dropped so far because their rows weren't
    # cached.
    num_lost: Any

    def locate(self, row_ids):
        """Finds cache slots. The returned copy also counts rows without a slot."""
        last = self.slot_of_row.shape[0] - 1
        slots = gather_in_bounds(self.slot_of_row, jnp.minimum(row_ids, last))
        slots = jnp.where(row_ids <= last, slots, PADDING_ROW_ID)
        num_lost = self.num_lost + jnp.sum(slots < 0, dtype=jnp.int32)
        # `PADDING_ROW_ID` marks rows without a slot. Writes drop it, and `read_rows`
        # gives NaN for it. A gather at -1 would be out of bounds, which
        # `gather_in_bounds` doesn't allow.
        places = jnp.where(slots >= 0, slots, PADDING_ROW_ID)
        return dataclasses.replace(self, num_lost=num_lost), places


def _reject_flax(*args: Any) -> Any:
    raise ValueError(
        "flax.serialization would save only the cached rows of a table with "
        "te.HostRows. Save all rows with te.save, and restore them with te.restore."
    )


for kind in (CachedRows, MappedRows):
    serialization.register_serialization_state(kind, _reject_flax, _reject_flax)
