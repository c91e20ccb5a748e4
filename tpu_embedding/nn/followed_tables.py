"""Remembers the tables of a layer whose values an optimizer made state from."""

from collections.abc import Collection

from tpu_embedding.functional.following_slots import check_no_followers


class FollowedTables:
    """The tables of a layer from whose values an optimizer made state.

    Some optimizers keep moving averages of rows, or the scale of a table. Such values
    are set together with that state. So an optimizer notes these tables, and whoever
    sets one without the optimizer gets an error.

    The object lives on the host, and copies of a layer share it.

    Attributes:
      names: names of the tables.
    """

    def __init__(self):
        self.names: set[str] = set()

    def check_without_optimizer(self, tables: Collection[str], way_out: str) -> None:
        """Refuses to set tables whose optimizer would keep state of the old values.

        Args:
          tables: names of the tables to be set.
          way_out: the line to write.

        Raises:
          ValueError: if an optimizer made state from one of them.
        """
        check_no_followers(self.names & set(tables), way_out)
