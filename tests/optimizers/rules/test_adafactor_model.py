"""Adafactor over the arrays of a whole model: Keras' own runs, of all ranks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN
from tests.optimizers.rules.test_adafactor import adafactor_of
from tests.rejections import rejects
from tests.tiers import matrix, quick_cases

finalize = te.functional.finalize_variable_values

with np.load(GOLDEN / "keras_adafactor_model.npz") as recorded:
    RECORDED = dict(recorded)
META = json.loads(str(RECORDED["meta"]))
NAMES = list(META["shapes"])
RUNS = list(META["hyper_parameters"])


def make_optimizer(run, **options):
    return adafactor_of(META["hyper_parameters"][run], **options)


def start():
    return {name: jnp.asarray(RECORDED[f"start__{name}"]) for name in NAMES}


def steps(run):
    """Yields gradients, and Keras' variables and averages after them; or None."""
    for i in range(len(RECORDED["grads__scalar"])):
        gradients = {name: RECORDED[f"grads__{name}"][i] for name in NAMES}
        after = {name: RECORDED[f"{run}__{name}"][i] for name in NAMES}
        final = None
        if f"{run}__final__scalar" in RECORDED:
            final = {name: RECORDED[f"{run}__final__{name}"][i] for name in NAMES}
        yield gradients, after, final


def assert_close(actual, expected):
    for name in NAMES:
        # Both sum in float32, in other orders.
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize(("run", "mode"), quick_cases(matrix(RUNS, ["lazy", "exact"])))
def test_equals_keras_on_every_rank(run, mode):
    """All rows are at hand, so both modes are what Keras does."""
    optimizer = make_optimizer(run, mode=mode)
    if mode == "lazy":  # Averages are found within wrappers.
        optimizer = optax.masked(optimizer, dict.fromkeys(NAMES, True))
        optimizer = optax.chain(optax.zero_nans(), optimizer)
    params = start()
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for gradients, after, final in steps(run):
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert_close(params, after)
        if final is not None:
            assert_close(finalize(params, state)[0], final)


@pytest.mark.full
def test_averages_do_not_share_memory_with_the_parameters():
    """A step that donates both would pass one buffer twice."""
    optimizer = make_optimizer("ema")
    gradients, *_ = next(steps("ema"))
    arguments = (gradients, optimizer.init(start()), start())
    expected = jax.jit(optimizer.update)(*arguments)
    params = start()
    state = optimizer.init(params)
    step = jax.jit(optimizer.update, donate_argnums=(1, 2))
    jax.tree.map(
        np.testing.assert_array_equal, step(gradients, state, params), expected
    )
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


def test_other_parameters_are_not_finalized():
    params = start()
    optimizer = make_optimizer("ema")
    with rejects():
        finalize({"other": params}, optimizer.init(params))
