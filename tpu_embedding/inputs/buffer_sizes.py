"""Chooses the static sizes of ragged features, equally on all processes of a job.

A compiled step needs buffers of a fixed size per ragged feature and shard. Each new
combination of sizes recompiles the step, so `BufferSizes` remembers sizes from batch to
batch and changes all of them at once.

Each process knows only the ids of its own samples. Processes with different sizes would
compile different programs and wait for each other forever. So for each batch, the
processes exchange their demands, and each chooses sizes from the demands of all. The
exchange takes some milliseconds in the thread that loads batches, and uses no device.
"""

import dataclasses
import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, Final

from tpu_embedding import distributed

_SMALLEST_BUFFER: Final = 8

_DEVIATIONS: Final = 6.0
"""Headroom above the mean number of ids of a shard, in standard deviations."""

_DEVIATIONS_PER_GROWTH: Final = 3.0
"""Extra headroom after each growth, because the last headroom was too small."""

_GROWTH_FACTOR: Final = 1.25
"""Least new size of an outgrown buffer per id to hold, because data may drift."""

_MAX_RESTORED: Final = 1024
"""Largest restored size per id of the first batch, because files may be forged."""

_QUIET_GROWTHS: Final = 3
"""Growths without a warning: a new stream of batches needs one or two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedDemand:
    """Facts about one ragged feature in one batch.

    Attributes:
      feature_name: name of the feature.
      expected_valence: see `FeatureConfig`.
      samples_per_shard: samples per shard, including padding.
      num_ids: ids of the fullest shard, which the buffer must hold.
      num_samples: samples of the batch.
      valence_sum: sum of the numbers of ids per sample.
      valence_square_sum: sum of their squares.
    """

    feature_name: str
    expected_valence: float | int | None
    samples_per_shard: int
    num_ids: int
    num_samples: int
    valence_sum: float
    valence_square_sum: float


class BufferSizes:
    """Buffer sizes of ragged features, remembered from batch to batch.

    Pass one object to all calls of `prepare_features`; `TPUEmbedding.prepare` uses the
    layer's object. A batch that fits the current sizes uses them. When a feature
    outgrows its buffer, the buffers of all ragged features are resized together, each
    with room for at least six standard deviations above the mean of all batches so far.
    A stationary stream thus settles after one or two compilations. No ids are ever
    lost, and buffers never shrink.

    A feature's first size comes from `FeatureConfig.expected_valence` if it is set, and
    otherwise from the first batch. Each batch size and each subset of the ragged
    features has its own sizes.

    The object lives on the host. It can be pickled; a loader process continues with its
    own copy. Prepare some batches before you start such processes, so that all begin
    with the same sizes.

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
        self._valences: dict[str, _Valence] = {}
        self._buffers: dict[tuple[tuple[str, int], ...], _Buffers] = {}
        self._combinations: set[tuple[tuple[str, int, int], ...]] = set()
        self._is_restored = False

    def to_json(self) -> dict[str, Any]:
        """Returns the sizes and the statistics of all batches as JSON values.

        Store them with a checkpoint. A loop that resumes with `from_json` pads its
        batches as before, so sums add in the same order and have the same bits.

        Example:
          >>> sizes = BufferSizes()
          >>> sizes.to_json()
          {'valences': {}, 'buffers': []}
          >>> BufferSizes.from_json(sizes.to_json()).num_growths
          0
        """
        valences = {name: dataclasses.astuple(v) for name, v in self._valences.items()}
        buffers = [(key, b.sizes, b.num_growths) for key, b in self._buffers.items()]
        return {"valences": valences, "buffers": buffers}

    @classmethod
    def from_json(cls, document: Any) -> "BufferSizes":
        """Returns the `BufferSizes` that `to_json` stored.

        If the stored sizes are far larger than the first batch needs, they are dropped.

        Args:
          document: result of `to_json`, which may have been read from a JSON file.

        Raises:
          ValueError: if the document is not from `to_json`.
        """
        sizes = cls()
        try:
            for name, (num_samples, *sums) in document["valences"].items():
                total, square_sum = map(float, sums)
                valence = _Valence(int(num_samples), total, square_sum)
                numbers = dataclasses.astuple(valence)
                if not valence.num_samples or not all(0 <= n < 2**63 for n in numbers):
                    raise ValueError(f"the statistics of {name!r}")
                sizes._valences[name] = valence
            for key, numbers, num_growths in document["buffers"]:
                key = tuple((str(name), int(number)) for name, number in key)
                numbers = [int(n) for n, _ in zip(numbers, key, strict=True)]
                if not all(0 < n < 2**31 for n in numbers):
                    raise ValueError(f"the sizes {numbers}")
                sizes._buffers[key] = _Buffers(numbers, min(int(num_growths), 64))
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as e:
            raise ValueError(
                f"Buffer sizes must be from BufferSizes.to_json, got {e!r:.200}."
            ) from e
        sizes._is_restored = True
        return sizes

    @property
    def num_combinations(self) -> int:
        """Distinct combinations of sizes so far. A step compiles once for each."""
        return len(self._combinations)

    @property
    def num_growths(self) -> int:
        """Number of times that a feature outgrew its buffer and all buffers grew."""
        return sum(buffers.num_growths for buffers in self._buffers.values())

    def choose(self, demands: Sequence[RaggedDemand]) -> list[int]:
        """Returns each feature's buffer size in ids per shard, enough for the batch.

        Args:
          demands: demands of all ragged features of one batch.

        Warns:
          UserWarning: at each growth after the third, naming the feature that grew.
        """
        if self._is_restored and not all(map(self._is_plausible, demands)):
            self._valences, self._buffers = {}, {}
        self._is_restored = False
        for demand in demands:
            valence = self._valences.setdefault(demand.feature_name, _Valence())
            valence.add(demand)
        key = tuple(
            (demand.feature_name, demand.samples_per_shard) for demand in demands
        )
        buffers = self._buffers.setdefault(key, _Buffers())
        sizes = buffers.sizes
        if sizes is None:
            sizes = []
            for demand in demands:
                size = _expected_size(demand)
                if size is None or size < demand.num_ids:
                    size = self._size(demand, False, _DEVIATIONS)
                sizes.append(size)
        elif any(d.num_ids > size for d, size in zip(demands, sizes, strict=True)):
            buffers.num_growths += 1
            deviations = _DEVIATIONS + _DEVIATIONS_PER_GROWTH * buffers.num_growths
            grown = [
                max(size, self._size(demand, demand.num_ids > size, deviations))
                for demand, size in zip(demands, sizes, strict=True)
            ]
            if buffers.num_growths > _QUIET_GROWTHS:
                _warn_of_growth(demands, sizes, grown, buffers.num_growths)
            sizes = grown
        buffers.sizes = sizes
        if demands:
            self._combinations.add(
                tuple((*feature, n) for feature, n in zip(key, sizes, strict=True))
            )
        return list(sizes)

    def _is_plausible(self, demand: RaggedDemand) -> bool:
        """Returns True if restored sizes are plausible for a batch."""
        limit = _MAX_RESTORED * max(demand.num_ids, demand.samples_per_shard)
        feature = (demand.feature_name, demand.samples_per_shard)
        sizes: list[float] = [
            dict(zip(key, buffers.sizes or [], strict=True)).get(feature, 0)
            for key, buffers in self._buffers.items()
        ]
        if (valence := self._valences.get(demand.feature_name)) is not None:
            sizes.append(valence.bound(demand.samples_per_shard, _DEVIATIONS))
        return all(size <= limit for size in sizes)

    def _size(self, demand: RaggedDemand, is_outgrown: bool, deviations: float) -> int:
        valence = self._valences[demand.feature_name]
        needed = demand.num_ids * (_GROWTH_FACTOR if is_outgrown else 1)
        usual = valence.bound(demand.samples_per_shard, deviations)
        return _round_up(math.ceil(max(needed, usual)))


def _size_of_batch(demand: RaggedDemand) -> int:
    """Returns the expected size, doubled until it holds the batch."""
    size = _expected_size(demand) or _SMALLEST_BUFFER
    while size < demand.num_ids:
        size *= 2
    return size


@dataclasses.dataclass
class _Buffers:
    """The current sizes for one set of features and batch sizes."""

    sizes: list[int] | None = None
    num_growths: int = 0


@dataclasses.dataclass
class _Valence:
    """Moments of a feature's number of ids per sample, over all batches."""

    num_samples: int = 0
    sum: float = 0.0
    square_sum: float = 0.0

    def add(self, demand: RaggedDemand) -> None:
        self.num_samples += demand.num_samples
        self.sum += demand.valence_sum
        self.square_sum += demand.valence_square_sum

    def bound(self, num_samples: int, deviations: float) -> float:
        """Returns an upper bound on the ids in some independent samples."""
        mean = self.sum / self.num_samples
        variance = max(0.0, self.square_sum / self.num_samples - mean**2)
        return num_samples * mean + deviations * math.sqrt(num_samples * variance)


def _expected_size(demand: RaggedDemand) -> int | None:
    """Returns the size from the feature's `expected_valence`, or None."""
    if demand.expected_valence is None:
        return None
    return max(1, round(demand.expected_valence * demand.samples_per_shard))


def _round_up(size: int) -> int:
    """Rounds a size up, so that slightly different streams share sizes.

    The result is a multiple of an eighth of the largest power of two up to the size,
    and of 8.
    """
    step = max(_SMALLEST_BUFFER, 1 << max(0, size.bit_length() - 4))
    return max(1, -(-size // step)) * step


def _warn_of_growth(
    demands: Sequence[RaggedDemand],
    sizes: Sequence[int],
    grown: Sequence[int],
    num_growths: int,
) -> None:
    changes, fixes = [], []
    for demand, size, new_size in zip(demands, sizes, grown, strict=True):
        if demand.num_ids > size:
            name = repr(demand.feature_name)
            changes.append(
                f"{name} had {demand.num_ids} ids on one device but room for {size}, "
                f"now {new_size}"
            )
            fixes.append(f"{new_size / demand.samples_per_shard:.3g} for {name}")
    warnings.warn(
        f"Ragged features outgrew their buffers, growth {num_growths}: "
        f"{'; '.join(changes)}. The step recompiles. To avoid this, set "
        "FeatureConfig.expected_valence, the ids per sample with headroom, to "
        f"{', '.join(fixes)}.",
        stacklevel=5,
    )


_numbers: weakref.WeakKeyDictionary[BufferSizes, int] = weakref.WeakKeyDictionary()
_new_numbers = itertools.count(1)


def choose_sizes(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None, num_parts: int
) -> list[int]:
    """Returns the buffer size of each ragged feature of a batch, in ids per shard.

    Args:
      demands: demands of all ragged features in this process's part of the batch.
      sizes: sizes of earlier batches. If None, each batch has its own.
      num_parts: number of parts that processes pass, 1 if each passes the whole batch.
    """
    if num_parts > 1 and demands:
        demands = _agreed(demands, sizes)
    if sizes is None:
        return [_size_of_batch(demand) for demand in demands]
    return sizes.choose(demands)


def _agreed(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None
) -> list[RaggedDemand]:
    """Returns the combined demands of all processes for the same batch.

    All processes must use their `BufferSizes` in the same order.

    Raises:
      RuntimeError: in a process that isn't part of the job, such as a loader.
      ValueError: if the processes have different features or numbers of samples.
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
    by_process = [
        [RaggedDemand(**demand) for demand in process_demands]
        for process_demands in distributed.exchange(
            f"sizes of ragged features {number}",
            [dataclasses.asdict(demand) for demand in demands],
        )
    ]
    features = [
        [(demand.feature_name, demand.samples_per_shard) for demand in process_demands]
        for process_demands in by_process
    ]
    for process, process_features in enumerate(features):
        if process_features != features[0]:
            raise ValueError(
                "All processes must have the same ragged features and numbers of "
                f"samples per device, got {dict(features[0])} on process 0 and "
                f"{dict(process_features)} on process {process}."
            )
    return [
        dataclasses.replace(
            same_feature[0],
            num_ids=max(demand.num_ids for demand in same_feature),
            **{
                name: sum(getattr(demand, name) for demand in same_feature)
                for name in ("num_samples", "valence_sum", "valence_square_sum")
            },
        )
        for same_feature in zip(*by_process, strict=True)
    ]
