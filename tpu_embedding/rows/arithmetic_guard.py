"""An entry of the tables that rejects arithmetic on their leaves.

A leaf of a bfloat16 or int8 table has words that several values share. Arithmetic with
`jax.tree.map`, such as a moving average or a norm, would be silently wrong. So the dict
of such tables also holds a guard, whose leaf has an opaque dtype, like JAX's random
keys. JAX compiles, copies, places and saves such a leaf, but rejects arithmetic.
Lookups and updates ignore the guard, and compiled programs don't change.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.random import define_prng_impl

GUARD_NAME: Final = "guard"
"""Name of the guard in the dict of tables. No stack has it: they are `stack_<i>`."""

_ADVICE: Final = (
    "bfloat16 and int8 tables reject arithmetic on their leaves, which are packed "
    "words. For moving averages, use te.optimizers.with_ema; for decay, "
    "weight_decay_factor of the tables' optimizer; for norms and other averages, "
    "layer.embedding_tables()"
)


def _reject(*args: Any, **kwargs: Any) -> Any:
    raise TypeError(_ADVICE)


_IMPL: Final = define_prng_impl(
    key_shape=(2,),
    seed=_reject,
    split=_reject,
    random_bits=_reject,
    fold_in=_reject,
    # Orbax restores such an array by this name, so it must be one that JAX knows.
    name="threefry2x32",
    tag=_ADVICE,  # JAX's errors print it as the name of the dtype.
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArithmeticGuard:
    """A pytree with one leaf, on which arithmetic raises an error.

    Attributes:
      words: zeros `[num_devices, 1]` in an opaque dtype. This shape has the partitions
        of lines.
    """

    # Any: leaves of a pytree may be arrays, shapes or shardings.
    words: Any

    def __post_init__(self) -> None:
        words = self.words
        dtype = getattr(words, "dtype", None)
        if not isinstance(words, jax.Array) or not _is_opaque(dtype):
            return
        if _ADVICE not in str(dtype):  # Orbax restores another opaque dtype.
            words = _wrapped(jax.random.key_data(words))
            object.__setattr__(self, "words", words)
        if not isinstance(words, Tracer):
            # Without this attribute, JAX raises an error that doesn't name the dtype.
            words.astype = _reject


def make_guard(num_devices: int) -> ArithmeticGuard:
    """Returns a guard of the tables on this number of devices."""
    return ArithmeticGuard(_wrapped(jnp.zeros((num_devices, 1, 2), jnp.uint32)))


def _wrapped(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl=_IMPL)


def _is_opaque(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
