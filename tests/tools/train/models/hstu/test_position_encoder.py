import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.tiers import each_once
from tests.tools.train.models.hstu.golden_runs import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    check,
    golden,
    pad,
    part,
    run,
    unpad,
    with_weights,
)
from tpu_embedding.tools.train.models.hstu.position_encoder import (
    MAX_TIME_BUCKETS,
    PositionEncoder,
    time_buckets,
)
from tpu_embedding.tools.train.models.hstu.silu_attention import SequenceLengths

FILE = golden("positional_encoder")
LENGTHS = FILE["input.lengths"]


@pytest.mark.parametrize(
    ("name", "block_size"), each_once(["one_target", "many_targets"], [512, 7, 1])
)
def test_the_encoder_is_the_reference(name, block_size):
    case = part(FILE, f"{name}/")
    lengths = SequenceLengths(
        tokens=jnp.asarray(LENGTHS),
        shared=jnp.asarray(LENGTHS - case["num_targets"]),
        normalizer=jnp.asarray(1),
    )
    encoder = PositionEncoder(
        FILE["input.x"].shape[1],
        num_positions=len(FILE["weight.position_table"]),
        num_time_buckets=len(FILE["weight.time_table"]) - 1,
        num_contextual=int(FILE["contextual_len"]),
        block_size=block_size,
        rngs=nnx.Rngs(0),
    )
    with_weights(encoder, part(FILE, "weight."))
    times = FILE["input.timestamps"].astype(np.int32)
    query_times = times[np.cumsum(LENGTHS) - 1]

    def encode(encoder, inputs):
        padded = (pad(inputs["x"], LENGTHS), lengths, pad(times, LENGTHS), query_times)
        return {"y": unpad(encoder(*padded), LENGTHS)}

    outputs, gradients = run(
        encode, encoder, {"x": FILE["input.x"]}, part(case, "cotangent.")
    )
    check(outputs, part(case, "output."), OUTPUT_TOLERANCE)
    check(gradients, part(case, "grad."), GRADIENT_TOLERANCE)
    ages = np.repeat(query_times, LENGTHS) - times
    np.testing.assert_array_equal(time_buckets(ages, 2048), case["own.time_bucket"])


@pytest.mark.parametrize("num_buckets", [1, 2048, MAX_TIME_BUCKETS])
def test_time_buckets_are_exact_at_their_limits(num_buckets):
    k = np.arange(num_buckets + 1)
    limits = 60 * k**2
    for distance in (-5, -1, 0, 1):
        wanted = np.clip(k - (distance < 0), 0, num_buckets)
        ages = jnp.asarray(limits + distance, jnp.int32)
        np.testing.assert_array_equal(time_buckets(ages, num_buckets), wanted)
    last = time_buckets(jnp.asarray([-(2**31), 2**31 - 1]), num_buckets)
    np.testing.assert_array_equal(last, [0, num_buckets])
