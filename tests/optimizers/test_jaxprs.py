"""NumPy evaluates what JAX has traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers.jaxprs import evaluate_by_numpy

X = np.float32([[0.5, -2.0, 1e-3], [3.0, 0.0, -1.5]])


def elementwise(x):
    """Uses each operation that NumPy has for elements."""
    small, whole = jnp.abs(x) + 0.5, jnp.int32(x)
    yield from (jnp.sin(x) * jnp.cos(x), jnp.tanh(-x), jnp.sign(x), jnp.floor(x))
    yield from (jnp.exp(x), jnp.log(small), jnp.sqrt(small), jax.lax.rsqrt(small))
    yield from (jnp.square(x), small**x, x / small, jnp.power(x, -3), x - small)
    yield from (jnp.maximum(x, whole), jnp.minimum(x, 0.3), jnp.isfinite(x / x[1, 1]))
    yield from (x < 1, x <= 3, x > 1, x >= 3, x == 0, x != 0, ~(x > 0), whole & 1)
    yield from (whole | 4, jnp.copy(x), whole // 2)
    yield jax.jvp(lambda y: y + jnp.sin(y) * y, (x,), (small,))[1]


def of_arrays(x):
    """Uses each operation that has parameters."""
    yield from (x.sum(0), x.max(1), x.min(), jnp.mean(x, 1, keepdims=True))
    yield from (jnp.concatenate([x, x], 1), x.reshape(3, 2), jnp.where(x > 0, x, 7.0))
    yield from (jnp.select([x > 1, x > 0], [x, -x], 0.0), jnp.squeeze(x[:, :1]))
    yield from (
        (x > 0).any(1),
        (x > 0).all(0),
        x[:, 1:],
        jax.lax.slice(x, (0, 0), (2, 3), (1, 2)),
    )
    yield from (x.astype(jnp.bfloat16) * 3, jnp.broadcast_to(x[:, None], (2, 4, 3)))


def branches(x):
    yield jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)
    for index in (-1, 1, 7):
        yield jax.lax.switch(
            jnp.int32(index) + jnp.int32(x[1, 1]), [jnp.sin, jnp.cos, abs], x
        )


def others(x):
    """Uses operations that JAX evaluates, and functions that are called."""
    yield from (jnp.sort(x), jnp.cumsum(x, 0))
    yield jax.random.key_data(jax.random.split(jax.random.key(0))[0])
    yield from (jax.jit(jnp.arcsin)(x / 4), jax.nn.softplus(x), x[::-1])


@pytest.mark.parametrize("function", [elementwise, of_arrays, branches, others])
def test_evaluates_as_jax_does(function):
    closed = jax.make_jaxpr(lambda x: list(function(x)))(X)
    with np.errstate(all="ignore"):
        found = evaluate_by_numpy(closed, [X])
    with jax.debug_nans(False):
        expected = jax.jit(lambda x: list(function(x)))(X)
    for value, wanted in zip(found, expected, strict=True):
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(
            np.float64(value), np.float64(wanted), rtol=1e-5, atol=1e-6
        )
