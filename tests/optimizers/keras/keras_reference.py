"""Keras' optimizers in NumPy's float64, and their configurations, for other tests.

The rules are written from Keras' sources, each for a dense gradient.
"""

from typing import Any

import numpy as np

NUM_ROWS, DIM = 6, 3
# No id twice in a step, row 4 in the first step only, row 5 never.
STEPS = [[0, 1, 4], [1, 2], [0, 3], [1], [2, 0], [3, 1], [0, 1, 2, 3]]

OFF = dict.fromkeys(("weight_decay", "clipnorm", "global_clipnorm", "clipvalue"))
EMA = {"use_ema": False, "ema_momentum": 0.99, "ema_overwrite_frequency": None}
KERAS_3 = {**OFF, **EMA, "loss_scale_factor": None, "gradient_accumulation_steps": None}
TF_KERAS = {**OFF, **EMA, "jit_compile": False, "is_legacy_optimizer": False}
TF_KERAS["ema_overwrite_frequency"] = 100


def inverse_time_decay(step):
    """Keras' InverseTimeDecay, which runs on JAX as Keras 3's does."""
    return 0.2 / (1 + 0.7 * step / 2)


def keras_3(name, learning_rate: Any = 0.1, **own):
    return {"name": name, "learning_rate": learning_rate, **KERAS_3, **own}


def tf_keras(name, learning_rate: Any = 0.1, **own):
    if not callable(learning_rate):
        learning_rate = np.float32(learning_rate)  # As tf_keras reads its variable.
    return {"name": name, **TF_KERAS, "learning_rate": learning_rate, **own}


# Keras' rules: (w, g, lr, t from 1, slots, fields) to the new w; slots begin empty.


def slot(slots, name, like, start=0.0):
    return slots.setdefault(name, np.full_like(like, start))


def sgd(w, g, lr, t, slots, o):
    if not o["momentum"]:
        return w - lr * g
    slots["m"] = o["momentum"] * slot(slots, "m", w) - lr * g
    return w + (o["momentum"] * slots["m"] - lr * g if o["nesterov"] else slots["m"])


def adagrad(w, g, lr, t, slots, o):
    slots["a"] = slot(slots, "a", w, o["initial_accumulator_value"]) + g**2
    return w - lr * g / np.sqrt(slots["a"] + o["epsilon"])


def adam(w, g, lr, t, slots, o):
    b1, b2 = o["beta_1"], o["beta_2"]
    slots["m"] = b1 * slot(slots, "m", w) + (1 - b1) * g
    slots["v"] = b2 * slot(slots, "v", w) + (1 - b2) * g**2
    alpha = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
    return w - alpha * slots["m"] / (np.sqrt(slots["v"]) + o["epsilon"])


def gradients():
    generator = np.random.default_rng(3)
    for ids in STEPS:
        gradient = np.zeros((NUM_ROWS, DIM))
        gradient[ids] = generator.normal(size=(len(ids), DIM))
        yield np.asarray(ids), gradient.astype(np.float32).astype(np.float64)


def start_rows():
    rows = np.random.default_rng(1).normal(size=(NUM_ROWS, DIM))
    return rows.astype(np.float32).astype(np.float64)


def keras_tables(rule, config):
    """Runs Keras' optimizer."""
    steps = config.get("gradient_accumulation_steps") or 1
    w, slots, kept, tables = start_rows(), {}, 0.0, []
    for step, (_, gradient) in enumerate(gradients()):
        kept = kept + gradient / (config.get("loss_scale_factor") or 1.0)
        if (step + 1) % steps == 0:
            rate = config["learning_rate"]
            lr = float(rate(step) if callable(rate) else rate)
            c = config.get("clipvalue") or np.inf
            g, kept = np.clip(kept / steps, -c, c), 0.0
            decayed = w - w * (config.get("weight_decay") or 0.0) * lr
            w = rule(decayed, g, lr, (step + 1) // steps, slots, config)
        tables.append(w)
    return np.stack(tables)
