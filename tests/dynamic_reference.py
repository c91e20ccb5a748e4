"""Dynamic tables in plain Python: the judge of the traced directory."""

import dataclasses
from typing import Any

import numpy as np

import tpu_embedding as te
from tpu_embedding.rows.id_mixing import mix_ids

SLOTS = 64


@dataclasses.dataclass
class Place:
    """A place of a bucket: the mixed id that has it, or None."""

    key: tuple[int, int] | None = None
    last_use: int = 0
    count: int = 0


def mixed(ids) -> dict[int, tuple[int, int]]:
    """Returns the mixed words of each id."""
    ids = np.asarray(sorted(set(ids)), np.uint64)
    high, low = (ids >> np.uint64(32)).astype(np.uint32), ids.astype(np.uint32)
    words = zip(*(x.tolist() for x in mix_ids(high, low)), strict=True)
    return dict(zip(ids.tolist(), words, strict=True))


def lowbias(number: int) -> int:
    number = ((number ^ (number >> 16)) * 0x7FEB352D) % 2**32
    number = ((number ^ (number >> 15)) * 0x846CA68B) % 2**32
    return number ^ (number >> 16)


class DynamicTable:
    """One dynamic table.

    Attributes:
      dynamic: its vocabulary.
      buckets: lists of places.
      clock: number of the step.
      sketch: bucket and lane to epoch and count.
      ids: mixed words to id.
      rows: id to row.
      squares: id to the sum of squared gradients, as Adagrad keeps it.
      gradients: id to the sum of this step's gradients.
    """

    def __init__(self, dynamic: te.Dynamic, initial_rows: Any):
        self.dynamic = dynamic
        self.initial_rows = initial_rows
        num_buckets = -(-dynamic.capacity // SLOTS)
        self.buckets = [[Place() for _ in range(SLOTS)] for _ in range(num_buckets)]
        self.clock = 1
        self.sketch: dict[tuple[int, int], tuple[int, int]] = {}
        self.ids: dict[tuple[int, int], int] = {}
        self.rows: dict[int, np.ndarray] = {}
        self.squares: dict[int, np.ndarray] = {}
        self.gradients: dict[int, np.ndarray] = {}

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Returns the sum of the rows of each sample; ids without a row add nothing."""
        zeros = np.zeros_like(self.initial_rows(np.zeros((1, 2)))[0])
        rows = [self.rows.get(x, zeros) for x in ids.ravel().tolist()]
        return np.stack(rows).reshape(*ids.shape, -1).sum(axis=-2)

    def add_gradients(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        """Adds the gradient of each sample to those of its ids that have a row."""
        for of_sample, gradient in zip(ids.tolist(), gradients, strict=True):
            for x in of_sample:
                if x in self.rows:
                    self.gradients[x] = self.gradients.get(x, 0) + gradient

    def end_step(self, sgd_rate: float) -> None:
        """Updates the rows by stochastic gradient descent, and the squares."""
        for x, gradient in self.gradients.items():
            self.rows[x] = self.rows[x] - np.float32(sgd_rate) * gradient
            self.squares[x] = self.squares[x] + gradient * gradient
        self.gradients = {}
        self.clock += 1

    def find(self, key: tuple[int, int]) -> tuple[int, int] | None:
        """Returns bucket and lane of a mixed id."""
        bucket = key[0] * len(self.buckets) >> 32
        for lane, place in enumerate(self.buckets[bucket]):
            if place.key == key:
                return bucket, lane
        return None

    def insert(self, ids: list[int], only_found: list[int], now: int | None):
        """Inserts a set of ids; returns counts, and the ids whose rows start."""
        now = self.clock if now is None else now
        words = mixed([*ids, *only_found])
        known = {x for x in words if self.find(words[x]) is not None}
        stats = dict(hits=sum(x in known for x in [*ids, *only_found]))
        for x in known:
            bucket, lane = self.find(words[x])
            place = self.buckets[bucket][lane]
            place.count += place.last_use != now
            place.last_use = now
        unknown = sorted(set(ids) - known, key=words.__getitem__)
        admitted = self._admit([words[x] for x in unknown], now)
        started, evictions, no_place = [], 0, 0
        by_bucket: dict[int, list[int]] = {}
        for x, is_admitted in zip(unknown, admitted, strict=True):
            if is_admitted:
                bucket = words[x][0] * len(self.buckets) >> 32
                by_bucket.setdefault(bucket, []).append(x)
        for bucket, new in by_bucket.items():
            free = self._free_places(self.buckets[bucket], now)
            for x, lane in zip(new, free, strict=False):
                place = self.buckets[bucket][lane]
                evictions += place.key is not None
                if place.key is not None:
                    evicted = self.ids.pop(place.key)
                    del self.rows[evicted], self.squares[evicted]
                self.buckets[bucket][lane] = Place(words[x], now, 1)
                self.ids[words[x]] = x
                started.append(x)
            no_place += max(0, len(new) - len(free))
        if started:
            rows = self.initial_rows([words[x] for x in started])
            self.rows |= dict(zip(started, rows, strict=True))
            squares = np.full_like(rows, 0.1)
            self.squares |= dict(zip(started, squares, strict=True))
        stats |= dict(
            ids=len(ids) + len(only_found),
            inserts=len(started),
            evictions=evictions,
            not_admitted=len(set(words) - known) - sum(admitted),
            no_place=no_place,
            used_rows=len(self.ids),
        )
        return stats, started

    def _free_places(self, places: list[Place], now: int) -> list[int]:
        def value(lane: int) -> Any:
            place = places[lane]
            if place.key is None:
                return (0, 0, 0, lane)
            age = max(0, now - place.last_use)
            match self.dynamic.evict:
                case te.dynamic.LeastFrequentlyUsed(half_life):
                    halvings = 0 if half_life is None else min(31, age // half_life)
                    return (1, place.count >> halvings, place.last_use, lane)
            return (1, place.last_use, 0, lane)

        def is_free(place: Place) -> bool:
            if place.key is None:
                return True
            if place.last_use == now or self.dynamic.evict is None:
                return False
            match self.dynamic.evict:
                case te.dynamic.TimeToLive(ttl):
                    return now - place.last_use > ttl
            return True

        free = [lane for lane in range(SLOTS) if is_free(places[lane])]
        return sorted(free, key=value)

    def _admit(self, keys: list[tuple[int, int]], now: int) -> list[bool]:
        match self.dynamic.admit:
            case te.dynamic.AdmitWithProbability(probability):
                limit = min(int(probability * 2**32), 2**32 - 1)
                return [
                    probability == 1 or lowbias(a ^ lowbias(b ^ lowbias(now))) < limit
                    for a, b in keys
                ]
            case te.dynamic.AdmitAfter(count, window):
                return self._count(keys, count, now // window if window else 0)
        return [True] * len(keys)

    def _count(self, keys, count, epoch):
        counters = []
        for a, b in keys:
            bucket = a * len(self.buckets) >> 32
            counters.append({(bucket, b & 127), (bucket, (b >> 7) & 127)})
        totals: dict[tuple[int, int], int] = {}
        for of_id in counters:
            for counter in of_id:
                old_epoch, old = self.sketch.get(counter, (0, 0))
                start = old if old_epoch == epoch else 0
                totals[counter] = totals.get(counter, start) + 1
        for counter, total in totals.items():
            self.sketch[counter] = (epoch, min(255, total))
        return [min(totals[c] for c in of_id) >= count for of_id in counters]
