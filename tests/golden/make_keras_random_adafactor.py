"""Runs Adafactor of tf_keras and of Keras 3 with 100 random configurations.

Nothing here imports this file: it made `keras_random_adafactor.npz`. To make it again:

    python3.12 -m venv /tmp/keras
    /tmp/keras/bin/pip install tensorflow==2.21.0 tf_keras==2.21.0 keras==3.15.1
    /tmp/keras/bin/python tests/golden/make_keras_random_adafactor.py

Arrays of the file:

* `start` [V, D]; `ids` [T, N], among which are equal ones; `gradients` [T, N, D], one
  per id. The dense gradient of a step is their sum by id.
* `configs` [100], JSON: the arguments of `Adafactor`. `get_config()` of both flavours
  is in `tf_keras_config` and `keras_3_config` [100], JSON.
* `tf_keras_dense`, `tf_keras_indexed`, `keras_3_dense` [100, 2, V, D]: the variable
  after steps 2 and 4, with the dense gradient or with `tf.IndexedSlices` of the ids.
"""

import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import tf_keras

NUM_CONFIGS, NUM_ROWS, DIM, NUM_STEPS, NUM_IDS = 100, 6, 3, 4, 8
KEPT_STEPS = (1, 3)


def random_config(generator):
    """Returns arguments that both flavours take."""

    def choose(*values):
        return values[generator.integers(len(values))]

    config = {
        "learning_rate": choose(0.01, 0.1, 1.0),
        "beta_2_decay": choose(-0.8, -0.5, -1.0),
        "epsilon_1": choose(1e-30, 1e-8, 1e-3),
        "epsilon_2": choose(1e-3, 0.1),
        "clip_threshold": choose(1.0, 0.3, 3.0),
        "relative_step": choose(True, False),
    }
    clip = choose(None, "clipnorm", "clipnorm", "clipvalue", "global_clipnorm")
    if clip is not None:
        config[clip] = choose(0.2, 0.7, 5.0)
    if generator.random() < 0.25:
        config["weight_decay"] = choose(0.01, 0.1)
    if generator.random() < 0.25:
        config["use_ema"] = True
        config["ema_momentum"] = choose(0.5, 0.9)
        config["ema_overwrite_frequency"] = choose(None, 2, 3)
    return config


def run(optimizer, variable, gradients):
    """Returns the variable after `KEPT_STEPS`."""
    optimizer.build([variable])
    kept = []
    for step, gradient in enumerate(gradients):
        optimizer.apply_gradients([(gradient, variable)])
        if step in KEPT_STEPS:
            kept.append(np.asarray(variable))
    return np.stack(kept)


def dense_gradient(ids, gradient):
    """Returns the sum of the gradients of each row."""
    dense = np.zeros((NUM_ROWS, DIM), np.float32)
    np.add.at(dense, ids, gradient)
    return tf.constant(dense)


def main():
    """Writes the file beside this one."""
    generator = np.random.default_rng(0)
    start = generator.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    ids = generator.integers(0, NUM_ROWS, (NUM_STEPS, NUM_IDS)).astype(np.int32)
    shape = (NUM_STEPS, NUM_IDS, DIM)
    gradients = generator.normal(size=shape).astype(np.float32)
    dense = [dense_gradient(*step) for step in zip(ids, gradients, strict=True)]
    indexed = [
        tf.IndexedSlices(tf.constant(g), tf.constant(i), tf.constant([NUM_ROWS, DIM]))
        for i, g in zip(ids, gradients, strict=True)
    ]
    found = {"configs": [], "tf_keras_config": [], "keras_3_config": []}
    found |= {"tf_keras_dense": [], "tf_keras_indexed": [], "keras_3_dense": []}
    for _ in range(NUM_CONFIGS):
        config = random_config(generator)
        tf_optimizers = [tf_keras.optimizers.Adafactor(**config) for _ in range(2)]
        optimizer = keras.optimizers.Adafactor(**config)
        found["configs"].append(json.dumps(config))
        found["tf_keras_config"].append(
            json.dumps(tf_optimizers[0].get_config(), default=float)
        )
        found["keras_3_config"].append(json.dumps(optimizer.get_config()))
        for kind, each, steps in zip(
            ("dense", "indexed"), tf_optimizers, (dense, indexed), strict=True
        ):
            tables = run(each, tf.Variable(start), steps)
            found[f"tf_keras_{kind}"].append(tables)
        found["keras_3_dense"].append(run(optimizer, keras.Variable(start), dense))
    np.savez_compressed(
        pathlib.Path(__file__).parent / "keras_random_adafactor.npz",
        start=start,
        ids=ids,
        gradients=gradients,
        **{name: np.array(values) for name, values in found.items()},
    )


if __name__ == "__main__":
    main()
