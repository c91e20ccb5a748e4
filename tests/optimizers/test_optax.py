"""What of optax may train a table: all of it equals the dense rule, or is rejected.

Here every row is touched, in one piece and eagerly, which is cheap; that parts of a
table, on several devices, give the same is shown by the other tests of this folder.
"""

import inspect

import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import one_table_plan
from tests.rejections import rejects
from tests.tiers import full_cases, quick_cases
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout
from tpu_embedding.update.parts import lift_to_rows

ROWS, DIM = 12, 4

# Arguments beside the learning rate.
ALIASES = {
    "adabelief": {},
    "adafactor": {},
    "adamw": {},
    "lamb": {},
    "lbfgs": {},
    "noisy_sgd": {"key": 0},
    "novograd": {},
    "radam": {},
    "rmsprop": {"centered": True, "momentum": 0.9},
    "sgd": {"momentum": 0.9, "nesterov": True},
    "sm3": {},
    "yogi": {},
}
CONTRIB = {"muon": {}, "schedule_free_sgd": {}}
SGD = optax.sgd(0.1)
PIECES = {
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "chain": lambda: optax.chain(optax.clip(0.5), optax.adam(0.1)),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "flatten": lambda: optax.flatten(SGD),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(0.1),
    "masked": lambda: optax.masked(SGD, True),
    "MultiSteps": lambda: optax.MultiSteps(SGD, 2).gradient_transformation(),
    "partition": lambda: optax.partition({"a": SGD}, "a"),
    "scale_by_factored_rms": lambda: optax.scale_by_factored_rms(
        min_dim_size_to_factor=1
    ),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda step: 0.1 * step),
    "zero_nans": optax.zero_nans,
    "reduce_on_plateau": lambda: optax.chain(SGD, optax.contrib.reduce_on_plateau()),
}

NO_LOSS = "[rows, 4]"
MIXES = "te.gradients.clip_by_global_norm"
IN_TIME = "every_row"
# Code of the fix; what is not named here works.
REJECTED = {
    "adafactor": MIXES,
    "lamb": MIXES,
    "lbfgs": NO_LOSS,
    "noisy_sgd": MIXES,
    "novograd": MIXES,
    "sm3": "",
    "muon": MIXES,
    "schedule_free_sgd": IN_TIME,
    "apply_every": IN_TIME,
    "apply_if_finite": MIXES,
    "clip_by_global_norm": MIXES,
    "MultiSteps": IN_TIME,
    "scale_by_factored_rms": "te.optimizers.adafactor",
    "zero_nans": "jnp.nan_to_num",
    "reduce_on_plateau": NO_LOSS,
}


def rules():
    """Makes those that the installed version of optax has."""
    for module, table in ((optax, ALIASES), (optax.contrib, CONTRIB)):
        for name, arguments in table.items():
            if make := getattr(module, name, None):
                takes_rate = "learning_rate" in inspect.signature(make).parameters
                rate = {"learning_rate": 0.1} if takes_rate else {}
                yield name, make(**(rate | arguments))
    for name, make in PIECES.items():
        yield name, make()


RULES = dict(rules())


def start():
    return np.float32(np.random.default_rng(0).normal(size=(ROWS, DIM)))


def gradients():
    for step in range(3):
        rows = np.random.default_rng(step + 1).normal(size=(ROWS, DIM))
        yield jnp.asarray(rows, jnp.float32)


def run_lifted(rule):
    layout = RowLayout(num_rows=ROWS, row_shape=(DIM,))
    table = PackedRows(lines=jnp.asarray(start()), layout=layout)
    lifted = lift_to_rows(rule)
    state = lifted.init(table)
    for gradient in gradients():
        updates = te.functional.RowUpdates(row_ids=jnp.arange(ROWS), values=gradient)
        updates, state = lifted.update(updates, state, table)
        table = PackedRows(lines=table.lines + updates.values, layout=layout)
    return table.lines


def run_dense(rule):
    table = jnp.asarray(start())
    state = rule.init(table)
    for gradient in gradients():
        updates, state = rule.update(gradient, state, table)
        table = optax.apply_updates(table, updates)
    return table


def check_equals_dense(given, rule):
    plan = one_table_plan(given, ROWS, DIM, mesh_of(1))
    # The same operations on the same rows.
    np.testing.assert_allclose(
        run_lifted(plan.stacks[0].optimizer), run_dense(rule), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "name",
    quick_cases(
        [x for x in RULES if x not in REJECTED],
        *("radam", "chain", "masked", "inject_hyperparams"),
        every_case=True,
    ),
)
def test_equals_dense(name):
    check_equals_dense(RULES[name], RULES[name])


# One or two of each reason.
REASONS = ("lamb", "lbfgs", "muon", "apply_every", "clip_by_global_norm", "zero_nans")


@pytest.mark.parametrize("name", quick_cases(REJECTED, *REASONS, every_case=True))
def test_is_rejected_with_a_reason(name):
    with rejects(te.optimizers.NotRowLocalError, fix=REJECTED[name]):
        one_table_plan(RULES[name], ROWS, DIM, mesh_of(1))


@pytest.mark.parametrize(
    "name",
    full_cases([x for x in REJECTED if REJECTED[x] == IN_TIME], "schedule_free_sgd"),
)
def test_what_waits_for_steps_equals_dense_on_every_row(name):
    if name in RULES:
        check_equals_dense(te.optimizers.every_row(RULES[name]), RULES[name])
