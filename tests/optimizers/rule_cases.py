"""Optimizers, and the calls that a user makes of them, for other tests."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.update.state import is_slot


def custom_adagrad(gradient, row, slots, learning_rate, _):
    accumulator = slots[0] + gradient**2
    return row - learning_rate * gradient / jnp.sqrt(accumulator), accumulator


OPTIMIZERS = {
    "sgd": te.optimizers.sgd(0.1),
    "adagrad": te.optimizers.adagrad(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adam": te.optimizers.adam(0.1),
    "lazy_adam": te.optimizers.lazy_adam(0.1, skipped_steps="catch_up"),
    "adamw": te.optimizers.adamw(0.1),
    "momentum": te.optimizers.momentum(0.1, use_nesterov=True),
    "adagrad_momentum": te.optimizers.adagrad_momentum(0.1, momentum=0.5),
    "ftrl": te.optimizers.ftrl(0.5, l1_regularization_strength=0.01),
    "rmsprop": te.optimizers.rmsprop(0.05, momentum=0.3, centered=True, epsilon=1e-3),
    "proximal_adagrad": te.optimizers.proximal_adagrad(0.3, l1=0.01, l2=0.01),
    "adadelta": te.optimizers.adadelta(2.0, epsilon=1e-4),
    "lion": te.optimizers.lion(0.03),
    "bounded_adagrad": te.optimizers.bounded_adagrad(
        0.3, max_var_update=0.1, max_accumulator=5.0
    ),
    "frequency_aware_adagrad": te.optimizers.frequency_aware_adagrad(0.3, l2=0.01),
    "proximal_yogi": te.optimizers.proximal_yogi(0.1, l1=0.01, l2=0.01),
    "online_yogi": te.optimizers.online_yogi(0.01, l1=0.01),
    "partial_rowwise_adam": te.optimizers.partial_rowwise_adam(0.1, weight_decay=0.01),
    "lamb": te.optimizers.lamb(0.1, weight_decay=0.01),
    "partial_rowwise_lamb": te.optimizers.partial_rowwise_lamb(0.1),
    "rowwise_rmsprop": te.optimizers.rowwise_rmsprop(0.05),
    "rowwise_adagrad_decays": te.optimizers.rowwise_adagrad(0.1, weight_decay=0.01),
    "rowwise_adagrad_decoupled": te.optimizers.rowwise_adagrad(
        0.1, 0.0, epsilon=1e-8, weight_decay=0.01, weight_decay_mode="decoupled"
    ),
    "user_defined": te.optimizers.user_defined(
        custom_adagrad, 0.3, slot_names=("accumulators",), slot_initializers=(0.1,)
    ),
    "clippy_adagrad": te.optimizers.clippy_adagrad(
        0.3, variable_relative_threshold=0.5, absolute_threshold=0.1
    ),
    "adafactor": te.optimizers.adafactor(0.3, epsilon_2=0.1),
    "options": te.optimizers.with_options(
        te.optimizers.adagrad(0.3),
        clipvalue=(-1.0, None),
        weight_decay_factor=0.01,
        clip_weight_min=-3.0,
        clip_weight_max=3.0,
    ),
    "adam_bias_corrected": te.optimizers.adam(0.1, bias_correction=True),
    "schedule": te.optimizers.adagrad(optax.cosine_decay_schedule(0.1, 100)),
    "optax.sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "optax.adam": optax.adam(0.1),
    "optax.adamw": optax.adamw(0.1),
    "optax.lion": optax.lion(0.01),
    "optax.yogi": optax.yogi(0.1),
    "optax.rmsprop": optax.rmsprop(0.05, centered=True),
    "optax.adagrad": optax.adagrad(0.1),
    "optax.adabelief": optax.adabelief(0.1),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_adam(), optax.scale(-0.1)),
    "inject": optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=0.1),
}


def one_table_plan(optimizer, vocabulary_size, dim, mesh, **options):
    """A plan of one table, whose ids are combined by sum."""
    table = te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, combiner="sum", name="table"
    )
    feature = te.FeatureConfig(table=table, name="ids")
    return te.make_plan(feature, mesh, optimizer=optimizer, **options)


def plan_of_tables(sizes, dim, optimizer, num_devices, hardware, **options):
    """A plan of tables, name to size, each with a feature of its name, by sum."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size, dim=dim, combiner="sum", name=name
            )
        )
        for name, size in sizes.items()
    }
    return te.make_plan(
        features,
        mesh_of(num_devices),
        optimizer=optimizer,
        hardware=te.hardware.hardware_by_name(hardware),
        **options,
    )


@functools.partial(jax.jit, static_argnames="plan")
def update(tables, slots, ids, cotangents, plan):
    """One step: look ids up, and let the loss have these derivatives."""
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    return te.functional.apply_gradients(tables, slots, gradients, plan)


def initial_state(plan, table):
    """Returns the only table with the given values, and fresh slots."""
    return initial_state_of_tables(plan, {"table": np.float32(table)})


def initial_state_of_tables(plan, values):
    """Returns tables with the given values, and fresh slots."""
    tables = te.functional.init_tables(_untrained(plan), jax.random.key(0))
    tables, _ = te.functional.with_table_values(tables, values, plan, {})
    return tables, _init_slots(tables, plan)


def _untrained(plan):
    """Returns the plan without optimizers, so that tables are compiled only once."""
    stacks = tuple(
        dataclasses.replace(stack, trained_by=None, slots=()) for stack in plan.stacks
    )
    return dataclasses.replace(plan, stacks=stacks)


@functools.partial(jax.jit, static_argnames="plan")
def _init_slots(tables, plan):
    return te.functional.init_slots(tables, plan)


def logical_slots(slots, plan):
    """Returns the slot variables of the only table, in the state's order."""
    leaves = jax.tree.leaves(slots["stack_0"], is_leaf=is_slot)
    return [_logical(leaf, plan) for leaf in leaves if is_slot(leaf)]


def logical_state(slots, plan):
    """Returns all of the state of the only table: slot variables, counts and such."""
    leaves = jax.tree.leaves(slots["stack_0"], is_leaf=is_slot)
    return [_logical(x, plan) if is_slot(x) else np.asarray(x) for x in leaves]


def _logical(slot, plan):
    return te.functional.unstack_tables({"stack_0": slot}, plan)["table"]


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
