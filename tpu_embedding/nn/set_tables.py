"""Remembers which tables of a layer were set by hand, and which have followers."""

from collections.abc import Collection

import numpy as np

from tpu_embedding.functional.following_slots import check_no_followers


class SetTables:
    """The tables of a layer whose rows changed other than by updates.

    The record of touched rows lies in the optimizer, which `set_embedding_tables`, or
    an import or a restore without it, cannot reach. So the layer remembers the names:
    a delta holds all rows of these tables, and a checkpoint marks them as touched.

    The object lives on the host. Copies of a layer share it, as they share
    `BufferSizes`, and so do models that one function under `nnx.jit` made. So nothing
    is forgotten for all of them: each export remembers what was set before it. What
    one of them sets, the deltas of all hold.

    It also keeps the ids of dynamic tables in the latest export, 8 bytes each: a delta
    names those that were evicted since.

    Some optimizers make state from table values, such as moving averages of rows. Then
    values are set together with that state. So an optimizer notes the tables that it
    made state from, and whoever sets one without the optimizer gets an error.

    Attributes:
      followed: names of the tables from whose values an optimizer made state.
    """

    def __init__(self):
        self.followed: set[str] = set()
        self._num_events = 0
        self._events: dict[str, int] = {}
        self._known: dict[tuple[int, str], int] = {}
        self._exported_ids: dict[str, tuple[int, np.ndarray]] = {}

    def note(self, tables: Collection[str]) -> None:
        """Notes that tables were set other than by updates."""
        self._num_events += 1
        self._events |= dict.fromkeys(tables, self._num_events)

    def set_since(self, base: int) -> set[str]:
        """Returns the tables that were set since an export, delta or restore.

        Args:
          base: identity of the export or delta that the optimizer's record follows; 0
            if it follows none.
        """
        events = self._events.items()
        return {name for name, at in events if at > self._known.get((base, name), 0)}

    def forget(self, base: int, tables: Collection[str] | None = None) -> None:
        """Forgets, for one base, what was set before: it has the present values.

        Args:
          base: see `set_since`.
          tables: names; None: all.
        """
        names = self._events if tables is None else tables
        self._known |= {(base, name): self._num_events for name in names}

    def keep_ids(self, base: int, table: str, ids: np.ndarray) -> None:
        """Keeps the ids that a dynamic table has in its latest export or delta.

        Args:
          base: identity of the export or delta.
          table: name of the table.
          ids: uint64, rising.
        """
        self._exported_ids[table] = base, ids

    def exported_ids(self, base: int, table: str) -> np.ndarray | None:
        """Returns the ids of a dynamic table in an export or delta; None: unknown.

        They are unknown after a restart of the program, unless a checkpoint had them,
        or if another export followed.
        """
        known, ids = self._exported_ids.get(table, (0, None))
        return ids if known == base else None

    def check_without_optimizer(self, tables: Collection[str], way_out: str) -> None:
        """Refuses to set tables whose optimizer would keep state of the old values.

        Args:
          tables: names of the tables to be set.
          way_out: the line to write.

        Raises:
          ValueError: if an optimizer made state from one of them.
        """
        check_no_followers(self.followed & set(tables), way_out)
