"""The same training with rows on the host, and with all rows on the devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tests.conftest import mesh_of

functional = te.functional


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def train(tables, slots, batch, plan):
    """Returns tables and slots after a step, its activations and missing rows."""
    result = functional.lookup(tables, batch, plan)
    cotangents = jax.tree.map(lambda x: jnp.tanh(x) + 0.1, result.activations)
    gradients = functional.compute_gradients(result.routing, cotangents, plan)
    tables, slots = functional.apply_gradients(tables, slots, gradients, plan)
    return tables, slots, result.activations, result.stats.missing_rows


@functools.partial(jax.jit, static_argnames="plan")
def evaluate(tables, batch, plan):
    """Returns the activations of a batch, and the missing rows."""
    result = functional.lookup(tables, batch, plan)
    return result.activations, result.stats.missing_rows


@dataclasses.dataclass(kw_only=True)
class Run:
    """Tables and slots of a plan, and what its steps have returned."""

    plan: te.EmbeddingPlan
    seed: int = 0
    outputs: list = dataclasses.field(default_factory=list)
    missing: int = 0

    def __post_init__(self):
        self.tables = functional.init_tables(self.plan, jax.random.key(self.seed))
        self.slots = functional.init_slots(self.tables, self.plan)

    @property
    def hosts(self):
        """The rows on the host, by stack."""
        hosts = {name: getattr(x, "host", None) for name, x in self.tables.items()}
        return {name: host for name, host in hosts.items() if host}

    def batches(self, batches):
        """Yields batches whose rows are on the devices."""
        feed = functional.host_rows(
            batches, self.tables, self.plan, features_of=lambda batch: batch
        )
        try:
            for batch, bring in feed:
                self.tables, self.slots = bring(self.tables, self.slots)
                yield batch
        finally:
            feed.close()

    def train(self, batch):
        """Trains on a batch."""
        self.tables, self.slots, output, missing = train(
            self.tables, self.slots, batch, self.plan
        )
        self._record(output, missing)

    def evaluate(self, batch):
        """Looks a batch up."""
        self._record(*evaluate(self.tables, batch, self.plan))

    def _record(self, output, missing):
        self.outputs.append(output)
        self.missing += sum(map(int, missing.values()))

    def state(self):
        """Returns all rows, all of the optimizer's state, and all activations."""
        return {
            "tables": functional.unstack_tables(self.tables, self.plan),
            "slots": functional.slot_values(self.slots, self.plan, "all"),
            "outputs": jax.tree.map(own_part, self.outputs),
        }


def twins(config_of, batches_of, placement, num_devices=1, num_steps=12, **options):
    """Trains with rows on the host and on the devices, and compares all bits.

    Args:
        config_of: Function of a placement to a feature config.
        batches_of: Function of a plan and a number to that many batches.
        placement: Of the first run; the second has `te.Sharded()`.
        num_devices: Of both.
        num_steps: Of both.
        **options: Of `te.make_plan`.

    Returns:
        The run with rows on the host.
    """
    runs = []
    for place in (placement, te.Sharded()):
        plan = te.make_plan(config_of(place), mesh_of(num_devices), **options)
        run = Run(plan=plan)
        for batch in run.batches(batches_of(plan, num_steps)):
            run.train(batch)
        runs.append(run)
    host, devices = runs
    assert host.hosts and not devices.hosts
    assert host.missing == 0
    check_equal(host.state(), devices.state())
    return host


def own_part(array):
    """Returns an array's parts on the devices of this process."""
    parts = {str(x.index): np.asarray(x.data) for x in array.addressable_shards}
    return np.concatenate([parts[index] for index in sorted(parts)])


def check_equal(first, second):
    """Checks that two nests have the same arrays, bit for bit."""
    first, tree = jax.tree_util.tree_flatten_with_path(first)
    second, tree_of_second = jax.tree_util.tree_flatten_with_path(second)
    assert tree == tree_of_second
    different = [
        (jax.tree_util.keystr(path), np.sum(bits(a) != bits(b)))
        for (path, a), (_, b) in zip(first, second, strict=True)
        if not np.array_equal(bits(a), bits(b))
    ]
    assert not different, different


def bits(array):
    """Returns the bytes of an array, by element."""
    array = np.asarray(array)
    flat = np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def zipf_ids(draw, shape, num_rows, exponent=1.2):
    """Draws int32 ids of a table, a few of them often."""
    ids = draw.zipf(exponent, shape) % num_rows
    # Neighbours in rank are not neighbours in the table.
    return (ids * 7919 % num_rows).astype(np.int32)
