"""The interface that maps table ids to rows.

The core calls `TableConfig.vocabulary` and never checks its class. The defaults suit
`FixedVocabulary`; another vocabulary overrides only what differs. See CONTRIBUTING.md,
"Add a vertical".
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from tpu_embedding.argument_checks import Problem, broken_rules, int_rule, optional
from tpu_embedding.types import PADDING_ROW_ID, RowIds

if TYPE_CHECKING:
    from tpu_embedding.config import FeatureConfig
    from tpu_embedding.initializers import Initializer
    from tpu_embedding.plan.features import FeaturePlan
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


class VocabularyInputs:
    """Turns feature ids into row numbers; by default, ids are row numbers.

    `read`, `check` and `for_step` run on the host in `prepare_features`, in this order.
    `find_rows` runs in lookups, compiled or not, and `served_rows` in exported models.
    """

    text_to_ids: str = "te.inputs.hash_ids or te.inputs.Vocabulary"
    """Names of functions that turn strings into ids, for errors."""
    need_of_rows: str = "must hold RowIds, got ids."
    """End of the error for a feature whose rows are not known yet."""

    def read(self, ids: Any, feature: "FeaturePlan") -> Any:
        """Converts ids from the user to a form that NumPy can read.

        Raises:
          TypeError: if the ids may already have been truncated.
        """
        return ids

    def check(
        self, ids: np.ndarray, holds_padding: bool, feature: "FeaturePlan", where: str
    ) -> np.ndarray:
        """Checks ids, and copies them as int32. Other vocabularies may use uint64.

        If `holds_padding`, `PADDING_ROW_ID` marks positions without an id.
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
        # Conversion to int32 would wrap ids that don't fit. Instead, they become -1 or
        # the largest int32 that isn't padding. Both replacements are out of range, so
        # the step can still drop them or clip them to the right end. So can a served
        # program, which has its own policy.
        is_foreign = is_outside & ((ids < 0) | (ids >= PADDING_ROW_ID))
        replacement = np.where(ids < 0, -1, PADDING_ROW_ID - 1)
        kept = np.where(is_foreign, 0, ids).astype(np.int32)
        return np.where(is_foreign, replacement, kept).astype(np.int32)

    def for_step(self, ids: Any) -> Any:
        """Converts a prepared feature to the form that a compiled step takes."""
        return ids

    def find_rows(
        self, tables: dict[str, Any], features: Any, plan: "EmbeddingPlan"
    ) -> Any:
        """Finds `RowIds` for all features whose vocabulary has this object as `inputs`.

        Tables don't change, so new ids get no rows.
        """
        return features

    def served_rows(
        self, ids: Any, feature: "FeaturePlan", tables: Mapping[str, Any], name: str
    ) -> Any:
        """Finds the row numbers in an exported model.

        `tables` holds the model's arrays. `name` is the name of the feature's table.
        """
        return ids


def needs_rows(ids: Any, feature: "FeaturePlan") -> bool:
    return not feature.table.vocabulary.ids_are_rows and not isinstance(ids, RowIds)


def rows_of_ids(ids: Any, feature: "FeaturePlan") -> Any:
    if needs_rows(ids, feature):
        raise unknown_rows(feature)
    if not isinstance(ids, RowIds):
        return ids
    if feature.table.vocabulary.ids_are_rows:
        raise TypeError(
            f"Feature {feature.name!r} holds RowIds, but the ids of its table are "
            "row numbers; pass its ids."
        )
    return ids.ids


def unknown_rows(feature: "FeaturePlan") -> TypeError:
    return TypeError(f"Feature {feature.name!r} {feature.inputs.need_of_rows}")


class VocabularyStacks:
    """Arrays that a stack has in addition to its rows; none by default.

    They are in the dict of tables under their own names, and sharded like the rows.
    """

    zero_counts: Any = None
    """Initial counts that a layer keeps for each table; None if it keeps no counts."""

    def plan_stack(self, stack: "StackPlan") -> "StackPlan":
        """Adds facts about the arrays to the plan."""
        return stack

    def init_arrays(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> dict[str, Any]:
        """Makes the global arrays for a new stack, by name."""
        return {}

    def end_step(self, tables: Mapping[str, Any], stack: "StackPlan") -> dict[str, Any]:
        """Updates the arrays that change in every training step, by name."""
        return {}

    def table_sizes(
        self, arrays: Mapping[str, Any], stack: "StackPlan"
    ) -> Float[Array, " tables"] | None:
        """Counts the shard rows that enter each table's totals. None means all rows."""
        return None

    def rows_on_one_shard(
        self, rows: Int[Array, " rows"], stack: "StackPlan"
    ) -> Int[Array, " rows"]:
        """Renumbers the rows of a stack as if it had a single shard."""
        # Random bits are made from these numbers, so the bits don't depend on the
        # number of shards.
        return rows


class Vocabulary:
    """The map from table ids to rows, and the facts that follow from it.

    Frozen, hashable and picklable, so that data loaders can receive it.
    """

    max_rows: int
    """Largest number of ids that may have a row at once."""
    ids_are_rows: bool = True
    """True if the ids themselves are row numbers."""
    instead_of_row_numbers: str = ""
    """End of the error if ids must be row numbers but aren't. It suggests a fix."""
    every_row_problem: str = ""
    """Why optimizers can't move every row and what to do instead; empty if they can."""
    stacking_key: Any = None
    """Hashable. Tables share a stack only if their vocabularies have equal keys."""
    # Both objects are stateless, so all vocabularies of a kind share them.
    inputs: VocabularyInputs = VocabularyInputs()
    stacks: VocabularyStacks = VocabularyStacks()

    def rows_over(self, num_shards: int) -> int:
        """Counts the rows on all shards, including spare rows."""
        return self.max_rows

    def table_problems(
        self, dtype_name: str | None, initializer: "Initializer | None", owner: str
    ) -> Iterator[Problem]:
        """Finds problems with other fields of the `TableConfig`.

        `dtype_name` is None if the dtype is unknown. `owner` names the table.
        """
        return iter(())

    def feature_problems(
        self, feature: "FeatureConfig", owner: str
    ) -> Iterator[Problem]:
        """Finds problems with the fields of a feature."""
        return iter(())


@dataclasses.dataclass(frozen=True)
class FixedVocabulary(Vocabulary):
    """A vocabulary whose ids are row numbers.

    Example:
      >>> FixedVocabulary(10).rows_over(8)
      10
    """

    size: int

    @property
    def max_rows(self) -> int:
        return self.size

    def feature_problems(
        self, feature: "FeatureConfig", owner: str
    ) -> Iterator[Problem]:
        row = optional(int_rule(0, self.size - 1, "give a row's number"))
        yield from broken_rules(feature, {"default_id": row}, owner)
