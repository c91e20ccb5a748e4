import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hstu import HSTU, HSTUInputs, Samples, time_buckets
from hstu_layers import MAX_TIME_BUCKETS

from tests.benchmarks.dlrm_v4 import FULL
from tests.benchmarks.dlrm_v4.golden_runs import (
    OUTPUT_TOLERANCE,
    error,
    golden,
    golden_name,
    pad,
    places,
    under,
    with_weights,
)
from tpu_embedding.tools.train import load_config

BENCHMARK = load_config(FULL).model.hstu
SIZES = dataclasses.replace(
    BENCHMARK,
    dim=64,
    num_layers=2,
    num_heads=2,
    head_dim=32,
    token_hidden_size=96,
    num_positions=64,
    input_dropout=0.0,
    dropout=0.0,
    dtype="float32",
)

WHOLE = golden("end_to_end")
HISTORIES = WHOLE["input.lengths"]


ROWS = [p + name for p in ("", "candidate_") for name in ("item", "artist", "album")]


def golden_model(**changes):
    model = HSTU(dataclasses.replace(SIZES, **changes), rngs=nnx.Rngs(0))
    return with_weights(model, under(WHOLE, "weight."), golden_name)


def golden_inputs(arrays, width=None):
    """Returns the model's inputs from arrays by the names of the file."""
    history = places(HISTORIES)
    if width is not None:
        outside = np.full((len(HISTORIES), width - history.shape[1]), 10**6)
        history = np.concatenate([history, outside], axis=1)

    def padded(name):
        return jnp.asarray(
            pad(WHOLE[f"input.{name}"].astype(np.int32), HISTORIES, width)
        )

    return HSTUInputs(
        # Rows of all events, and after them the candidates' rows.
        **{
            f"{name}s": jnp.concatenate([arrays[name], arrays[f"candidate_{name}"]])
            for name in ("item", "artist", "album")
        },
        samples=Samples(
            numbers=jnp.arange(len(HISTORIES)),
            contextual=jnp.swapaxes(arrays["contextual"], 0, 1),
            history=jnp.asarray(history),
            lengths=jnp.asarray(HISTORIES, jnp.int32),
            candidate=jnp.asarray(sum(HISTORIES) + np.arange(len(HISTORIES))),
            actions=padded("action_weight"),
            times=padded("history_times"),
            query_times=jnp.asarray(WHOLE["input.query_time"], jnp.int32),
        ),
    )


FLOATS = {name: WHOLE[f"input.{name}"] for name in (*ROWS, "contextual")}
N = jnp.asarray(WHOLE["max_seq_len"], jnp.int32)


@nnx.jit
def logits_of(model, inputs):
    return model(inputs, normalizer=N, dropout_key=model.dropout_key())


@pytest.mark.full
def test_dropout_runs_in_training_only():
    model = golden_model(input_dropout=0.2, dropout=0.1)
    inputs = golden_inputs(FLOATS)
    first, second = (logits_of(model, inputs) for _ in range(2))
    assert error(first, second) > 1e-3
    model.eval()
    third, fourth = (logits_of(model, inputs) for _ in range(2))
    np.testing.assert_array_equal(third, fourth)
    assert error(third, WHOLE["output.logits"]) <= OUTPUT_TOLERANCE
    model.train()
    assert error(logits_of(model, inputs), third) > 1e-3


def test_the_benchmark_has_15_243_057_parameters():
    model = nnx.eval_shape(lambda: HSTU(BENCHMARK, rngs=nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {p.dtype for p in params} == {jnp.dtype("float32")}
    assert sum(p.size for p in params) == 15_243_057


@pytest.mark.parametrize("num_buckets", [1, MAX_TIME_BUCKETS])
def test_time_buckets_are_exact_at_their_limits(num_buckets):
    k = np.arange(num_buckets + 1)
    limits = 60 * k**2
    for distance in (-5, -1, 0, 1):
        wanted = np.clip(k - (distance < 0), 0, num_buckets)
        ages = jnp.asarray(limits + distance, jnp.int32)
        np.testing.assert_array_equal(time_buckets(ages, num_buckets), wanted)
    last = time_buckets(jnp.asarray([-(2**31), 2**31 - 1]), num_buckets)
    np.testing.assert_array_equal(last, [0, num_buckets])
