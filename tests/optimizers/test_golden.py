"""Runs of TensorFlow's own optimizers, repeated through the public calls.

The tolerances are those that the golden runs ask of a float32 implementation; Adam's
velocity with beta_2 = 0.999 loses more digits in `1 - beta_2`.
"""

import json

import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.optimizers.rules import (
    initial_state,
    logical_slots,
    one_table_plan,
    update,
)


def schedule_of(rates):
    """A schedule that returns the recorded rate of each step."""
    return optax.join_schedules(
        [optax.constant_schedule(float(rate)) for rate in rates],
        list(range(1, len(rates))),
    )


def make_optimizer(meta, rates):
    options = dict(meta["hyper_parameters"])
    del options["learning_rate"]
    rate = schedule_of(rates)
    match meta["optimizer"]:
        case "sgd":
            optimizer = te.optimizers.sgd(rate)
        case "sgd_momentum_nonlazy":
            optimizer = te.optimizers.every_row(te.optimizers.momentum(rate, **options))
        case "adagrad" | "adagrad_keras":
            optimizer = te.optimizers.adagrad(rate, **options)
        case "adagrad_momentum" | "adagrad_momentum_kernel":
            optimizer = te.optimizers.adagrad_momentum(rate, **options)
        case "adam_lazy" | "adam_lazy_inside":
            optimizer = te.optimizers.adam(rate, **options)
        case other:
            raise AssertionError(other)
    if meta["sequential_duplicates"]:
        return te.optimizers.in_sequence(optimizer)
    return optimizer


FILES = {
    "sgd": [],
    "sgd_schedule": [],
    # Keras' velocity has the learning rate in it; the tables are what can be compared.
    "sgd_momentum_nonlazy": [],
    "sgd_nesterov_nonlazy": [],
    "adagrad": ["accumulators"],
    "adagrad_keras": ["accumulators"],
    "adagrad_momentum": ["accumulators", "momenta"],
    "adagrad_momentum_beta2_kernel": ["accumulators", "momenta"],
    "adagrad_momentum_exponent3": ["accumulators", "momenta"],
    "adagrad_momentum_nesterov": ["accumulators", "momenta"],
    "adagrad_no_accumulation": ["accumulators"],
    "adagrad_init_accum": ["accumulators"],
    "adagrad_schedule": ["accumulators"],
    "adam_lazy": ["momenta", "velocities"],
    "adam_lazy_bias_corrected": ["momenta", "velocities"],
    "adam_lazy_sum_inside_sqrt": ["momenta", "velocities"],
}


@pytest.mark.parametrize("hardware", ["cpu", "v5p"])
@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("name", FILES)
def test_equals_the_recorded_run(name, num_devices, hardware):
    with np.load(GOLDEN / f"{name}.npz") as run:
        run = dict(run)
    meta = json.loads(str(run["meta"]))
    optimizer = make_optimizer(meta, run["lr"])
    plan = one_table_plan(
        optimizer,
        meta["V"],
        meta["D"],
        mesh_of(num_devices),
        hardware=te.hardware_by_name(hardware),
    )
    rtol = 1e-4 if name.startswith("adam") else 2e-5
    tables, slots = initial_state(plan, run["table"][0])
    for step, (ids, gradients) in enumerate(zip(run["ids"], run["grads"], strict=True)):
        tables, slots = update(tables, slots, ids, gradients, plan)
        np.testing.assert_allclose(
            te.logical_values(tables, plan)["table"],
            run["table"][step + 1],
            rtol=rtol,
            atol=1e-5,
        )
        if not FILES[name]:
            continue
        recorded = [run[f"slot__{slot}"][step + 1] for slot in FILES[name]]
        for slot, expected in zip(logical_slots(slots, plan), recorded, strict=True):
            np.testing.assert_allclose(slot, expected, rtol=rtol, atol=1e-5)
