"""Runs schedules and three optimizers of tf_keras and of Keras 3 on TensorFlow.

Nothing here imports this file: it made `keras_schedules.npz`. To make it again:

    python3.12 -m venv /tmp/keras
    /tmp/keras/bin/pip install tensorflow==2.21.0 tf_keras==2.21.0 keras==3.15.1
    /tmp/keras/bin/python tests/golden/make_keras_schedules.py

Arrays of the file, in which a flavour is `tf_keras` or `keras_3`:

* `steps` [S]: steps at which the schedules were called.
* `<flavour>_configs` [C], JSON: `get_config()` of SGD with each schedule.
* `<flavour>_rates` [C, S], float32: what the schedule returned.
* `start` [V, D]; `gradients` [T, V, D], dense.
* `<flavour>_optimizers` [O], JSON: `get_config()` of AdamW, Lion and Adadelta.
* `<flavour>_tables` [O, T, V, D]: the variable after each step.
"""

import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import tf_keras

FLAVOURS = {"tf_keras": tf_keras.optimizers, "keras_3": keras.optimizers}
STEPS = [*range(33), 39, 40, 69, 70, 71, 99, 100, 101, 1000, 10_000_000, 16_777_217]
SCHEDULES = [
    ("ExponentialDecay", (0.1, 7, 0.7)),
    ("ExponentialDecay", (0.1, 7, 0.7, True)),
    ("ExponentialDecay", (0.1, 2.5, 0.9, True)),
    ("InverseTimeDecay", (0.5, 3, 0.5)),
    ("InverseTimeDecay", (0.5, 10, 2.0, True)),
    ("PiecewiseConstantDecay", ([3, 10, 70], [0.3, 0.2, 0.5, 0.1])),
    ("PiecewiseConstantDecay", ([16_777_216], [0.3, 0.2])),
    ("PiecewiseConstantDecay", ([3.5, 7.0], [0.3, 0.2, 0.1])),
    ("PolynomialDecay", (0.1, 30)),
    ("PolynomialDecay", (0.1, 10, 0.01, 0.5)),
    ("PolynomialDecay", (0.1, 7, 0.01, 0.3)),
    ("PolynomialDecay", (0.1, 7, 0.01, 2.0, True)),
    ("PolynomialDecay", (0.1, 10, 0.2, 0.5, True)),
    ("CosineDecay", (0.1, 30)),
    ("CosineDecay", (0.1, 20, 0.2, "decay", 0.4, 10)),
    ("CosineDecay", (0.0, 20, 0.0, "decay", 0.4, 7)),
    ("CosineDecay", (0.1, 20, 0.0, "decay", 0.4, 0)),
    ("CosineDecayRestarts", (0.1, 10)),
    ("CosineDecayRestarts", (0.1, 5, 2.0, 0.8, 0.05)),
    ("CosineDecayRestarts", (0.1, 7, 1.0, 0.9, 0.1)),
    ("CosineDecayRestarts", (0.1, 3, 3.0, 0.5)),
    ("CosineDecayRestarts", (0.1, 4, 1.5, 0.7)),
]
CASES = [
    ("AdamW", {"weight_decay": 0.1}, True),
    ("AdamW", {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-3}, False),
    ("Lion", {"beta_1": 0.8, "beta_2": 0.95}, True),
    ("Adadelta", {"rho": 0.9, "epsilon": 1e-4, "weight_decay": 0.01}, True),
]


def json_of(optimizer):
    """Returns the configuration of an optimizer."""
    return json.dumps(optimizer.get_config(), default=float)


def tables_of(optimizer, variable, gradients):
    """Returns the variable after each step."""
    optimizer.build([variable])
    tables = []
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        tables.append(np.array(variable))
    return np.stack(tables)


def main():
    """Writes the file next to this one."""
    generator = np.random.default_rng(0)
    start = generator.normal(size=(4, 3)).astype(np.float32)
    gradients = generator.normal(size=(6, 4, 3)).astype(np.float32)
    gradients[1:, 3] = 0  # Adaptive rules go on moving a row without a gradient.
    arrays = {"steps": np.array(STEPS), "start": start, "gradients": gradients}
    for flavour, package in FLAVOURS.items():
        configs, rates, optimizers, tables = [], [], [], []
        for name, arguments in SCHEDULES:
            schedule = getattr(package.schedules, name)(*arguments)
            configs.append(json_of(package.SGD(schedule)))
            rates.append([float(schedule(tf.constant(s, tf.int64))) for s in STEPS])
        for name, options, has_schedule in CASES:
            schedule = package.schedules.CosineDecay(0.1, 4, 0.1, "x", 0.5, 2)
            rate = schedule if has_schedule else 0.2
            optimizer = getattr(package, name)(rate, **options)
            variable = (keras if flavour == "keras_3" else tf).Variable(start)
            optimizers.append(json_of(optimizer))
            tables.append(tables_of(optimizer, variable, gradients))
        arrays[f"{flavour}_configs"] = np.array(configs)
        arrays[f"{flavour}_rates"] = np.array(rates, np.float32)
        arrays[f"{flavour}_optimizers"] = np.array(optimizers)
        arrays[f"{flavour}_tables"] = np.array(tables)
    path = pathlib.Path(__file__).parent / "keras_schedules.npz"
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main()
