"""This package: its functional core, tables and slots donated.

Freed memory is kept, as by the training command; see `te.host_memory`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from embedding_step import jit_step
from settings import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_values,
)

import tpu_embedding as te


class Side:
    """Tables of the setting on all devices of JAX."""

    def __init__(self, setting: Setting):
        te.host_memory.keep_freed_memory()
        self.versions = {"tpu_embedding": te.__version__, "jax": jax.__version__}
        optimizer = te.optimizers.rowwise_adagrad(
            LEARNING_RATE, INITIAL_ACCUMULATOR, epsilon=EPSILON
        )
        self._plan = te.make_plan(table_features(setting), optimizer=optimizer)
        tables = te.functional.init_tables(self._plan, jax.random.key(0))
        self._state = [tables, te.functional.init_slots(tables, self._plan)]
        by_table = np.moveaxis(cotangents(setting), 1, 0)
        self._cotangents = te.inputs.shard_batch(
            {f.name: by_table[i] for i, f in enumerate(self._plan.features)}, self._plan
        )
        self._train = jit_step(self._plan)
        options = self._plan.compiler_options
        self._forward = jax.jit(_forward, static_argnums=2, compiler_options=options)

    def load(self, ids: np.ndarray) -> Any:
        """Puts a batch on the devices."""
        by_feature = ids[..., 0] if ids.shape[-1] == 1 else ids
        names = (feature.name for feature in self._plan.features)
        batch = dict(zip(names, by_feature, strict=True))
        return jax.block_until_ready(te.inputs.shard_batch(batch, self._plan))

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        arguments = (batch, self._cotangents, self._plan)
        *self._state, activations = self._train(*self._state, *arguments)
        jax.block_until_ready((self._state, activations))

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        activations = self._forward(self._state[0], batch, self._plan)
        return jax.block_until_ready(activations)

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack([np.asarray(a) for a in self.forward(batch).values()], axis=1)


def table_features(setting: Setting) -> dict[str, te.FeatureConfig]:
    """Returns one feature per table; each table starts from the values of all sides."""
    return {
        f"f{i:03d}": te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=setting.rows,
                dim=setting.dim,
                combiner="sum",
                initializer=te.initializers.RowInitializer(_initial_rows, (i,)),
                name=f"t{i:03d}",
            )
        )
        for i in range(setting.tables)
    }


def _initial_rows(
    key: jax.Array, row_ids: jax.Array, dim: int, table: jax.Array
) -> jax.Array:
    del key
    return initial_values(table, row_ids, dim, jnp)


def _forward(tables: Any, ids: Any, plan: te.EmbeddingPlan) -> Any:
    return te.functional.lookup(tables, ids, plan).activations
