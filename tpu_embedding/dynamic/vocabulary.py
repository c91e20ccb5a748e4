"""`Dynamic` and its policies: what a user declares, and what the core asks.

A declaration needs no traced code. So the modules that have it are imported when the
core first asks for `inputs` or `stacks`.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from tpu_embedding.argument_checks import (
    Rule,
    broken_rules,
    choice_rule,
    convert_ints,
    int_rule,
    optional,
    raise_all,
    right_names,
)
from tpu_embedding.initializers import Initializer, starts_any_row
from tpu_embedding.vocabularies import Vocabulary, VocabularyInputs, VocabularyStacks

if TYPE_CHECKING:
    from tpu_embedding.config import FeatureConfig
    from tpu_embedding.optimizers.row_optimizer import RowOptimizer

SLOTS_PER_BUCKET: Final = 64
"""Places for ids that share a hash, in one line of 128 lanes."""

MAX_CAPACITY: Final = 2**31 - 2**21
"""Largest capacity: row numbers are int32, and shards round up."""

_CLOCK_RULE: Final = int_rule(1, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts the id that was used longest ago. Ids of the same step stay.

    Example:
      >>> LeastRecentlyUsed()
      LeastRecentlyUsed()
    """


@dataclasses.dataclass(frozen=True)
class TimeToLive:
    """Evicts an id that was not used for more than `ttl`, the oldest first.

    An expired id keeps its row until a new id needs the place, and lives on if it comes
    back before.

    Attributes:
      ttl: steps, or units of the `now` that `insert_ids` is given; 1 to 2**32 - 1.

    Example:
      >>> TimeToLive(7 * 24).ttl
      168
    """

    ttl: int

    def __post_init__(self):
        convert_ints(self, "ttl")
        raise_all(broken_rules(self, {"ttl": _CLOCK_RULE}))


@dataclasses.dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts the id that was used in the fewest steps; among these, the oldest.

    Attributes:
      half_life: steps, or units of `now`, after which an unused id counts half as much;
        None keeps counts as they are. 1 to 2**32 - 1.

    Example:
      >>> LeastFrequentlyUsed(half_life=1000).half_life
      1000
    """

    half_life: int | None = None

    def __post_init__(self):
        convert_ints(self, "half_life")
        raise_all(broken_rules(self, {"half_life": optional(_CLOCK_RULE)}))


@dataclasses.dataclass(frozen=True)
class AdmitAfter:
    """Admits an id when `count` calls of `insert_ids` saw it; rarer ids get no row.

    A sketch of 8 bytes per row has the counts. Ids that share its counters may be
    admitted early. So that few are, the counts of a bucket are
    halved each time that `16 * (count - 1)` unknown ids were counted in it, a quarter
    of its places for each count. Of ids that come once, less than 1 % are admitted by
    `AdmitAfter(3)`, and 4 % by `AdmitAfter(2)`.

    Attributes:
      count: calls, this one included, 1 to 255; a step usually has one.
      window: steps, or units of `now`; counts also start from 0 at each multiple of it,
        so an id that is seen before and after one is admitted later. By default, counts
        are only halved. 1 to 2**32 - 1.

    Example:
      >>> AdmitAfter(3, window=10_000).count
      3
    """

    count: int
    window: int | None = None

    def __post_init__(self):
        convert_ints(self, "count", "window")
        rules = {"count": int_rule(1, 255), "window": optional(_CLOCK_RULE)}
        raise_all(broken_rules(self, rules))

    @property
    def ids_per_halving(self) -> int:
        """Unknown ids of a bucket, one for each call, between two halvings."""
        return SLOTS_PER_BUCKET // 4 * max(1, self.count - 1)


Eviction = LeastRecentlyUsed | TimeToLive | LeastFrequentlyUsed


_DYNAMIC_RULES: Final = {
    "capacity": int_rule(1, MAX_CAPACITY),
    "evict": optional(
        Rule(
            lambda x: isinstance(x, Eviction),
            "a te.dynamic.LeastRecentlyUsed, TimeToLive, LeastFrequentlyUsed",
        )
    ),
    "admit": optional(
        Rule(lambda x: isinstance(x, AdmitAfter), "a te.dynamic.AdmitAfter")
    ),
    "default_row": choice_rule(("none", "learned")),
}


@right_names(max_capacity="capacity", size="capacity")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic(Vocabulary):
    """The vocabulary of a table whose ids come and go: any integers of 64 bits.

    Each id belongs to one bucket of 64 places. If all are taken, an id of this bucket
    is evicted, or the new id gets no row. So choose a capacity of 1.33 times the ids in
    use: fewer than 0.1 % of them find no place.

    Attributes:
      capacity: number of rows, rounded up to a multiple of 64; 1 to 2**31 - 2**21.
      evict: whose row a new id takes in a full bucket: `LeastRecentlyUsed`,
        `TimeToLive` or `LeastFrequentlyUsed`. None evicts no id.
      admit: which unknown ids get a row: an `AdmitAfter`. None admits all.
      default_row: row that ids without a row read. `"none"`: they contribute nothing,
        like ids outside a static table. `"learned"`: one row, which they share and
        train together.

    Example:
      >>> import tpu_embedding as te
      >>> users = te.Dynamic(capacity=1_000_000, evict=te.dynamic.TimeToLive(30))
      >>> te.TableConfig(vocabulary_size=users, dim=32, name="user").max_rows
      1000000
    """

    capacity: int
    evict: Eviction | None = LeastRecentlyUsed()
    admit: AdmitAfter | None = None
    default_row: Literal["none", "learned"] = "none"

    def __post_init__(self):
        convert_ints(self, "capacity")
        raise_all(broken_rules(self, _DYNAMIC_RULES))

    @property
    def num_buckets(self) -> int:
        """Buckets of the table, on any number of devices."""
        return -(-self.capacity // SLOTS_PER_BUCKET)

    @property
    def num_places(self) -> int:
        """Rows for ids: the capacity, rounded up to whole buckets."""
        return self.num_buckets * SLOTS_PER_BUCKET

    @property
    def max_rows(self) -> int:
        """The capacity."""
        return self.capacity

    def buckets_per_shard(self, num_shards: int) -> int:
        """Returns the buckets that each shard has room for."""
        return -(-self.num_buckets // num_shards)

    # What the core asks of every vocabulary.

    ids_are_rows = False
    instead_of_row_numbers = (
        "New ids get rows in the step that looks them up: write a plain step with "
        "optimizer.insert_ids and te.value_and_grad. te.functional.dynamic_rows "
        "returns the ids and their rows."
    )

    @property
    def stacking_key(self) -> Any:
        """The policies, which are equal in tables that share a stack."""
        return self.evict, self.admit, self.default_row

    @property
    def inputs(self) -> VocabularyInputs:
        """Reads ids of 64 bits, and finds their rows."""
        from tpu_embedding.dynamic.seam import DYNAMIC_INPUTS

        return DYNAMIC_INPUTS

    @property
    def stacks(self) -> VocabularyStacks:
        """Keeps the directory of ids."""
        from tpu_embedding.dynamic.seam import DYNAMIC_STACKS

        return DYNAMIC_STACKS

    def rows_over(self, num_shards: int) -> int:
        """Returns the rows of whole buckets on each shard, and the default row."""
        per_shard = self.buckets_per_shard(num_shards) * SLOTS_PER_BUCKET
        return num_shards * (per_shard + (self.default_row == "learned"))

    def table_problems(
        self, dtype_name: str | None, initializer: Initializer | None, owner: str
    ) -> Iterator[str]:
        """Yields what would keep a row from starting when an id gets it."""
        if dtype_name == "int8":
            yield (
                "TableConfig.dtype must not be int8 for a te.Dynamic vocabulary, got "
                f"int8{owner}; a new row has float values, so give bfloat16"
            )
        if callable(initializer) and not starts_any_row(initializer):
            yield (
                "TableConfig.initializer must be able to start one row at a time for a "
                f"te.Dynamic vocabulary, got {initializer!r}{owner}; take one of "
                "te.initializers, or te.initializers.rowwise(initializer)"
            )

    def feature_problems(self, feature: "FeatureConfig", owner: str) -> Iterator[str]:
        """Yields what would need ids that are row numbers."""
        if feature.default_id is not None:
            yield (
                "FeatureConfig.default_id must be None for a te.Dynamic vocabulary, "
                f"got {feature.default_id!r}{owner}; put the id into empty samples"
            )
        if feature.out_of_range_ids == "clip":
            yield (
                "FeatureConfig.out_of_range_ids must be 'error' or 'drop' for a "
                f"te.Dynamic vocabulary, got 'clip'{owner}; its ids have no nearest row"
            )

    def optimizer_problem(self, optimizer: "RowOptimizer") -> str | None:
        """Returns why a rule for every row does not fit."""
        if not optimizer.moves_every_row:
            return None
        return (
            "moves every row in each step, which a te.Dynamic vocabulary cannot have: "
            "rows without an id would move as well. Leave out every_row."
        )
