"""Flax' coming defaults: `NNX_GRAPH_MODE=false` and `NNX_GRAPH_UPDATES=false`.

The core tests of the NNX layer run again in that mode.
"""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.nn import test_pipelined_training, test_training
from tests.nn.test_pipelined_training import (
    SMALL_BATCH,
    OneTable,
    one_table_loss,
    one_table_step,
)
from tests.rejections import rejects

pytestmark = pytest.mark.skipif(
    not hasattr(nnx, "set_graph_updates"), reason="This Flax has one mode."
)


@pytest.fixture(autouse=True)
def tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        yield


STALE = (
    test_pipelined_training.test_stale_equals_a_reference_that_is_stale_in_the_same_way
)
EXACT = test_pipelined_training.test_mode_exact_equals_a_plain_loop_and_compiles_once
CALLS = {
    "stale": STALE,
    "exact": lambda: EXACT(test_pipelined_training.Chained),
    "dense": lambda: test_training.test_training_equals_the_dense_model(2),
    "two calls": test_training.test_two_calls_equal_one_call_over_both,
    "weights": test_training.test_weights_of_ids_can_be_learned,
}


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_tests_of_the_layer(call):
    call()


@pytest.mark.full
def test_a_restored_model_goes_on(tmp_path):
    model = OneTable(2)
    optimizer = te.Optimizer(model, optax.adam(0.1))
    step = one_table_step()
    step(model, optimizer, SMALL_BATCH, None)
    te.save(tmp_path / "saved", (model, optimizer))
    expected = [step(model, optimizer, SMALL_BATCH, SMALL_BATCH)]
    expected.append(step(model, optimizer, SMALL_BATCH, None))
    other = OneTable(2)
    state = (other, te.Optimizer(other, optax.adam(0.1)))
    state = te.restore(tmp_path / "saved", state)
    found = [step(*state, SMALL_BATCH, SMALL_BATCH), step(*state, SMALL_BATCH, None)]
    np.testing.assert_array_equal(found, expected)


def split(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return params, lambda params: one_table_loss(
        nnx.merge(graph, params, rest), SMALL_BATCH
    )


def test_gradients_without_those_of_tables_are_rejected():
    model = OneTable(1)
    params, loss_of = split(model)
    for grad in (jax.grad, nnx.grad):
        with rejects(fix="te.value_and_grad(loss_fn)"):
            grad(loss_of)(params)
    with rejects():
        nnx.grad(one_table_loss, allow_int=True)(model, SMALL_BATCH)
    # Flax gives all variables to JAX, which takes no integers.
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        nnx.grad(one_table_loss)(model, SMALL_BATCH)
