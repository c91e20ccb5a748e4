"""JAX without this package: `jnp.take`, dense gradients, and optax's Adagrad."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from settings import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_values,
)


class Side:
    """One array per table; tables and optimizer state are donated."""

    def __init__(self, setting: Setting):
        self.versions = {"jax": jax.__version__, "optax": optax.__version__}
        optimizer = optax.adagrad(LEARNING_RATE, INITIAL_ACCUMULATOR, EPSILON)
        make_table = jax.jit(
            lambda table: initial_values(
                table, jnp.arange(setting.rows), setting.dim, jnp
            )
        )
        tables = [make_table(np.uint32(i)) for i in range(setting.tables)]
        self._state = [tables, jax.jit(optimizer.init)(tables)]
        by_table = np.moveaxis(cotangents(setting), 1, 0)
        self._cotangents = [jnp.asarray(c) for c in by_table]
        self._forward = jax.jit(_look_up)

        def step(tables, slots, batch, cotangents):
            activations, pull_back = jax.vjp(lambda t: _look_up(t, batch), tables)
            (gradients,) = pull_back(cotangents)
            updates, slots = optimizer.update(gradients, slots, tables)
            return optax.apply_updates(tables, updates), slots, activations

        self._train = jax.jit(step, donate_argnums=(0, 1))

    def load(self, ids: np.ndarray) -> Any:
        """Puts a batch on the device."""
        by_feature = ids[..., 0] if ids.shape[-1] == 1 else ids
        return jax.block_until_ready([jnp.asarray(i) for i in by_feature])

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        result = self._train(*self._state, batch, self._cotangents)
        *self._state, _ = jax.block_until_ready(result)

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        return jax.block_until_ready(self._forward(self._state[0], batch))

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack([np.asarray(a) for a in self.forward(batch)], axis=1)


def _look_up(tables: Any, batch: Any) -> Any:
    rows = [jnp.take(t, i, axis=0) for t, i in zip(tables, batch, strict=True)]
    return [r if r.ndim == 2 else r.sum(axis=1) for r in rows]
