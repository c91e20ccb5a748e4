"""XLA:CPU copies the rows of a lookup in vectors, on one device and on several."""

import re

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.tiers import quick_cases


@pytest.mark.parametrize(
    ("dim", "num_devices"), quick_cases([(64, 1), (32, 2)], "64-1")
)
def test_rows_are_read_with_the_arithmetic_that_makes_vectors(dim, num_devices):
    table = te.TableConfig(vocabulary_size=1000, dim=dim, name="t")
    mesh = te.device_mesh(jax.devices()[:num_devices])
    plan = te.make_plan({"f": te.FeatureConfig(table=table)}, mesh=mesh)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    ids = te.inputs.shard_batch({"f": jnp.arange(64, dtype=jnp.int32)}, plan)
    lookup = jax.jit(te.functional.lookup, static_argnums=2)
    program = lookup.lower(tables, ids, plan).compile().as_text()
    rows_of = re.escape(f"{-(-1000 // num_devices)},{dim}]")
    reads = [
        computation
        for computation in program.split("\n\n")
        if re.search(rf"f32\[{rows_of}\S* parameter", computation)
        and " gather(" in computation
    ]
    assert reads
    assert all(" maximum(" in computation for computation in reads)
