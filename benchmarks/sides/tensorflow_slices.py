"""TensorFlow: sparse lookups, gradients as IndexedSlices, Keras' Adagrad."""

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as _tensorflow  # noqa: E402  # pyright: ignore
import tf_keras  # noqa: E402  # pyright: ignore[reportMissingImports]
from settings import (  # noqa: E402
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Setting,
    cotangents,
    initial_table,
)

tf: Any = _tensorflow  # Its stubs, where found, leave much of it out.


class Side:
    """One variable per table; each step is one `tf.function`."""

    def __init__(self, setting: Setting):
        self.versions = {"tensorflow": tf.__version__}
        self._setting = setting
        self._tables = [
            tf.Variable(initial_table(setting, i)) for i in range(setting.tables)
        ]
        optimizer = tf_keras.optimizers.Adagrad(
            LEARNING_RATE, INITIAL_ACCUMULATOR, epsilon=EPSILON, jit_compile=False
        )
        optimizer.build(self._tables)
        by_table = np.moveaxis(cotangents(setting), 1, 0)
        constants = [tf.constant(np.ascontiguousarray(c)) for c in by_table]

        @tf.function
        def step(batch):
            with tf.GradientTape() as tape:
                activations = self._look_up(batch)
            gradients = tape.gradient(
                activations, self._tables, output_gradients=constants
            )
            optimizer.apply_gradients(zip(gradients, self._tables, strict=True))
            return activations

        self._train = step
        self._forward = tf.function(self._look_up)

    def load(self, ids: np.ndarray) -> Any:
        """Returns a tensor of ids for each table."""
        return [tf.constant(i) for i in ids.astype(np.int64)]

    def train(self, batch: Any) -> None:
        """Runs one train step."""
        _wait_for(self._train(batch))

    def forward(self, batch: Any) -> Any:
        """Runs one lookup."""
        return _wait_for(self._forward(batch))

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack(self.forward(batch), axis=1)

    def _look_up(self, batch: Any) -> Any:
        return [self._sum_rows(t, i) for t, i in zip(self._tables, batch, strict=True)]

    def _sum_rows(self, table: Any, ids: Any) -> Any:
        batch, valence = self._setting.batch, self._setting.valence
        if valence == 1:
            return tf.nn.embedding_lookup(table, ids[:, 0])
        samples = tf.repeat(tf.range(batch, dtype=tf.int64), valence)
        places = tf.tile(tf.range(valence, dtype=tf.int64), [batch])
        sparse = tf.SparseTensor(
            tf.stack([samples, places], axis=1), tf.reshape(ids, [-1]), [batch, valence]
        )
        return tf.nn.embedding_lookup_sparse(table, sparse, None, combiner="sum")


def _wait_for(activations: Any) -> Any:
    return [a.numpy() for a in activations]
