"""Bounded Adagrad, against its formula."""

from typing import Any

import numpy as np
import pytest

from tests.optimizers.row_by_row import check_against_loop
from tests.tiers import full_cases, with_ids
from tpu_embedding.optimizers.rules.adagrad import adagrad
from tpu_embedding.optimizers.rules.bounded_adagrad import bounded_adagrad

CASES = {
    "off": {},
    "bounds": {"max_var_update": 0.05, "max_accumulator": 0.8},
    "bounds_of_new": {
        "max_var_update": 0.05,
        "max_accumulator": 0.05,
        "update_accumulator_first": True,
    },
}


@pytest.mark.parametrize("options", full_cases(with_ids(CASES), "off", "bounds"))
def test_follows_the_formula(options):
    def step(row, gradient, slots, t):
        new = slots[0] + gradient**2
        if options.get("max_accumulator"):
            new = np.minimum(new, options["max_accumulator"])
        used = new if options.get("update_accumulator_first") else slots[0]
        change = 0.1 * gradient / np.sqrt(used)
        bound = options.get("max_var_update") or np.inf
        return row - np.clip(change, -bound, bound), [new]

    check_against_loop(bounded_adagrad(0.1, **options), step, [0.1])


def test_without_bounds_it_is_adagrad():
    rows = np.ones((3, 2), np.float32)
    bounded: Any = bounded_adagrad(0.1, update_accumulator_first=True)
    plain: Any = adagrad(0.1)
    state, plain_state = bounded.init(rows), plain.init(rows)
    for _ in range(2):
        updates, state = bounded.update(rows, state)
        expected, plain_state = plain.update(rows, plain_state)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)
