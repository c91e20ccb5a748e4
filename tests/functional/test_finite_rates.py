"""The report of a learning rate, asked for outside of a compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embedding as te
from tests.conftest import mesh_of


def test_the_answer_is_that_of_a_compiled_step():
    """Only compiled, this schedule's base falls below 0, and its root is NaN."""
    rule = te.optimizers.sgd(optax.polynomial_schedule(0.1, 0.01, 0.5, 10))
    table = te.TableConfig(vocabulary_size=9, dim=4, name="t", optimizer=rule)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    for count in (9, 10, 11):
        late = jax.tree.map(lambda x, count=count: jnp.full_like(x, count), slots)
        found = te.functional.finite_rates(late, plan)
        compiled = jax.jit(lambda slots: te.functional.finite_rates(slots, plan))(late)
        np.testing.assert_array_equal(found, compiled)
        np.testing.assert_array_equal(found, count < 10)
