"""Dynamic tables in plain Python: the judge of the traced directory."""

import dataclasses
from typing import Any

import numpy as np

import tpu_embedding as te
from tpu_embedding.dynamic.ids_64 import mix_ids

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


class DynamicTable:
    """One dynamic table.

    Attributes:
      dynamic: its vocabulary.
      buckets: lists of places.
      clock: number of the step.
      sketch: bucket and lane to window, epoch and count.
      num_counted: bucket to the number of ids counted in it.
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
        self.sketch: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.num_counted: dict[int, int] = {}
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
        self.clock = now = self.clock if now is None else now
        words = mixed([*ids, *only_found])
        known = {x for x in words if self.find(words[x]) is not None}
        stats = dict(hits=sum(x in known for x in [*ids, *only_found]))
        for x in known:
            bucket, lane = self.find(words[x])
            place = self.buckets[bucket][lane]
            place.count = self._decayed(place, now) + (place.last_use != now)
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

    def _decayed(self, place: Place, now: int) -> int:
        half_life = getattr(self.dynamic.evict, "half_life", None)
        age = max(0, now - place.last_use)
        return place.count >> (age // half_life if half_life else 0)

    def _free_places(self, places: list[Place], now: int) -> list[int]:
        def value(lane: int) -> Any:
            place = places[lane]
            if place.key is None:
                return (0, 0, 0, lane)
            if isinstance(self.dynamic.evict, te.dynamic.LeastFrequentlyUsed):
                return (1, self._decayed(place, now), place.last_use, lane)
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
        if self.dynamic.admit is None:
            return [True] * len(keys)
        return self._count(keys, self.dynamic.admit, now)

    def _count(self, keys, rule, now):
        ids_per_halving = 16 * max(1, rule.count - 1)
        window = now // rule.window if rule.window else 0
        counters, totals = [], {}
        for a, b in keys:
            bucket = a * len(self.buckets) >> 32
            counters.append({(bucket, b % 127), (bucket, b // 127 % 127)})
            epoch = self.num_counted.get(bucket, 0) // ids_per_halving
            for counter in counters[-1]:
                if counter not in totals:
                    old_window, old_epoch, old = self.sketch.get(counter, (0, 0, 0))
                    is_old = old_window != window
                    totals[counter] = 0 if is_old else old >> (epoch - old_epoch)
                totals[counter] += 1
                self.sketch[counter] = (window, epoch, min(255, totals[counter]))
        for a, _ in keys:
            bucket = a * len(self.buckets) >> 32
            self.num_counted[bucket] = self.num_counted.get(bucket, 0) + 1
        return [min(totals[c] for c in of_id) >= rule.count for of_id in counters]
