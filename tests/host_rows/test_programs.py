"""Random programs, with rows on the host and with all rows on the devices."""

import functools

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows.test_exact import RULES
from tests.host_rows.twins import Run, check_equal, zipf_ids

PROGRAMS_PER_LAYOUT = 10
"""Programs for each draw of tables, whose steps compile once."""
STEPS = 12


class Layout:
    """Tables, features and their two runs, drawn from a seed.

    Runs on the devices of `mesh`, if there is one.
    """

    def __init__(self, seed, mesh=None):
        draw = np.random.default_rng((0, seed))
        rule = RULES[list(RULES)[draw.integers(len(RULES))]]
        num_devices = int(draw.choice([1, 2, 3, 8]))
        mesh = mesh or mesh_of(num_devices)
        dtype = str(draw.choice(["float32", "bfloat16"]))
        self.batch = int(draw.integers(1, 17))
        self.sizes = {}
        placement = {}
        window = int(draw.choice([1, 2, 4, 20]))
        for i in range(draw.integers(1, 4)):
            # XLA:CPU computes a shard of a single number in another order.
            self.sizes[f"t{i}"] = max(int(draw.integers(1, 400)), 2 * mesh.size)
            # Three batches, and the pinned one of a loop that waits.
            least = mesh.size * 4 * 3 * self.batch
            cache_rows = int(draw.choice([least, 2 * least, 10 * least]))
            placement[f"t{i}"] = te.HostRows(cache_rows=cache_rows, window=window)
            if i and draw.random() < 0.2:
                placement[f"t{i}"] = te.Sharded()
        # A table on the devices has a stack of its own, also in the twin.
        dims = [
            int(draw.choice([1, 4, 6])) if place != te.Sharded() else 3
            for place in placement.values()
        ]
        # Some batches lack the other features.
        self.some = list(self.sizes)[: draw.integers(1, len(self.sizes) + 1)]
        capacity = [None, None, 2][draw.integers(3)]

        def plan_of(placement):
            tables = [
                te.TableConfig(
                    vocabulary_size=size,
                    dim=dim,
                    name=name,
                    combiner="sum",
                    dtype=dtype,
                    placement=placement[name],
                )
                for (name, size), dim in zip(self.sizes.items(), dims, strict=True)
            ]
            return te.make_plan(
                {table.name: te.FeatureConfig(table=table) for table in tables},
                mesh,
                optimizer=rule,
                capacity=capacity,
            )

        self.host = Run(plan=plan_of(placement))
        for host in self.host.hosts.values():
            host.exchange_rows = int(draw.choice([0, 8]))
        self.twin = Run(plan=plan_of(dict.fromkeys(self.sizes, te.Sharded())))

    def batches(self, draw, number, is_large=False):
        """Draws batches; large ones have as many different rows as ids."""
        exponent = float(draw.choice([1.1, 1.5, 2.5]))
        shape = (self.batch, 3)
        batches = []
        for _ in range(number):
            batch = {
                name: zipf_ids(draw, shape, n, exponent)
                for name, n in self.sizes.items()
            }
            if is_large:
                start = draw.integers(0, 400)
                ids = np.arange(shape[0] * shape[1]).reshape(shape) + start
                batch = {
                    name: (ids % n).astype(np.int32) for name, n in self.sizes.items()
                }
            names = self.some if draw.random() < 0.2 else batch
            batch = {name: batch[name] for name in names}
            if jax.process_count() > 1 and draw.random() < 0.8:
                batch = te.inputs.shard_batch(batch, self.host.plan)
            batches.append(batch)
        return batches


layout_of = functools.cache(Layout)


class Program:
    """Operations on both runs of a layout, drawn from a seed."""

    def __init__(self, seed, directory, mesh=None):
        self.layout = layout_of(seed // PROGRAMS_PER_LAYOUT, mesh)
        self.host, self.twin = self.layout.host, self.layout.twin
        self.draw = np.random.default_rng((1, seed))
        self.directory, self.num_saves = directory, 0

    def run(self):
        """Trains in several loops, with operations in between."""
        data = self.layout.batches(self.draw, STEPS)
        for i in range(STEPS):
            if self.draw.random() < 0.1:
                (data[i],) = self.layout.batches(self.draw, 1, is_large=True)
        while data:
            data = data[self.loop(data) :]
            self.operate()
        self.compare()

    def loop(self, data):
        """Returns how many batches a loop took, until it broke or a batch was large."""
        number, is_ahead = 0, self.draw.random() < 0.3
        drawn = []
        try:
            for batch in self.host.batches(data):
                number += 1
                drawn.append(batch)
                if len(drawn) == 1 and self.draw.random() < 0.3:
                    self.operate()
                if is_ahead and len(drawn) < 2:
                    continue
                self.train(drawn.pop(0))
                if self.draw.random() < 0.1:
                    break
                if self.draw.random() < 0.1:
                    self.operate()
        except (ValueError, RuntimeError) as error:  # Here, or in another process.
            assert "do not fit" in str(error)
            number += 1
        for batch in drawn:  # The last one, one behind.
            self.train(batch)
        return number

    def train(self, batch):
        self.host.train(batch)
        self.twin.train(batch)

    def operate(self):
        operations = [
            self.evaluate,
            self.evaluate,
            self.compare,
            self.save,
            self.restore,
            self.set_tables,
            self.set_slots,
        ]
        operations[self.draw.integers(len(operations))]()

    def evaluate(self):
        batches = self.layout.batches(self.draw, int(self.draw.integers(1, 6)))
        for batch in self.host.batches(batches):
            self.host.evaluate(batch)
            self.twin.evaluate(batch)
            if self.draw.random() < 0.1:
                break

    def compare(self):
        assert self.host.missing == 0
        check_equal(self.host.state(), self.twin.state())
        self.host.outputs.clear()
        self.twin.outputs.clear()

    def save(self):
        """Each run saves."""
        self.num_saves += 1
        for run in (self.host, self.twin):
            state = {"tables": run.tables, "slots": run.slots}
            te.save(self.path(run), state, plan=run.plan)

    def path(self, run):
        return self.directory / f"{self.num_saves}_{run is self.host}"

    def restore(self):
        """Each run restores the last state of itself, or of the other run."""
        if not self.num_saves:
            return
        other = self.draw.random() < 0.5
        for run in (self.host, self.twin):
            state = {"tables": run.tables, "slots": run.slots}
            source = self.path(self.twin if (run is self.host) == other else self.host)
            state = te.restore(source, state, plan=run.plan)
            run.tables, run.slots = state["tables"], state["slots"]

    def set_tables(self):
        name = str(self.draw.choice(list(self.layout.sizes)))
        rows = te.functional.unstack_tables(self.twin.tables, self.twin.plan)[name]
        rows = np.roll(np.asarray(rows, np.float32), 1, axis=0)
        for run in (self.host, self.twin):
            run.tables, run.slots = te.functional.with_table_values(
                run.tables, {name: rows}, run.plan, run.slots
            )

    def set_slots(self):
        values = te.functional.slot_values(self.twin.slots, self.twin.plan)
        name = str(self.draw.choice(list(self.layout.sizes)))
        if not values.get(name):
            return
        values = {name: {k: np.roll(v, 1, axis=0) for k, v in values[name].items()}}
        for run in (self.host, self.twin):
            run.slots = te.functional.with_slot_values(run.slots, values, run.plan)


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(10), marks=pytest.mark.full(every_case=True), id="some"),
        pytest.param(range(10, 200), marks=pytest.mark.exhaustive, id="many"),
    ],
)
def test_random_programs(seeds, tmp_path):
    for seed in seeds:
        if seed % PROGRAMS_PER_LAYOUT == 0:
            jax.clear_caches()  # Compiled programs map memory.
            layout_of.cache_clear()
        (tmp_path / str(seed)).mkdir()
        try:
            Program(seed, tmp_path / str(seed)).run()
        except Exception as error:
            error.add_note(f"Program {seed}")
            raise
