"""Random programs on dynamic tables, on several devices and in plain Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.dynamic.dynamic_reference import DynamicTable
from tpu_embedding.dynamic.new_rows import initial_values_of_ids

functional = te.functional
STEPS = 8
LOGS_PER_LAYOUT = 10
"""Logs for each draw of tables and features, whose programs compile once."""
POLICIES = [
    te.dynamic.LeastRecentlyUsed(),
    te.dynamic.TimeToLive(2),
    te.dynamic.LeastFrequentlyUsed(),
    te.dynamic.LeastFrequentlyUsed(half_life=2),
    None,
]
ADMISSIONS = [
    None,
    None,
    te.dynamic.AdmitAfter(2),
    te.dynamic.AdmitAfter(2, window=3),
]
SGD_RATE = 0.125
OPTIMIZERS = [
    te.optimizers.sgd(SGD_RATE),
    te.optimizers.adagrad(0.1),
    te.optimizers.adam(0.1),
]


class Layout:
    """Tables and features, drawn from a seed."""

    def __init__(self, seed):
        draw = np.random.default_rng((0, seed))
        policy = dict(
            evict=POLICIES[draw.integers(len(POLICIES))],
            admit=ADMISSIONS[draw.integers(len(ADMISSIONS))],
        )
        dim = self.dim = int(draw.choice([4, 16]))
        capacities = draw.choice([64, 100, 256, 700], size=draw.integers(1, 3))
        self.tables = [
            te.TableConfig(
                vocabulary_size=te.Dynamic(capacity=int(capacity), **policy),
                dim=dim,
                name=f"dynamic_{i}",
                combiner="sum",
            )
            for i, capacity in enumerate(capacities)
        ]
        static = te.TableConfig(vocabulary_size=50, dim=dim, name="static")
        self.config = {"static": te.FeatureConfig(table=static)}
        self.features = []
        for table in self.tables:
            for j in range(draw.integers(1, 3)):
                name = f"{table.name}_{j}"
                find_only = bool(j and draw.random() < 0.5)
                self.config[name] = te.FeatureConfig(table=table, find_only=find_only)
                self.features.append((name, table, find_only))
        self.optimizer = OPTIMIZERS[draw.integers(len(OPTIMIZERS))]
        self.gives_now = bool(draw.random() < 0.3)
        self.size = int(draw.integers(5, 120))


layout_of = functools.cache(Layout)


@functools.cache
def plan_of(layout, num_devices):
    return te.make_plan(layout.config, mesh_of(num_devices), optimizer=layout.optimizer)


class Log:
    """The batches of each step, drawn from a seed.

    Gradients are small multiples of 1/8. Their sums are exact in any order.
    """

    def __init__(self, seed, layout):
        draw = np.random.default_rng((1, seed))
        pool = draw.integers(0, 2**64 - 1, 3000, dtype=np.uint64)
        spread = int(draw.choice([50, 400, 3000]))
        exponent = float(draw.choice([1.1, 1.3, 2.0]))
        size = layout.size
        self.steps = []
        now = 1
        for _ in range(STEPS):
            now += int(draw.integers(0, 3))
            calls = []
            for _ in range(1 + (draw.random() < 0.3)):
                batch = {"static": draw.integers(0, 50, size).astype(np.int32)}
                for name, _, _ in layout.features:
                    rank = np.minimum(draw.zipf(exponent, (size, 2)), spread) - 1
                    batch[name] = pool[
                        rank + int(draw.integers(0, 50)) * (spread < 3000)
                    ]
                cotangents = {
                    name: draw.integers(-8, 9, (size, layout.dim)).astype(np.float32)
                    / 8
                    for name in batch
                }
                calls.append((batch, cotangents))
            self.steps.append((calls, now if layout.gives_now else None))


@dataclasses.dataclass
class Run:
    """What a program does on some devices, and must be equal on any number of them.

    Attributes:
      stats: counts of each call.
      activations: output of each call.
      states: ids of each table after each step.
      values: rows of each table at the end.
      slots: slot variables of each table at the end.
    """

    stats: list
    activations: list
    states: list
    values: dict
    slots: dict


def run(layout, log, num_devices):
    """Runs a program."""
    plan = plan_of(layout, num_devices)
    tables = functional.init_tables(plan, jax.random.key(0))
    slots = functional.init_slots(tables, plan)
    result = Run([], [], [], {}, {})
    for calls, now in log.steps:
        gradients = []
        for batch, cotangents in calls:
            prepared = te.inputs.prepare_features(batch, plan)
            inserted = functional.insert_ids(
                tables, slots, prepared, plan, None if now is None else jnp.uint32(now)
            )
            tables, slots = inserted.tables, inserted.slots
            result.stats.append(
                {
                    name: jax.tree.map(int, vars(counts))
                    for name, counts in inserted.stats.items()
                }
            )
            found = functional.lookup(tables, inserted.features, plan)
            result.activations.append(jax.tree.map(np.asarray, found.activations))
            gradients.append(
                functional.compute_gradients(found.routing, cotangents, plan)
            )
        tables, slots = functional.apply_gradients(
            tables, slots, te.gradients.add(*gradients), plan
        )
        result.states.append(functional.dynamic_rows(tables, plan))
    values = functional.unstack_tables(tables, plan)
    of_slots = functional.slot_values(slots, plan)
    for name, rows in result.states[-1].items():
        result.values[name] = np.asarray(values[name])[rows.rows]
        result.slots[name] = {
            slot: np.asarray(x)[rows.rows] if np.ndim(x) else np.asarray(x)
            for slot, x in of_slots[name].items()
        }
    return result


def check_against_reference(layout, log, found):
    """Compares a run on one device with plain Python and NumPy."""
    models = {
        table.name: DynamicTable(table.vocabulary_size, initial_rows_of(layout, table))
        for table in layout.tables
    }
    outputs = iter(zip(found.stats, found.activations, strict=True))
    uses_sgd = layout.optimizer == OPTIMIZERS[0]
    for (calls, now), state in zip(log.steps, found.states, strict=True):
        for batch, cotangents in calls:
            stats, activations = next(outputs)
            for name, model in models.items():
                ids, only = [], []
                features = [x for x in layout.features if x[1].name == name]
                for feature, _, find_only in features:
                    (only if find_only else ids).extend(batch[feature].ravel().tolist())
                expected, _ = model.insert(ids, only, now)
                of_table = {k: stats[name][k] for k in expected}
                assert of_table == expected, name
                for feature, *_ in features:
                    rows = model.lookup(batch[feature])
                    if uses_sgd:
                        np.testing.assert_array_equal(activations[feature], rows)
                    model.add_gradients(batch[feature], cotangents[feature])
        for name, model in models.items():
            rows = state[name]
            expected = {
                model.ids[place.key]: (64 * bucket + lane, place.last_use, place.count)
                for bucket, places in enumerate(model.buckets)
                for lane, place in enumerate(places)
                if place.key is not None
            }
            columns = (rows.natural_rows, rows.last_used, rows.counts)
            in_state = dict(
                zip(
                    rows.ids.tolist(),
                    zip(*(x.tolist() for x in columns), strict=True),
                    strict=True,
                )
            )
            assert in_state == expected, name
            model.end_step(SGD_RATE)
    for name, model in models.items():
        ids = found.states[-1][name].ids.tolist()
        if uses_sgd and ids:
            expected = np.stack([model.rows[x] for x in ids])
            np.testing.assert_array_equal(found.values[name], expected)
        if layout.optimizer == OPTIMIZERS[1] and ids:
            expected = np.stack([model.squares[x] for x in ids])
            (accumulators,) = found.slots[name].values()
            np.testing.assert_array_equal(accumulators, expected)


def initial_rows_of(layout, table):
    """Returns a function from mixed ids to the rows that they start with."""
    plan = plan_of(layout, 1)
    (stack,) = [s for s in plan.stacks if table.name in {t.name for t in s.tables}]
    position = [t.name for t in stack.tables].index(table.name)
    directory = functional.init_tables(plan, jax.random.key(0))[f"{stack.name}:ids"]

    def rows(words):
        size = 1024
        words = np.asarray(words, np.uint32)
        padded = np.zeros((size, 2), np.uint32)
        padded[: len(words)] = words
        tables = np.full(size, position, np.int32)
        rows = _initial_rows(*padded.T, tables, directory.init_keys, stack)
        return np.asarray(rows)[: len(words)]

    return rows


_initial_rows = jax.jit(initial_values_of_ids, static_argnums=4)


def check_program(seed, device_counts):
    """Compares one program with the reference, and its runs with each other."""
    layout = layout_of(seed // LOGS_PER_LAYOUT)
    log = Log(seed, layout)
    runs = [run(layout, log, n) for n in device_counts]
    check_against_reference(layout, log, runs[0])
    first = runs[0]
    for other in runs[1:]:
        assert other.stats == first.stats
        for state, other_state in zip(first.states, other.states, strict=True):
            for name, rows in state.items():
                for field in ("ids", "natural_rows", "last_used", "counts"):
                    np.testing.assert_array_equal(
                        getattr(rows, field), getattr(other_state[name], field)
                    )
        for field in ("activations", "values", "slots"):
            of_field = getattr(first, field), getattr(other, field)
            jax.tree.map(np.testing.assert_array_equal, *of_field)


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (10, 40))]
)
def test_random_programs(seed):
    check_program(seed, (1, 8) if seed else (2,))
