"""Adafactor: Keras' own runs, the lazy form, and totals over the rows of a table."""

import json

import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import quick_cases

RUNS = sorted(
    path.stem
    for family in ("adafactor", "afsparse")
    for path in GOLDEN.glob(f"{family}*.npz")
)
ONE, TWO = (1, "cpu"), (2, "v5p")


def cases():
    """Where every row is looked up in each step, both modes are what Keras does."""
    for number, name in enumerate(RUNS):
        mode, (num_devices, hardware) = [("exact", ONE), ("lazy", TWO)][number % 2]
        if "exact" in name or "some_rows" in name:
            mode = "exact"
        elif "lazy" in name:
            mode = "lazy"
        yield pytest.param(name, mode, num_devices, hardware, id=name)


def adafactor_of(hyper_parameters, **options):
    """Makes the optimizer of a recorded run."""
    arguments = dict(hyper_parameters)
    rate = arguments.pop("learning_rate")
    if isinstance(rate, dict):
        rate = optax.exponential_decay(
            rate["initial"], rate["decay_steps"], rate["decay_rate"]
        )
    return te.optimizers.adafactor(rate, **arguments, **options)


def make_optimizer(meta, **options):
    if meta.get("implementation") == "tf_keras":
        options["ema_start"] = "initial_values"
    if "IndexedSlices" in meta.get("gradient", ""):
        options["clipnorm_of"] = "occurrences"
    return adafactor_of(meta["hyper_parameters"], **options)


@pytest.mark.parametrize(
    ("name", "mode", "num_devices", "hardware"),
    quick_cases(cases(), "afsparse_lazy_options", every_case=True),
)
def test_equals_the_recorded_run(name, mode, num_devices, hardware):
    with np.load(GOLDEN / f"{name}.npz") as run:
        run = dict(run)
    meta = json.loads(str(run["meta"]))
    plan = one_table_plan(
        make_optimizer(meta, mode=mode),
        meta["V"],
        meta["D"],
        mesh_of(num_devices),
        hardware=te.hardware.hardware_by_name(hardware),
    )
    tables, slots = initial_state(plan, run["table"][0])
    for step, (ids, gradients) in enumerate(zip(run["ids"], run["grads"], strict=True)):
        tables, slots = update(tables, slots, ids, gradients, plan)
        np.testing.assert_allclose(
            te.functional.unstack_tables(tables, plan)["table"],
            run["table"][step + 1],
            rtol=2e-6,
            atol=1e-6,
        )
        if "slot__ema" in run:
            final, _ = te.functional.finalize_variable_values(tables, slots, plan)
            np.testing.assert_allclose(
                te.functional.unstack_tables(final, plan)["table"],
                run["slot__ema"][step + 1],
                rtol=2e-6,
                atol=1e-6,
            )
