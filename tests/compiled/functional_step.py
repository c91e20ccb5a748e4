"""Compiles a step of lookup, gradient and update, without arrays."""

import jax

import tpu_embedding as te
from tpu_embedding.tools import compile_report

functional = te.functional


def abstract_state(plan):
    """Returns the shapes of tables and slot variables, with their shardings."""
    tables = jax.eval_shape(lambda: functional.init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda x: functional.init_slots(x, plan), tables)
    return compile_report.abstract_arrays((tables, slots), plan)


def compile_functional_step(
    plan, ids, cotangents_of=lambda x: x, options=None, insert=False
):
    """Compiles a step on shapes of ids.

    The cotangents default to the activations, so that the update follows the
    lookup. `insert` inserts the ids first.
    """

    def step(tables, slots, ids):
        if insert:
            inserted = functional.insert_ids(tables, slots, ids, plan)
            tables, slots, ids = inserted.tables, inserted.slots, inserted.features
        result = functional.lookup(tables, ids, plan)
        cotangents = jax.tree.map(cotangents_of, result.activations)
        gradients = functional.compute_gradients(result.routing, cotangents, plan)
        updated = functional.apply_gradients(tables, slots, gradients, plan)
        return *updated, result.stats

    options = plan.compiler_options if options is None else options
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    inputs = compile_report.abstract_batch(ids, plan)
    return jitted.lower(*abstract_state(plan), inputs).compile()
