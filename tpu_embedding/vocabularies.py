"""Interface of vocabularies, which map a table's ids to rows.

The core calls `TableConfig.vocabulary` and never checks its class. The core's own
vocabulary is `FixedVocabulary`, whose ids are row numbers. By default, the three
classes below do what it needs, so another vocabulary overrides only what differs:

* `Vocabulary`: facts about one table, for configs and plans. It is a frozen, hashable
  value that can be pickled.
* `VocabularyInputs`: turns a feature's ids into row numbers.
* `VocabularyStacks`: arrays that a stack of tables has in addition to its rows.

The last two are stateless, so all vocabularies of a kind share one object.
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
    """Turns a feature's ids into row numbers; by default, ids are row numbers.

    `read`, `check` and `for_step` run on the host in `prepare_features`, in this order.
    The rest runs in lookups, including compiled ones. If ids are not row numbers, a
    lookup needs `RowIds`.
    """

    text_to_ids: str = "te.inputs.hash_ids or te.inputs.Vocabulary"
    """Names of functions that turn strings into ids, for errors."""
    need_of_rows: str = "must hold RowIds, got ids."
    """End of the error for a feature whose rows are not known yet."""

    def read(self, ids: Any, feature: "FeaturePlan") -> Any:
        """Returns the user's ids in a form that NumPy can read.

        Raises:
          TypeError: if the user's form may have truncated ids.
        """
        return ids

    def check(
        self, ids: np.ndarray, holds_padding: bool, feature: "FeaturePlan", where: str
    ) -> np.ndarray:
        """Returns a copy of the ids with a dtype of `types.padding_of`; here int32.

        Ids that don't fit in int32 stay out of range at the same end: they become -1 or
        the largest int32 that isn't padding. The step, or a served program with its own
        policy, can then drop or clip them correctly.

        Args:
          ids: integers of any dtype.
          holds_padding: whether `PADDING_ROW_ID` marks positions without an id.
          feature: sets the policy, `out_of_range_ids`.
          where: word for a position in the ids, for errors.

        Raises:
          ValueError: if an id is invalid and the policy is `"error"`.
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
        # Replace ids that don't fit in int32 first: the conversion would wrap them.
        is_foreign = is_outside & ((ids < 0) | (ids >= PADDING_ROW_ID))
        replacement = np.where(ids < 0, -1, PADDING_ROW_ID - 1)
        kept = np.where(is_foreign, 0, ids).astype(np.int32)
        return np.where(is_foreign, replacement, kept).astype(np.int32)

    def for_step(self, ids: Any) -> Any:
        """Returns a prepared feature in the form that a compiled step takes."""
        return ids

    def find_rows(
        self, tables: dict[str, Any], features: Any, plan: "EmbeddingPlan"
    ) -> Any:
        """Returns a batch with `RowIds` for its features that need rows.

        Tables don't change, so new ids get no rows. One call handles all features whose
        vocabulary has this `VocabularyInputs` object.
        """
        return features

    def served_rows(
        self, ids: Any, feature: "FeaturePlan", tables: Mapping[str, Any], name: str
    ) -> Any:
        """Returns a feature's row numbers in an exported model.

        `name` is the name of the feature's table. `tables` also has the arrays that the
        export added.
        """
        return ids


def needs_rows(ids: Any, feature: "FeaturePlan") -> bool:
    """Returns True for a feature that needs `find_rows` before its lookup."""
    return not feature.table.vocabulary.ids_are_rows and not isinstance(ids, RowIds)


def rows_of_ids(ids: Any, feature: "FeaturePlan") -> Any:
    """Returns int32 row numbers for a lookup, in the feature's form.

    Raises:
      TypeError: if the row numbers are not known, or the feature holds another
        vocabulary's rows.
    """
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
    """Returns the error for a feature whose rows are not known yet."""
    return TypeError(f"Feature {feature.name!r} {feature.inputs.need_of_rows}")


class VocabularyStacks:
    """Arrays that a stack has in addition to its rows; none by default.

    They are in the dict of tables under their own names, and sharded like the rows.
    """

    zero_counts: Any = None
    """A layer's counts of each table before the first step, or None for no counts."""

    def plan_stack(self, stack: "StackPlan") -> "StackPlan":
        """Returns the plan of a stack with the facts about its arrays."""
        return stack

    def init_arrays(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> dict[str, Any]:
        """Returns the arrays of a new stack by name. Global."""
        return {}

    def end_step(self, tables: Mapping[str, Any], stack: "StackPlan") -> dict[str, Any]:
        """Returns the arrays that change at the end of a training step, by name."""
        return {}

    def table_sizes(
        self, arrays: Mapping[str, Any], stack: "StackPlan"
    ) -> Float[Array, " tables"] | None:
        """Returns how many rows of each table count in the table's totals. Per shard.

        None means that all rows count. `arrays` has the stack's arrays by name.
        """
        return None

    def rows_on_one_shard(
        self, rows: Int[Array, " rows"], stack: "StackPlan"
    ) -> Int[Array, " rows"]:
        """Returns the numbers that a stack's rows would have on a single shard.

        Random bits are derived from these numbers, so the bits are the same on any
        number of shards.
        """
        return rows


class Vocabulary:
    """The mapping from a table's ids to rows, and the facts that follow from it."""

    max_rows: int
    """Largest number of ids that may have a row at once."""
    ids_are_rows: bool = True
    """True if the ids themselves are row numbers."""
    instead_of_row_numbers: str = ""
    """What to do where ids must be row numbers but aren't; the end of errors."""
    every_row_problem: str = ""
    """Why optimizers can't move every row and what to do instead; empty if they can."""
    stacking_key: Any = None
    """Hashable. Tables share a stack only if their vocabularies have equal keys."""
    inputs: VocabularyInputs = VocabularyInputs()
    stacks: VocabularyStacks = VocabularyStacks()

    def rows_over(self, num_shards: int) -> int:
        """Returns the number of the table's rows on all shards, with spare rows."""
        return self.max_rows

    def table_problems(
        self, dtype_name: str | None, initializer: "Initializer | None", owner: str
    ) -> Iterator[Problem]:
        """Yields problems with other fields of the `TableConfig`.

        A `dtype_name` of None means that the dtype is unknown. `owner` names the table.
        """
        return iter(())

    def feature_problems(
        self, feature: "FeatureConfig", owner: str
    ) -> Iterator[Problem]:
        """Yields problems with fields of a feature of the table."""
        return iter(())


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

    def feature_problems(
        self, feature: "FeatureConfig", owner: str
    ) -> Iterator[Problem]:
        """Yields a problem if `default_id` is not a row."""
        row = optional(int_rule(0, self.size - 1, "give a row's number"))
        yield from broken_rules(feature, {"default_id": row}, owner)
