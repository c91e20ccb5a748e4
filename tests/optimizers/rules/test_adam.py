"""Adam asks for every row, or for each occurrence of an id, but not for both."""

from typing import Any

import jax.numpy as jnp
import pytest

from tpu_embedding import optimizers as opt
from tpu_embedding.optimizers.modes import EveryRow, InSequence, requested_modes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"lazy_adam": False}, [EveryRow(1)]),
        ({"use_gradient_accumulation": False}, [InSequence()]),
    ],
    ids=str,
)
def test_asks_for_the_rows_that_it_moves(options, expected):
    optimizer: Any = opt.adam(0.1, **options)
    rows = jnp.ones((2, 3))
    with requested_modes() as modes:
        optimizer.update(rows, optimizer.init(rows), rows)
    assert modes == expected


def test_refuses_to_move_every_row_once_per_occurrence():
    with pytest.raises(ValueError, match="use_gradient_accumulation must be True"):
        opt.adam(0.1, lazy_adam=False, use_gradient_accumulation=False)
