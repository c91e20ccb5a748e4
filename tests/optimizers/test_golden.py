"""Runs of TensorFlow's own optimizers, repeated through the public calls.

The tolerances are those that the golden runs ask of a float32 implementation; Adam's
velocity with beta_2 = 0.999 loses more digits in `1 - beta_2`.
"""

import functools
import json

import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.optimizers.rule_cases import (
    initial_state,
    logical_slots,
    one_table_plan,
    update,
)
from tests.tiers import quick_cases


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
    make = {
        "sgd_momentum_nonlazy": lambda **o: te.optimizers.every_row(
            te.optimizers.momentum(rate, **o)
        ),
        "adam_nonlazy": lambda **o: te.optimizers.adam(rate, lazy_adam=False, **o),
        "adam_keras": lambda **o: te.optimizers.adam(rate, lazy_adam=False, **o),
        "centered_rmsprop": lambda **o: te.optimizers.rmsprop(rate, centered=True, **o),
    }.get(meta["optimizer"])
    if make is None:
        rule = getattr(
            te.optimizers, SAME_RULE.get(meta["optimizer"], meta["optimizer"])
        )
        make = functools.partial(rule, rate)
    options_of_all = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in meta["options"].items()
    }
    return te.optimizers.with_options(
        make(**options),
        learning_rate=rate,
        use_gradient_accumulation=not meta["sequential_duplicates"],
        **options_of_all,
    )


SAME_RULE = {
    "adagrad_keras": "adagrad",
    "adagrad_momentum_kernel": "adagrad_momentum",
    "adam_lazy": "adam",
    "adam_lazy_inside": "adam",
}
# Keras' velocity has the learning rate in it; there the table is what can be compared.
WITHOUT_COMPARABLE_SLOTS = ("sgd_momentum_nonlazy", "sgd_nesterov_nonlazy")


def runs():
    for path in sorted(GOLDEN.glob("*.npz")):
        name = path.stem
        if name.startswith(
            ("lookup", "layer", "adafactor", "afsparse", "keras", "layout")
        ):
            continue
        yield name


def read_run(name):
    """Returns the arrays of a recorded run, and what it is a run of."""
    with np.load(GOLDEN / f"{name}.npz") as run:
        run = dict(run)
    return run, json.loads(str(run["meta"]))


@pytest.mark.parametrize(
    "name",
    quick_cases(
        runs(),
        "adagrad",
        "adam_nonlazy_bias_corrected",
        "ftrl_l1_l2",
        "sgd_momentum_nonlazy",
        every_case=True,
    ),
)
def test_equals_the_recorded_run(name):
    run, meta = read_run(name)
    optimizer = make_optimizer(meta, run["lr"])
    plan = one_table_plan(optimizer, meta["V"], meta["D"], mesh_of(1))
    rtol = 1e-4 if "adam" in name else 2e-5
    tables, slots = initial_state(plan, run["table"][0])
    for step, (ids, gradients) in enumerate(zip(run["ids"], run["grads"], strict=True)):
        tables, slots = update(tables, slots, ids, gradients, plan)
        np.testing.assert_allclose(
            te.functional.unstack_tables(tables, plan)["table"],
            run["table"][step + 1],
            rtol=rtol,
            atol=1e-5,
        )
        if name in WITHOUT_COMPARABLE_SLOTS:
            continue
        recorded = [run[key][step + 1] for key in run if key.startswith("slot__")]
        for slot, expected in zip(logical_slots(slots, plan), recorded, strict=True):
            np.testing.assert_allclose(slot, expected, rtol=rtol, atol=1e-5)
