"""Adafactor with 100 random configurations, beside runs of Keras 3 and of tf_keras.

`tests/golden/make_keras_random_adafactor.py` made the runs. The clipped norm of
`tf_keras` is that of the dense gradient, or that of all occurrences of ids where the
gradient is `tf.IndexedSlices`, as of an embedding lookup.
"""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import GOLDEN
from tests.rejections import rejects
from tpu_embedding.optimizers.keras import from_keras_config
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.optimizers.table_rows import table_rows, table_rows_context

KEPT_STEPS = (1, 3)
# Rounding of some roots and sums, of tables whose largest element is about 2.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def runs():
    with np.load(GOLDEN / "keras_random_adafactor.npz") as file:
        return dict(file)


def dense_gradients(runs):
    for ids, gradients in zip(runs["ids"], runs["gradients"], strict=True):
        dense = np.zeros_like(runs["start"])
        np.add.at(dense, ids, gradients)
        yield dense


def tables_of(rule, runs, occurrence_squares=None):
    """Returns the table after `KEPT_STEPS`; with squares, as a layer runs the rule."""
    if occurrence_squares is not None:
        rule = row_optimizer_of(rule).transformation
    table, kept = jnp.asarray(runs["start"]), []
    state = rule.init(table)
    for step, gradient in enumerate(dense_gradients(runs)):
        rows = None
        if occurrence_squares is not None:
            squares = jnp.asarray(occurrence_squares[step : step + 1])
            rows = dataclasses.replace(table_rows(table), occurrence_squares=squares)
        with table_rows_context(rows):
            updates, state = rule.update(jnp.asarray(gradient), state, table)
        table = table + updates
        if step in KEPT_STEPS:
            kept.append(table)
    return np.stack(kept)


def directly(config, **options):
    """Returns the rule of the arguments that Keras was given."""
    return te.optimizers.adafactor(mode="exact", **config, **options)


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("flavour", ["tf_keras", "keras_3"])
def test_dense_gradients_give_the_numbers_of_keras(runs, flavour):
    texts = runs[f"{flavour}_config"]
    for number in range(0, len(texts), 4):
        text = texts[number]
        config, keras_config = json.loads(runs["configs"][number]), json.loads(text)
        if is_rejected(config, flavour):
            with rejects(fix="clipnorm_of='sum'"):
                from_keras_config(keras_config)
            rule = directly(config, ema_start="initial_values", clipnorm_of="sum")
        else:
            rule = from_keras_config(keras_config)
        np.testing.assert_allclose(
            tables_of(rule, runs),
            runs[f"{flavour}_dense"][number],
            **TOLERANCE,
            err_msg=str(config),
        )


def is_rejected(config, flavour):
    """Returns True if a pass over all rows would need the norm of all occurrences."""
    overwrites = config.get("use_ema") and config["ema_overwrite_frequency"]
    passes = overwrites or config.get("weight_decay")
    return bool(flavour == "tf_keras" and config.get("clipnorm") and passes)


@pytest.mark.full
def test_gradients_of_lookups_give_the_numbers_of_tf_keras(runs):
    """`tf_keras` takes `clipnorm` of `tf.IndexedSlices` over all occurrences."""
    squares = np.sum(np.square(runs["gradients"]), axis=(1, 2))
    num_different = 0
    for number, text in enumerate(runs["tf_keras_config"]):
        config = json.loads(runs["configs"][number])
        if "clipnorm" not in config or is_rejected(config, "tf_keras"):
            continue
        expected = runs["tf_keras_indexed"][number]
        found = tables_of(from_keras_config(json.loads(text)), runs, squares)
        np.testing.assert_allclose(found, expected, **TOLERANCE, err_msg=str(config))
        different = np.abs(expected - runs["tf_keras_dense"][number]).max()
        num_different += different > 1e-3
    assert num_different > 10
