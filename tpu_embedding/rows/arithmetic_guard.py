"""A guard in the dict of tables, which rejects arithmetic if tables are narrow.

In bfloat16 and int8 tables, several values share a word, so a moving average or a norm
with `jax.tree.map` would be silently wrong. The guard's leaf has an opaque dtype, like
random keys. JAX copies and saves this leaf, but rejects arithmetic on it. Lookups and
updates ignore the guard.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.random import define_prng_impl
from jaxtyping import Array, UInt32

GUARD_NAME: Final = "table_guard"
"""Key in the dict of tables. It sorts after the keys of stacks, `stack_<i>`."""

_ADVICE: Final = (
    "leaves of these tables are packed bfloat16 or int8 values, so arithmetic on them "
    "is rejected. For moving averages, use te.optimizers.with_ema; for decay, "
    "weight_decay_factor of the tables' optimizer; for norms and other averages, the "
    "values of layer.embedding_tables() or te.functional.unstack_tables"
)


def _reject(*args: Any, **kwargs: Any) -> Any:
    raise TypeError(_ADVICE)


_IMPL: Final = define_prng_impl(
    key_shape=(2,),
    seed=_reject,
    split=_reject,
    random_bits=_reject,
    fold_in=_reject,
    # Orbax restores the guard's array by this name, so JAX must know the name.
    name="threefry2x32",
    tag=_ADVICE,  # JAX's errors print it as the name of the dtype.
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArithmeticGuard:
    """A pytree with one opaque leaf `[devices, 1]`, sharded like table lines."""

    # The type is Any, because leaves may be arrays, shapes or shardings.
    words: Any

    def __post_init__(self) -> None:
        words = self.words
        if not isinstance(words, jax.Array):
            return
        if not jnp.issubdtype(words.dtype, jax.dtypes.prng_key):
            return
        if _ADVICE not in str(words.dtype):  # Orbax restores JAX's own dtype.
            words = jax.random.wrap_key_data(jax.random.key_data(words), impl=_IMPL)
            object.__setattr__(self, "words", words)
        if not isinstance(words, Tracer):
            # JAX's own error would not show the dtype, which contains the advice.
            words.astype = _reject  # pyright: ignore


def make_guard(words: UInt32[Array, "devices one two"]) -> ArithmeticGuard:
    """Makes a guard from zeros on the same devices as the tables."""
    return ArithmeticGuard(jax.random.wrap_key_data(words, impl=_IMPL))
