"""Rules given as a function of one row."""

import jax.numpy as jnp
import pytest

from tests.rejections import rejects
from tpu_embedding.optimizers.rules.user_defined import user_defined

DIM = 4


WRONG = {
    "initializers": {"slot_names": ["a", "b"], "slot_initializers": [0.0]},
    "dims": {"slot_names": ["a"], "slot_initializers": [0.0], "slot_dims": [1, 2]},
    "dim": {"slot_names": ["a"], "slot_initializers": [0.0], "slot_dims": [3]},
    "names": {"slot_names": ["a", "a"], "slot_initializers": [0.0, 0.0]},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_slots(name):
    with rejects(field="slot_names"):
        user_defined(lambda g, w, slots, rate, _: w - rate * g, 0.1, **WRONG[name])


WRONG_RESULTS = {
    "too_few": lambda g, w, slots, rate, _: (w, slots[0]),
    "row_alone": lambda g, w, slots, rate, _: w,
    "shapes": lambda g, w, slots, rate, _: (w[:2], g, g),
}


@pytest.mark.parametrize("computation", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_wrong_results(computation):
    optimizer = user_defined(
        *(computation, 0.1),
        slot_names=["z_momenta", "a_levels"],
        slot_initializers=[jnp.zeros, 0.5],
        slot_dims=[2, 1],
    )
    rows = jnp.ones((3, DIM))
    with rejects(field="custom_computation", fix="'z_momenta': (4,), 'a_levels': ()"):
        optimizer.update(rows, optimizer.init(rows), rows)
