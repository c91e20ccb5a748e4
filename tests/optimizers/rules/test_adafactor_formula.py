"""Adafactor against its equations in float64: two tables, touched rows, all options.

The rule is called directly. `table_rows_context` says which rows are given, as the
layer does: a part of the rows, or all of them with gradient 0 where untouched.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers.modes import (
    EveryRow,
    ModelNorm,
    MustBeLast,
    OccurrenceNorm,
    requested_modes,
)
from tpu_embedding.optimizers.rules._averages import catch_up
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.table_rows import TableRows, table_rows_context

TABLES = np.int32([0, 0, 1, 0, 1, 1, 0])
SIZES = np.float32([4, 3])
NUM_ROWS, DIM = 7, 3
START = np.random.default_rng(0).normal(size=(NUM_ROWS, DIM)).astype(np.float32)
STEPS = [
    (np.arange(NUM_ROWS), 1.0),
    (np.array([0, 2, 5]), 3.0),
    (np.array([1, 3, 6]), 0.1),
    (np.array([0, 2, 4]), 1.0),
]
"""Touched rows, and the scale of their gradients; step 3 touches no row of table 1."""

PLAIN = {"learning_rate": 0.3, "epsilon_1": 0.01, "epsilon_2": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "lazy": {},
    "exact": {"mode": "exact"},
    "options": {
        "learning_rate": lambda count: 0.3 + 0.1 * count,
        "beta_2_decay": -0.5,
        "clip_threshold": 0.5,
        "weight_decay": 0.2,
        "clipvalue": 0.7,
        "loss_scale_factor": 4.0,
    },
    "lazy_clipnorm": {"clipnorm": 0.5, "clip_threshold": 3.0},
    "global_clipnorm": {"global_clipnorm": 0.5, "loss_scale_factor": 2.0},
    "occurrences": {
        "clipnorm": 2.0,
        "clipnorm_of": "occurrences",
        "loss_scale_factor": 2.0,
    },
    "decays_all": {"mode": "exact", "weight_decay": 0.2},
    "ema": {"use_ema": True, "ema_momentum": 0.7},
    "ema_overwrites": {
        "use_ema": True,
        "ema_momentum": 0.7,
        "ema_overwrite_frequency": 2,
        "ema_start": "initial_values",
        "mode": "exact",
    },
    "accumulates": {
        "gradient_accumulation_steps": 3,
        "learning_rate": lambda count: 0.02 * (count + 1),
    },
}


class Reference:
    """Adafactor of some tables of a stack, as its docstring says, in float64."""

    def __init__(self, options):
        names = [field.name for field in dataclasses.fields(self.Options)]
        self.options = self.Options(**{k: v for k, v in options.items() if k in names})
        self.w = START.astype(np.float64)
        is_exact = self.options.mode == "exact"
        self.r = np.full(NUM_ROWS, self.options.epsilon_1 if is_exact else 0.0)
        self.updates_of_row = np.zeros(NUM_ROWS)
        self.c = np.zeros((2, DIM))
        starts_at_rows = self.options.ema_start == "initial_values"
        self.averages = self.w.copy() if starts_at_rows else np.zeros_like(self.w)
        self.t = 0

    @dataclasses.dataclass(kw_only=True)
    class Options:
        learning_rate: Any
        epsilon_1: float
        epsilon_2: float
        beta_2_decay: float = -0.8
        clip_threshold: float = 1.0
        weight_decay: float | None = None
        clipnorm: float | None = None
        clipvalue: float | None = None
        global_clipnorm: float | None = None
        loss_scale_factor: float = 1.0
        use_ema: bool = False
        ema_momentum: float = 0.99
        ema_overwrite_frequency: int | None = None
        gradient_accumulation_steps: int = 1
        mode: str = "lazy"
        ema_start: str = "first_update"

    def step(self, gradient, touched, occurrence_squares):
        """Updates all rows; `gradient` is 0 where not `touched`."""
        o = self.options
        self.t += 1
        rate = o.learning_rate
        if callable(rate):
            rate = rate(self.t * o.gradient_accumulation_steps - 1)
        if o.use_ema:
            # Steps that only collect gradients average as well, in Keras.
            for _ in range(o.gradient_accumulation_steps - 1):
                self.average()
        moves = touched if o.mode == "lazy" else np.ones(NUM_ROWS, bool)
        gradient = self.clip(gradient / o.loss_scale_factor, occurrence_squares)
        decay = 1 - (o.weight_decay or 0) * rate
        for table in range(2):
            rows = np.flatnonzero((TABLES == table) & moves)
            if rows.size:
                self.step_of_table(table, rows, gradient[rows], rate, decay)
        if o.use_ema:
            self.average()

    def clip(self, gradient, occurrence_squares):
        o = self.options
        if o.clipvalue is not None:
            return np.clip(gradient, -o.clipvalue, o.clipvalue)
        norms = np.array([np.sum(gradient[TABLES == table] ** 2) for table in (0, 1)])
        if occurrence_squares is not None:
            norms = occurrence_squares / o.loss_scale_factor**2
        if o.global_clipnorm is not None:
            norms = np.full(2, norms.sum())
        bound = o.clipnorm or o.global_clipnorm or np.inf
        factors = np.minimum(1, bound / np.sqrt(np.maximum(norms, 1e-30)))
        return gradient * factors[TABLES][:, None]

    def step_of_table(self, table, rows, gradient, rate, decay):
        o = self.options
        self.updates_of_row[rows] += 1
        squares = gradient**2 + o.epsilon_1
        t = self.updates_of_row[rows] if o.mode == "lazy" else self.t
        b = 1 - np.power(t, o.beta_2_decay)
        self.r[rows] = b * self.r[rows] + (1 - b) * squares.mean(axis=1)
        b = 1 - self.t**o.beta_2_decay
        self.c[table] = b * self.c[table] + (1 - b) * squares.mean(axis=0)
        columns = self.c[table] / self.c[table].mean()
        u = gradient / np.sqrt(self.r[rows][:, None] * columns)
        u = u / max(1, np.sqrt(np.mean(u**2)) / o.clip_threshold)
        self.w[rows] *= decay
        scale = max(o.epsilon_2, np.sqrt(np.mean(self.w[TABLES == table] ** 2)))
        self.w[rows] -= scale * min(rate, 1 / np.sqrt(self.t)) * u

    def average(self):
        o = self.options
        # Keras counts the update that this step belongs to.
        starts = self.t == 1 and o.ema_start == "first_update"
        momentum = 0 if starts else o.ema_momentum
        self.averages = momentum * self.averages + (1 - momentum) * self.w
        if o.ema_overwrite_frequency and self.t % o.ema_overwrite_frequency == 0:
            self.w = self.averages.copy()


def rows_of(ids, touched, occurrence_squares=None):
    return TableRows(
        table_sizes=jnp.asarray(SIZES),
        tables=jnp.asarray(TABLES[ids]),
        is_used=jnp.asarray(ids >= 0),
        is_touched=jnp.asarray(touched[ids]),
        all_reduce=lambda totals, _: totals,
        occurrence_squares=occurrence_squares,
    )


def is_by_row(leaf):
    return leaf.shape[:1] == (NUM_ROWS,)


def modes_of(optimizer):
    rows = jnp.ones((2, 3))
    some = rows_of(np.array([0, 2]), np.arange(NUM_ROWS) >= 0)
    with requested_modes() as modes, table_rows_context(some):
        state = jax.eval_shape(optimizer.init, rows)
        jax.eval_shape(optimizer.update, rows, state, rows)
    return modes


@pytest.mark.parametrize("name", CASES)
def test_follows_the_equation(name):
    options = {**PLAIN, **CASES[name]}
    optimizer: Any = adafactor(**options)
    reference = Reference(options)
    everything = np.arange(NUM_ROWS)
    with table_rows_context(rows_of(everything, everything < 0)):
        state = optimizer.init(jnp.asarray(START))
    rows = jnp.asarray(START)
    moves_every_row = any(isinstance(x, EveryRow) for x in modes_of(optimizer))
    for seed, (ids, scale) in enumerate(STEPS):
        generator = np.random.default_rng(seed)
        gradient = np.zeros((NUM_ROWS, DIM), np.float32)
        gradient[ids] = scale * generator.normal(size=(len(ids), DIM))
        touched = np.isin(everything, ids)
        squares = np.float32([9.0, 1.0]) if "occurrences" in name else None
        ids = everything if moves_every_row else ids
        old = jax.tree.map(lambda x, ids=ids: x[ids] if is_by_row(x) else x, state)
        with table_rows_context(rows_of(ids, touched, squares)):
            updates, new = optimizer.update(gradient[ids], old, rows[ids])
        state = jax.tree.map(
            lambda x, y, ids=ids: x.at[ids].set(y) if is_by_row(x) else y, state, new
        )
        rows = rows.at[ids].add(updates)
        reference.step(gradient.astype(np.float64), touched, squares)
        np.testing.assert_allclose(rows, reference.w, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(
            state.row_accumulators[ids], reference.r[ids], rtol=2e-5
        )
        if options.get("mode") == "exact" or "lazy" in name:
            np.testing.assert_allclose(
                state.column_accumulators, reference.c, rtol=2e-5
            )
        sums = [np.sum(reference.w[TABLES == table] ** 2) for table in (0, 1)]
        np.testing.assert_allclose(state.squares.value, sums, rtol=1e-5)
        assert state.count == seed + 1
        if reference.options.use_ema:
            missed = state.count - state.average_counts
            np.testing.assert_allclose(
                catch_up(state.averages, rows, missed[:, None], state.average_momentum),
                reference.averages,
                rtol=2e-5,
                atol=2e-6,
            )
        else:
            assert state.averages is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, set()),
        ({"mode": "exact"}, set()),
        ({"weight_decay": 0.1}, set()),
        ({"mode": "exact", "weight_decay": 0.1}, {EveryRow(1)}),
        ({"use_ema": True}, set()),
        ({"use_ema": True, "ema_overwrite_frequency": 3}, {EveryRow(1)}),
        ({"ema_overwrite_frequency": 3}, set()),
        ({"gradient_accumulation_steps": 2}, {EveryRow(2)}),
        ({"clipnorm": 1.0}, set()),
        ({"clipnorm": 1.0, "clipnorm_of": "occurrences"}, {OccurrenceNorm()}),
        ({"clipnorm_of": "occurrences"}, set()),
        ({"global_clipnorm": 1.0}, {ModelNorm()}),
    ],
    ids=str,
)
def test_asks_for_the_rows_that_it_moves(options, expected):
    modes = modes_of(adafactor(**options))
    assert {mode for mode in modes if not isinstance(mode, MustBeLast)} == expected
    assert sum(isinstance(mode, MustBeLast) for mode in modes) == 1
