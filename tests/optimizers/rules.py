"""Runs a table optimizer through the calls that a user makes, for other tests."""

import functools

import jax
import numpy as np

import tpu_embedding as te
from tpu_embedding.update.lift import is_slot


def one_table_plan(optimizer, vocabulary_size, dim, mesh, **options):
    """A plan of one table, whose ids are combined by sum."""
    table = te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, combiner="sum", name="table"
    )
    feature = te.FeatureConfig(table=table, name="ids")
    return te.make_plan(feature, mesh, optimizer=optimizer, **options)


@functools.partial(jax.jit, static_argnames="plan")
def update(tables, slots, ids, cotangents, plan):
    """One step: look ids up, and let the loss have these derivatives."""
    result = te.lookup(tables, ids, plan)
    gradients = te.compute_gradients(result.routing, cotangents, plan)
    return te.apply_gradients(tables, slots, gradients, plan)


def initial_state(plan, table):
    """Returns tables with the given values, and fresh slots."""
    tables = te.init_tables(plan, jax.random.key(0))
    tables = te.with_logical_values(tables, {"table": np.float32(table)}, plan)
    return tables, te.init_slots(tables, plan)


def logical_slots(slots, plan):
    """Returns the slot variables of the only table, in the state's order."""
    leaves = jax.tree.leaves(slots["stack_0"], is_leaf=is_slot)
    return [
        te.logical_values({"stack_0": leaf}, plan)["table"]
        for leaf in leaves
        if is_slot(leaf)
    ]
