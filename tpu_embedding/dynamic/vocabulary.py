"""`te.Dynamic` and its policies, which you declare for tables whose ids come and go.

The modules with compiled code are imported only when the core asks for `inputs` or
`stacks`.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal

from tpu_embedding.argument_checks import (
    Problem,
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

SLOTS_PER_BUCKET: Final = 64
"""Number of places in a bucket. The two words of each id fill one line of 128 lanes."""

MAX_CAPACITY: Final = 2**31 - 2**21
"""Largest capacity. Row numbers are int32, and each shard rounds up its row count."""

_CLOCK_RULE: Final = int_rule(1, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts the least recently used id, but never one used in the current step.

    Example:
      >>> LeastRecentlyUsed()
      LeastRecentlyUsed()
    """


@dataclasses.dataclass(frozen=True)
class TimeToLive:
    """Evicts ids that were unused for more than `ttl`, the longest unused id first.

    An expired id keeps its row until a new id needs the place. An expired id that is
    used before then is no longer expired.

    Attributes:
      ttl: time in steps, or in units of the `now` that you pass to `insert_ids`, from 1
        to 2**32 - 1.

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
    """Evicts the id used in the fewest steps, and breaks ties by least recent use.

    Attributes:
      half_life: time until the count of an unused id is halved, in steps or units of
        `now`, from 1 to 2**32 - 1. By default, counts don't decay.

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
    """Admits an id once `count` calls of `insert_ids` have seen it.

    A sketch with 8 bytes per row keeps the counts. Ids that share counters may be
    admitted early. To make this rare, a bucket halves its counts after every
    `16 * max(1, count - 1)` unknown ids. `AdmitAfter(3)` admits less than 1 % of ids
    that occur only once, and `AdmitAfter(2)` about 4 %.

    Attributes:
      count: number of calls that must see an id, including the current call, from 1 to
        255. A step usually makes one call.
      window: time in steps or units of `now`, from 1 to 2**32 - 1. At each multiple of
        the window, counts restart at 0, so ids that were already counted are admitted
        later. By default, counts are only halved.

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
        """Number of unknown ids that a bucket counts between two halvings."""
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
    """The vocabulary for a table whose 64-bit ids come and go.

    Each id belongs to one bucket with 64 places. If the bucket is full, a new id takes
    the row of an evicted id, or gets no row. If the capacity is 1.33 times the number
    of ids in use, fewer than 0.1 % of these ids don't fit.

    Attributes:
      capacity: row count from 1 to 2**31 - 2**21, rounded up to a multiple of 64.
      evict: policy (`LeastRecentlyUsed`, `TimeToLive` or `LeastFrequentlyUsed`) that
        chooses which id to evict from a full bucket. With None, no id is evicted.
      admit: policy (`AdmitAfter`) that chooses which unknown ids to insert. With None,
        all unknown ids are inserted.
      default_row: how to look up ids without a row. With `"none"`, they contribute
        nothing, like out-of-range ids in a static table. With `"learned"`, they all
        read and train one shared row.

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
        """Bucket count over all shards, equal for any number of devices."""
        return -(-self.capacity // SLOTS_PER_BUCKET)

    @property
    def num_places(self) -> int:
        """Rows for ids: the capacity, rounded up to whole buckets."""
        return self.num_buckets * SLOTS_PER_BUCKET

    @property
    def max_rows(self) -> int:
        """The declared capacity, without rounding."""
        return self.capacity

    def buckets_per_shard(self, num_shards: int) -> int:
        """Splits the buckets evenly over shards, rounding up."""
        return -(-self.num_buckets // num_shards)

    # The members below implement the core's interface, `Vocabulary`.

    ids_are_rows = False
    instead_of_row_numbers = (
        "Ids are assigned rows in the step that looks them up, so write a step with "
        "optimizer.insert_ids and te.value_and_grad. te.functional.dynamic_rows "
        "returns the ids and their rows."
    )
    every_row_problem = (
        "moves every row in each step, which a te.Dynamic vocabulary does not "
        "support, because rows without an id would also move. Remove every_row."
    )

    @property
    def stacking_key(self) -> Any:
        """The policies, which must be equal for tables to share a stack."""
        return self.evict, self.admit, self.default_row

    @property
    def inputs(self) -> VocabularyInputs:
        """Reads 64-bit ids and finds their rows."""
        from tpu_embedding.dynamic.seam import DYNAMIC_INPUTS

        return DYNAMIC_INPUTS

    @property
    def stacks(self) -> VocabularyStacks:
        """Keeps the directory of ids."""
        from tpu_embedding.dynamic.seam import DYNAMIC_STACKS

        return DYNAMIC_STACKS

    def rows_over(self, num_shards: int) -> int:
        """Counts rows over all shards, including padding."""
        per_shard = self.buckets_per_shard(num_shards) * SLOTS_PER_BUCKET
        # Shards have equally many rows, so a default row on the first shard adds one
        # row to each shard.
        return num_shards * (per_shard + (self.default_row == "learned"))

    def table_problems(
        self, dtype_name: str | None, initializer: Initializer | None, owner: str
    ) -> Iterator[Problem]:
        """Yields problems that would prevent initializing single rows."""
        if dtype_name == "int8":
            yield Problem(
                "TableConfig.dtype",
                dtype_name,
                "must not be int8 for a te.Dynamic vocabulary, got "
                f"int8{owner}; new rows have float values, so use bfloat16",
            )
        # Rows are initialized inside the step, when their ids are inserted.
        if callable(initializer) and not starts_any_row(initializer):
            yield Problem(
                "TableConfig.initializer",
                initializer,
                "must initialize one row at a time for a "
                f"te.Dynamic vocabulary, got {initializer!r}{owner}; use one from "
                "te.initializers, or te.initializers.rowwise(initializer)",
            )

    def feature_problems(
        self, feature: "FeatureConfig", owner: str
    ) -> Iterator[Problem]:
        """Yields problems with settings that require ids to be row numbers."""
        if feature.default_id is not None:
            yield Problem(
                "FeatureConfig.default_id",
                feature.default_id,
                "must be None for a te.Dynamic vocabulary, "
                f"got {feature.default_id!r}{owner}; add the id to empty samples",
            )
        if feature.out_of_range_ids == "clip":
            yield Problem(
                "FeatureConfig.out_of_range_ids",
                "clip",
                "must be 'error' or 'drop' for a te.Dynamic vocabulary, got "
                f"'clip'{owner}; its ids have no nearest row",
            )
