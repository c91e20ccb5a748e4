"""The interface of backends: the core can call one that it has never seen."""

import collections
import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.plan.backend import Backend, BackendOptions

PACKAGE = pathlib.Path(te.__file__).parent
WIRING = {
    "__init__.py",
    "plan/backend.py",
    "plan/make_plan.py",
    "checkpoint/imports/opening.py",  # An argument of the public API.
}
"""Files that may name the vertical."""

calls = collections.Counter()
"""Methods of `Counting` that were traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Backend):
    """Leaves all steps to the core, on rows that are dealt to three banks."""

    lookups: str = "counting"
    updates: str = "counting"

    def prepare_ids(self, keys, poolings, stack, *, are_joined=False):
        calls["prepare_ids"] += 1
        return jnp.sum(keys)[None]

    def look_up(self, table, ids, poolings, otherwise, stack):
        calls["look_up"] += 1
        assert ids.shape == (1,)
        activations, *_ = otherwise(table)
        return activations, jnp.int32(0), None

    def update(self, table, state, gradient, otherwise, stack, only_if=None):
        calls["update"] += 1
        assert only_if is None
        routing = gradient.open().routing
        assert routing.sent is None and routing.backend_ids.shape == (1,)
        return otherwise(table, state)


class CountingOptions(BackendOptions):
    def choose(self, stack, mesh):
        num_rows = 3 * -(-stack.rows_per_shard // 3)
        layout = dataclasses.replace(stack.layout, num_rows=num_rows, banks=3)
        backend = Counting(reason=f"{num_rows} rows")
        return dataclasses.replace(
            stack, backend=backend, layout=layout, rows_per_shard=num_rows
        )


def train(backend, num_devices):
    table = te.TableConfig(vocabulary_size=40, dim=4, combiner="sum", name="t")
    plan = te.make_plan(
        {"f": te.FeatureConfig(table=table)},
        mesh_of(num_devices),
        optimizer=te.optimizers.adagrad(0.1),
        backend=backend,
    )
    ids = {"f": np.random.default_rng(0).integers(0, 40, (6, 2), np.int32)}

    @jax.jit
    def step(tables, slots):
        result = te.functional.lookup(tables, ids, plan)
        gradients = te.functional.compute_gradients(
            result.routing, result.activations, plan
        )
        gradients = te.gradients.add(gradients, gradients)
        new = te.functional.apply_gradients(tables, slots, gradients, plan)
        return new, result.activations, result.stats.rounds

    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    (tables, _), activations, rounds = step(tables, slots)
    values = activations["f"], te.functional.unstack_tables(tables, plan)["t"]
    return plan, rounds, values


@pytest.mark.full
def test_the_core_calls_a_backend_that_it_does_not_know():
    calls.clear()
    plan, rounds, values = train(CountingOptions(), 2)
    assert plan.stacks[0].layout.banks == 3
    # The sum of two gradients prepares the ids of both.
    assert calls == {"prepare_ids": 2, "look_up": 1, "update": 1}
    assert rounds["stack_0"] == 0
    _, _, expected = train("xla", 2)
    jax.tree.map(np.testing.assert_array_equal, values, expected)
    # The reason of a backend is not compared.
    assert Counting(reason="a") == Counting(reason="b") != Backend(reason="a")
    assert len({Counting(reason="a"), Counting(reason="b")}) == 1


def test_only_the_wiring_names_sparse_cores():
    apart = "sparse_core", "tools", "hardware.py"
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")]
    found = {
        str(path)
        for path in files
        if path.parts[0] not in apart
        and re.search("sparse_?core", (PACKAGE / path).read_text(), re.IGNORECASE)
    }
    assert found == WIRING
