"""What the ids of a table are, and what gives them rows: a seam of the core.

`TableConfig.vocabulary` is an object of this module. The core calls it, and never
asks for its class. `FixedVocabulary` is the core's own: ids are row numbers. The
defaults of the three classes below are its answers, so another vocabulary overrides
what differs:

* `Vocabulary`: facts of one table, for configs and plans. It is a value: frozen,
  hashable, and fit for pickling.
* `VocabularyInputs`: the ids of a feature on their way to row numbers.
* `VocabularyStacks`: arrays that a stack of such tables has in addition to its rows.

Neither of the last two has a state, so all vocabularies of a kind share one object.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from tpu_embedding.argument_checks import broken_rules, int_rule, optional
from tpu_embedding.types import PADDING_ROW_ID, RowIds

if TYPE_CHECKING:
    from tpu_embedding.config import FeatureConfig
    from tpu_embedding.hardware import HardwareInfo
    from tpu_embedding.initializers import Initializer
    from tpu_embedding.optimizers.row_optimizer import RowOptimizer
    from tpu_embedding.plan.features import FeaturePlan
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


class VocabularyInputs:
    """The ids of a feature on their way to row numbers; by default, they are these.

    `read`, `check` and `for_step` run on the host, in `prepare_features`, one after the
    other. The rest runs in lookups, also in compiled ones.
    """

    text_to_ids: str = "te.inputs.hash_ids or te.inputs.Vocabulary"
    """Functions that turn strings into such ids, for errors."""

    def read(self, ids: Any, feature: "FeaturePlan") -> Any:
        """Returns ids as the user passed them, in a form that NumPy can read.

        Raises:
          TypeError: if the form may have lost a part of the ids.
        """
        return ids

    def check(
        self, ids: np.ndarray, holds_padding: bool, feature: "FeaturePlan", where: str
    ) -> np.ndarray:
        """Returns a copy of the ids, as a type that `types.padding_of` knows: int32.

        Ids that don't fit in int32 stay out of range, at the same end: -1, or the
        largest int32 that isn't padding. Both are outside any table, so it doesn't
        matter whether the step, or a served program with rules of its own, drops or
        clips them.

        Args:
          ids: integers of any dtype.
          holds_padding: True if `PADDING_ROW_ID` marks positions without an id.
          feature: the feature, whose `out_of_range_ids` says what invalid ids become.
          where: name of a position, for errors.

        Raises:
          ValueError: if an id is invalid and the feature's policy is `"error"`.
        """
        num_rows = feature.table.max_rows
        policy = feature.config.out_of_range_ids
        if ids.dtype.kind not in "iu":  # such as int4, which NumPy cannot compare
            ids = ids.astype(np.int64)
        if not ids.size or (ids.min() >= 0 and ids.max() < num_rows):
            return ids.astype(np.int32)
        is_padding = (ids == PADDING_ROW_ID) & holds_padding
        is_outside = ((ids < 0) | (ids >= num_rows)) & ~is_padding
        if policy == "error" and is_outside.any():
            position = tuple(int(i) for i in np.argwhere(is_outside)[0])
            raise ValueError(
                f"Ids of feature {feature.name!r} must be in [0, {num_rows}), got "
                f"{ids[position]} at {where} {position}, and "
                f"{int(is_outside.sum())} such ids in all. Map ids to rows with "
                "te.inputs.hash_ids or te.inputs.Vocabulary, mark missing ids with "
                "te.inputs.PADDING_ROW_ID, or set FeatureConfig.out_of_range_ids to "
                "'drop' or 'clip'."
            )
        # The conversion would wrap ids that an int32 cannot hold. Replace them first.
        is_foreign = is_outside & ((ids < 0) | (ids >= PADDING_ROW_ID))
        replacement = np.where(ids < 0, -1, PADDING_ROW_ID - 1)
        kept = np.where(is_foreign, 0, ids).astype(np.int32)
        return np.where(is_foreign, replacement, kept).astype(np.int32)

    def for_step(self, ids: Any) -> Any:
        """Returns a prepared feature in the form that a compiled step takes."""
        return ids

    def needs_rows(self, ids: Any) -> bool:
        """Returns True for a feature that `find_rows` must see before its lookup."""
        return False

    def row_numbers(self, ids: Any, feature: "FeaturePlan") -> Any:
        """Returns what a lookup takes: int32 rows of the table, in the feature's form.

        Raises:
          TypeError: if they are not known, or the feature holds rows of another kind of
            vocabulary.
        """
        if isinstance(ids, RowIds):
            raise TypeError(
                f"Feature {feature.name!r} holds RowIds, but the ids of its table are "
                "row numbers; pass its ids."
            )
        return ids

    def unknown_rows(self, feature: "FeaturePlan") -> TypeError:
        """Returns the error for a feature whose rows must be known, and are not."""
        return TypeError(f"Feature {feature.name!r} must hold RowIds, got ids.")

    def find_rows(
        self, tables: dict[str, Any], features: Any, plan: "EmbeddingPlan"
    ) -> Any:
        """Returns a batch with `RowIds` for its features that need rows.

        It changes no table: a new id lacks a row. One call answers for all features
        with these inputs.
        """
        return features

    def served_rows(
        self, ids: Any, feature: "FeaturePlan", tables: Mapping[str, Any], name: str
    ) -> Any:
        """Returns the row numbers of a feature in an exported model.

        Args:
          ids: ids of the feature.
          feature: the feature.
          tables: the tables that are served, and arrays that the export has put there.
          name: name of the feature's table.
        """
        return ids


class VocabularyStacks:
    """Arrays that a stack has in addition to its rows; by default, there are none.

    They are in the dict of the tables under names of their own, and the shards are
    the same as for the rows.
    """

    def array_names(self, stack: "StackPlan") -> tuple[str, ...]:
        """Returns the names of the arrays."""
        return ()

    def init_arrays(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> dict[str, Any]:
        """Returns the arrays of a new stack by name. Global."""
        return {}

    def end_step(self, tables: Mapping[str, Any], stack: "StackPlan") -> dict[str, Any]:
        """Returns the arrays that change at the end of a training step, by name."""
        return {}

    def bytes_per_device(self, stack: "StackPlan", hardware: "HardwareInfo") -> int:
        """Returns the memory of the arrays on each device."""
        return 0

    def notes(self, stack: "StackPlan", hardware: "HardwareInfo") -> Iterator[str]:
        """Yields lines of `print(plan)` about the arrays."""
        return iter(())

    def zero_counts(self, stack: "StackPlan") -> dict[str, Any]:
        """Returns what a layer counts per table, before the first step."""
        return {}

    def used_rows(self, tables: Mapping[str, Any], stack: "StackPlan") -> Any:
        """Returns the array whose shards `table_sizes` gets, or None."""
        return None

    def table_sizes(
        self, used_rows: Any, stack: "StackPlan"
    ) -> Float[Array, " tables"] | None:
        """Returns the rows of each table that count in its totals. Per shard.

        None if all rows count.
        """
        return None

    def rows_on_one_shard(
        self, rows: Int[Array, " rows"], stack: "StackPlan"
    ) -> Int[Array, " rows"]:
        """Returns the numbers that rows of a stack have on a single shard.

        Random bits of rows depend on them, so they are equal on any number of shards.
        """
        return rows


class Vocabulary:
    """What gives rows to the ids of a table, and which facts follow from that."""

    ids_are_rows: bool = True
    """True if each id is the number of its row, for good."""
    instead_of_row_numbers: str = ""
    """What to do where only row numbers serve, if ids are not; ends errors."""
    stacking_key: Any = None
    """Tables of a class share a stack only if their keys, hashable, are equal."""
    inputs: VocabularyInputs = VocabularyInputs()
    stacks: VocabularyStacks = VocabularyStacks()

    @property
    def max_rows(self) -> int:
        """Largest number of ids that may have a row at once."""
        raise NotImplementedError

    def rows_over(self, num_shards: int) -> int:
        """Returns the rows of the table over all shards, spare ones included."""
        return self.max_rows

    def table_problems(
        self, dtype_name: str | None, initializer: "Initializer | None", owner: str
    ) -> Iterator[str]:
        """Yields what other fields of the `TableConfig` must not be.

        Args:
          dtype_name: storage type of the rows; None if it is unknown.
          initializer: the table's own.
          owner: the table, for errors.
        """
        return iter(())

    def feature_problems(self, feature: "FeatureConfig", owner: str) -> Iterator[str]:
        """Yields what fields of a feature of the table must not be."""
        return iter(())

    def optimizer_problem(self, optimizer: "RowOptimizer") -> str | None:
        """Returns why such tables cannot have an optimizer, and what to do; or None."""
        return None


@dataclasses.dataclass(frozen=True)
class FixedVocabulary(Vocabulary):
    """The vocabulary of a table whose ids are row numbers.

    Attributes:
      size: number of rows.

    Example:
      >>> FixedVocabulary(10).rows_over(8)
      10
    """

    size: int

    @property
    def max_rows(self) -> int:
        """The number of rows."""
        return self.size

    def feature_problems(self, feature: "FeatureConfig", owner: str) -> Iterator[str]:
        """Yields a `default_id` that is not a row."""
        row = optional(int_rule(0, self.size - 1, "give a row's number"))
        yield from broken_rules(feature, {"default_id": row}, owner)
