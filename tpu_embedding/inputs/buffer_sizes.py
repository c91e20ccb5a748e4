"""Chooses static sizes for ragged features, equally on all processes.

New sizes recompile the step, so `BufferSizes` remembers sizes and changes all of them
at once. Processes with different sizes would wait for each other forever, but each
process knows only its own samples. So they exchange their demands before they choose.
"""

import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tpu_embedding import distributed
from tpu_embedding.argument_checks import about, invalid

_SMALLEST_BUFFER: Final = 8

_DEVIATIONS: Final = 6.0
"""Headroom above the mean number of ids per shard, in standard deviations."""

_GROWTH_FACTOR: Final = 1.25
"""A buffer that is too small grows to at least this many times the ids it must hold,
because data may drift."""

_MAX_EXCESS: Final = 1024
"""Limit on sizes from files, per id or sample in a shard. Files may be forged."""

_QUIET_GROWTHS: Final = 3
"""Number of growths without a warning. A new stream of batches needs one or two."""


class RaggedDemand(NamedTuple):
    """The buffer space that one ragged feature needs in one batch."""

    # This class is a tuple, because `distributed.exchange` sends it as JSON.

    feature_name: str
    expected_valence: float | int | None
    samples_per_shard: int
    """Samples per shard, padding included."""
    num_ids: int
    """Ids in the fullest shard, which the buffer must hold."""
    num_samples: int
    valence_sum: float
    """Sum of the samples' id counts. Processes can add up sums, but not variances."""
    valence_square_sum: float

    @property
    def usual_ids(self) -> int:
        """Number of ids that a shard of a similar batch rarely exceeds."""
        mean = self.valence_sum / self.num_samples
        variance = max(0.0, self.valence_square_sum / self.num_samples - mean**2)
        deviation = math.sqrt(self.samples_per_shard * variance)
        return math.ceil(self.samples_per_shard * mean + _DEVIATIONS * deviation)


class BufferSizes:
    """Buffer sizes of ragged features, remembered from batch to batch.

    Pass one object to all your `prepare_features` calls; `TPUEmbedding.prepare` does
    this for you. A batch that fits the current sizes uses them. When a feature outgrows
    its buffer, all ragged buffers are resized together, each with room for at least six
    standard deviations above the batch mean. A stationary stream thus settles after a
    few compilations. No ids are ever lost, and buffers never shrink.

    The first size comes from `FeatureConfig.expected_valence` if you set it, and
    otherwise from the first batch. Each batch size and each subset of the ragged
    features has its own sizes.

    Note that a loader process continues with its own pickled copy. Prepare some batches
    before you start such processes, so that all begin with the same sizes.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> sizes = te.inputs.BufferSizes()
      >>> for lists in ([[1, 2, 3], [4]], [[5], [6, 7]], [[8, 9], []]):
      ...     batch = {"watched": te.RaggedIds.from_lists(lists)}
      ...     prepared = te.inputs.prepare_features(batch, plan, sizes=sizes)
      >>> sizes.num_combinations
      1
    """

    def __init__(self):
        self._sizes: dict[tuple[tuple[str, int], ...], list[int]] = {}
        # Keys whose sizes come from a file, and which no batch has confirmed yet.
        self._unproven: set[tuple[tuple[str, int], ...]] = set()
        self._combinations: set[tuple[tuple[str, int, int], ...]] = set()
        self._num_growths = 0

    def to_json(self) -> dict[str, Any]:
        """Converts the sizes to JSON values.

        Store them with your checkpoint. If you resume with `from_json`, batches are
        padded as before, so sums add in the same order and have the same bits.

        Example:
          >>> sizes = BufferSizes()
          >>> sizes.to_json()
          {'buffers': []}
          >>> BufferSizes.from_json(sizes.to_json()).num_combinations
          0
        """
        return {"buffers": list(self._sizes.items())}

    @classmethod
    def from_json(cls, document: Any) -> "BufferSizes":
        """Restores the `BufferSizes` that `to_json` stored.

        Args:
          document: result of `to_json`, perhaps read from a JSON file. Sizes far above
            what their first batch needs are dropped.

        Raises:
          ValueError: if the document is not from `to_json`.
        """
        sizes = cls()
        try:
            # Older documents have more entries per key. JSON turns tuples into lists.
            for key, numbers, *_ in document["buffers"]:
                key = tuple((str(name), int(samples)) for name, samples in key)
                numbers = [max(1, int(n)) for n, _ in zip(numbers, key, strict=True)]
                sizes._sizes[key] = numbers
                sizes._unproven.add(key)
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            raise invalid(
                "te.inputs.BufferSizes.from_json: document",
                "be from BufferSizes.to_json",
                document,
            ) from error
        return sizes

    @property
    def num_combinations(self) -> int:
        """Distinct combinations of sizes so far. A step compiles once for each."""
        return len(self._combinations)

    def choose(self, demands: Sequence[RaggedDemand]) -> list[int]:
        """Chooses buffer sizes that hold the batch, in ids per shard.

        Args:
          demands: demands for all ragged features in one batch.

        Warns:
          UserWarning: at each growth after the third, naming the features that grew.
        """
        if not demands:
            return []
        key = tuple((d.feature_name, d.samples_per_shard) for d in demands)
        sizes = self._sizes.get(key)
        if key in self._unproven and any(map(_is_excessive, demands, sizes or [])):
            sizes = None
        self._unproven.discard(key)
        if sizes is None:
            sizes = list(map(_first_size, demands))
        elif outgrown := [
            d for d, n in zip(demands, sizes, strict=True) if d.num_ids > n
        ]:
            sizes = list(map(_grown_size, demands, sizes))
            self._num_growths += 1
            if self._num_growths > _QUIET_GROWTHS:
                _warn_of_growth(dict(zip(demands, sizes, strict=True)), outgrown)
        self._sizes[key] = sizes
        # A step also recompiles if the sizes of a key grow, so count pairs of key and
        # sizes.
        self._combinations.add(
            tuple((*feature, n) for feature, n in zip(key, sizes, strict=True))
        )
        return list(sizes)  # A copy: the stored list must not change.


def _first_size(demand: RaggedDemand) -> int:
    size = _expected_size(demand)
    if size is not None and size >= demand.num_ids:
        return size
    return _round_up(max(demand.num_ids, demand.usual_ids))


def _grown_size(demand: RaggedDemand, size: int) -> int:
    factor = _GROWTH_FACTOR if demand.num_ids > size else 1
    num_ids = math.ceil(demand.num_ids * factor)
    return max(size, _round_up(max(num_ids, demand.usual_ids)))


def _is_excessive(demand: RaggedDemand, size: int) -> bool:
    return size > _MAX_EXCESS * max(demand.num_ids, demand.samples_per_shard)


def _expected_size(demand: RaggedDemand) -> int | None:
    """Converts `expected_valence` to ids per shard. None means it is not set."""
    if demand.expected_valence is None:
        return None
    return max(1, round(demand.expected_valence * demand.samples_per_shard))


def _round_up(size: int) -> int:
    """Rounds a size up, so that similar streams share sizes."""
    # The step is an eighth of the largest power of two up to the size, but at least 8.
    step = max(_SMALLEST_BUFFER, 1 << max(0, size.bit_length() - 4))
    return max(1, -(-size // step)) * step


def _warn_of_growth(
    sizes: dict[RaggedDemand, int], outgrown: Sequence[RaggedDemand]
) -> None:
    fixes = [
        f"{sizes[demand] / demand.samples_per_shard:.3g} for {demand.feature_name!r}"
        for demand in outgrown
    ]
    warnings.warn(
        "Ragged features outgrew their buffers again, so the step recompiles. Set "
        "FeatureConfig.expected_valence, the ids per sample with headroom, to "
        f"{', '.join(fixes)}.",
        stacklevel=5,
    )


# Exchanges need equal names in all processes. Objects have no common name, but every
# process first uses them in the same order.
_numbers: weakref.WeakKeyDictionary[BufferSizes, int] = weakref.WeakKeyDictionary()
_new_numbers = itertools.count(1)


def choose_sizes(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None, num_parts: int
) -> list[int]:
    """Chooses buffer sizes in ids per shard.

    If `sizes` is None, each batch has its own sizes. `num_parts` is 1 if each process
    passes the whole batch.
    """
    if num_parts > 1 and demands:
        demands = _agreed(demands, sizes)
    if sizes is not None:
        return sizes.choose(demands)
    chosen = []
    for demand in demands:
        size = _expected_size(demand) or _SMALLEST_BUFFER
        while size < demand.num_ids:
            size *= 2
        chosen.append(size)
    return chosen


def _agreed(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None
) -> list[RaggedDemand]:
    """Combines the demands of all processes.

    The processes must use their `BufferSizes` in the same order.
    """
    if distributed.num_processes() == 1:
        raise RuntimeError(
            "Ragged features with samples='process' must be prepared in the training "
            "process, which agrees on their sizes with other processes, but this is a "
            "loader process; send its ids to the training process and prepare there."
        )
    number = 0
    if sizes is not None:
        if sizes not in _numbers:
            _numbers[sizes] = next(_new_numbers)
        number = _numbers[sizes]
    # JSON has turned the tuples into lists.
    by_process = [
        [RaggedDemand(*demand) for demand in process_demands]
        for process_demands in distributed.exchange(
            f"sizes of ragged features {number}", demands
        )
    ]
    features = [
        [(demand.feature_name, demand.samples_per_shard) for demand in process_demands]
        for process_demands in by_process
    ]
    # Every process sees the same lists, so all raise together and none waits.
    for process, process_features in enumerate(features):
        if process_features != features[0]:
            text = (
                "All processes must have the same ragged features and numbers of "
                f"samples per device, got {dict(features[0])} on process 0 and "
                f"{dict(process_features)} on process {process}."
            )
            raise about(ValueError(text), "features", process_features)
    return [
        same_feature[0]._replace(
            num_ids=max(demand.num_ids for demand in same_feature),
            **{
                name: sum(getattr(demand, name) for demand in same_feature)
                for name in ("num_samples", "valence_sum", "valence_square_sum")
            },
        )
        for same_feature in zip(*by_process, strict=True)
    ]
