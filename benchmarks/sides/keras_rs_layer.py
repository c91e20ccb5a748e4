"""keras-rs on JAX: its DistributedEmbedding, which has dense gradients on CPUs."""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import keras  # noqa: E402  # pyright: ignore[reportMissingImports]
import keras_rs  # noqa: E402  # pyright: ignore[reportMissingImports]
import numpy as np  # noqa: E402
from settings import (  # noqa: E402
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_table,
)


class Side:
    """One table per feature, in one layer; its state is donated."""

    def __init__(self, setting: Setting):
        self.versions = {
            "keras_rs": keras_rs.__version__,
            "keras": keras.__version__,
            "jax": jax.__version__,
        }
        layer = _make_layer(setting)
        optimizer = keras.optimizers.Adagrad(
            LEARNING_RATE, INITIAL_ACCUMULATOR, epsilon=EPSILON
        )
        optimizer.build(layer.trainable_variables)
        # Arrays of their own, because the steps donate them.
        tables = [jnp.array(v.value) for v in layer.trainable_variables]
        slots = [jnp.array(v.value) for v in optimizer.variables]
        for variable in (*layer.trainable_variables, *optimizer.variables):
            variable._value = None
        fixed = [v.value for v in layer.non_trainable_variables]
        self._state = [tables, slots]
        by_table = np.moveaxis(cotangents(setting), 1, 0)
        self._cotangents = {f"f{i:03d}": jnp.asarray(c) for i, c in enumerate(by_table)}

        def look_up(tables, batch):
            return layer.stateless_call(tables, fixed, batch)[0]

        def step(tables, slots, batch, cotangents):
            activations, pull_back = jax.vjp(lambda t: look_up(t, batch), tables)
            (gradients,) = pull_back(cotangents)
            tables, slots = optimizer.stateless_apply(slots, gradients, tables)
            return tables, slots, activations

        self._train = jax.jit(step, donate_argnums=(0, 1))
        self._forward = jax.jit(look_up)

    def load(self, ids: np.ndarray) -> Any:
        """Puts a batch on the device."""
        batch = {f"f{i:03d}": jnp.asarray(each) for i, each in enumerate(ids)}
        return jax.block_until_ready(batch)

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        result = self._train(*self._state, batch, self._cotangents)
        *self._state, _ = jax.block_until_ready(result)

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        return jax.block_until_ready(self._forward(self._state[0], batch))

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        result = self.forward(batch)
        return np.stack([np.asarray(result[name]) for name in sorted(result)], axis=1)


def _make_layer(setting: Setting) -> Any:
    def initializer_of(table):
        return lambda shape, dtype=None: jnp.asarray(initial_table(setting, table))

    features = {
        f"f{i:03d}": keras_rs.layers.FeatureConfig(
            name=f"f{i:03d}",
            table=keras_rs.layers.TableConfig(
                name=f"t{i:03d}",
                vocabulary_size=setting.rows,
                embedding_dim=setting.dim,
                initializer=initializer_of(i),
                combiner="sum",
                placement="default_device",
            ),
            input_shape=(setting.batch, setting.valence),
            output_shape=(setting.batch, setting.dim),
        )
        for i in range(setting.tables)
    }
    layer = keras_rs.layers.DistributedEmbedding(features)
    layer.build({name: f.input_shape for name, f in features.items()})
    return layer
