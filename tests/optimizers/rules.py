"""Runs a table optimizer through the calls that a user makes, for other tests."""

import contextlib
import dataclasses
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
    """Returns the only table with the given values, and fresh slots."""
    return initial_state_of_tables(plan, {"table": np.float32(table)})


def initial_state_of_tables(plan, values):
    """Returns tables with the given values, and fresh slots."""
    # Tables do not depend on the optimizer; without it they are compiled only once.
    stacks = tuple(dataclasses.replace(x, optimizer=None) for x in plan.stacks)
    bare = dataclasses.replace(plan, stacks=stacks)
    tables = te.init_tables(bare, jax.random.key(0))
    tables = te.with_logical_values(tables, values, plan)
    return tables, _init_slots(tables, plan)


@functools.partial(jax.jit, static_argnames="plan")
def _init_slots(tables, plan):
    return te.init_slots(tables, plan)


def logical_slots(slots, plan):
    """Returns the slot variables of the only table, in the state's order."""
    leaves = jax.tree.leaves(slots["stack_0"], is_leaf=is_slot)
    return [_logical(leaf, plan) for leaf in leaves if is_slot(leaf)]


def logical_state(slots, plan):
    """Returns all of the state of the only table: slot variables, counts and such."""
    leaves = jax.tree.leaves(slots["stack_0"], is_leaf=is_slot)
    return [_logical(x, plan) if is_slot(x) else np.asarray(x) for x in leaves]


def _logical(slot, plan):
    return te.logical_values({"stack_0": slot}, plan)["table"]


@contextlib.contextmanager
def compilations():
    """Gives a list that gets an item for each program compiled within."""
    compiled = []

    def listen(event, seconds, **_):
        del seconds
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
