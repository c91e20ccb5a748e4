"""A rule within one kernel, in the interpreter, against NumPy."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.conftest import needs_kernels
from tests.update.update_cases import (
    gradients_of,
    integers,
    packed,
    plan_of,
)
from tpu_embedding.rows.packed_rows import unpack_rows
from tpu_embedding.types import PADDING_ROW_ID as PADDING
from tpu_embedding.update.apply import init_state
from tpu_embedding.update.by_kernel import update_by_kernel

pytestmark = needs_kernels


class MixedState(NamedTuple):
    """State with slots of both kinds, and values of no row, in turn."""

    levels: Any
    count: Any
    momenta: Any
    offset: Any
    peaks: Any
    lasts: Any


def mixed():
    """Makes a rule whose slots are rows and single values, moved in both ways.

    For a row `w` with the gradient `g`::

        count += 1                     belongs to no row
        level += sum(g)                one value, moved by adding
        peak = count * sum(g)          one value, forgets what it was
        m = m / 2 + g                  a row, moved by adding
        last = g * 4                   a row, forgets what it was
        w -= m + level + offset
        offset *= 2                    belongs to no row
    """

    def init(params):
        single = jnp.zeros(params.shape[:1], jnp.float32)
        return MixedState(
            levels=single + 1,
            count=jnp.int32(0),
            momenta=2 * params,
            offset=jnp.float32(1),
            peaks=single,
            lasts=jnp.zeros_like(params),
        )

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        sums = jnp.sum(updates, axis=1)
        levels = state.levels + sums
        momenta = 0.5 * state.momenta + updates
        steps = momenta + levels[:, None] + state.offset
        new = MixedState(
            levels=levels,
            count=count,
            momenta=momenta,
            offset=2 * state.offset,
            peaks=sums * count.astype(jnp.float32),
            lasts=4 * updates,
        )
        return -steps, new

    return optax.GradientTransformation(init, update)


def kernel_plan(num_rows, dim, optimizer):
    plan, stack = plan_of(
        [num_rows], dim, optimizer, hardware="v5p", kernels="interpreter"
    )
    assert stack.backends.update.backend == "interpreter", stack.backends.update
    assert stack.kernels is not None
    return plan, stack


def of_kernel(row_ids, values, stack):
    return gradients_of(row_ids, values, table_layout=stack.layout)


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("dim", [16, pytest.param(128, marks=pytest.mark.full)])
def test_each_kind_of_state(dim):
    num_rows = 20
    plan, stack = kernel_plan(num_rows, dim, mixed())
    rows = integers((num_rows, dim))
    table = packed(rows, stack.layout, stack.kernels)
    state: Any = init_state(table, stack, plan)
    momenta, lasts = 2 * rows, np.zeros_like(rows)
    levels, peaks = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    apply = jax.jit(lambda *values: update_by_kernel(stack.optimizer, *values))
    for t, ids in enumerate([[19, PADDING, 0, 5], [6, 5, PADDING, 19]], 1):
        values = integers((4, dim), seed=t)
        if t == 1:
            values[0] *= 2.0**60  # An outlier, which `peaks` and `lasts` must forget.
        table, state = apply(table, state, of_kernel(ids, values, stack))
        for row, g in zip(ids, values, strict=True):
            if row == PADDING:
                continue
            levels[row] += g.sum()
            peaks[row] = g.sum() * t
            momenta[row] = momenta[row] / 2 + g
            lasts[row] = 4 * g
            rows[row] -= momenta[row] + levels[row] + 2 ** (t - 1)
        if t == 1:
            # From here on it is exact again.
            momenta[19], levels[19], rows[19] = 0, 0, 0
            table, state = without_row(table, state, 19)
    assert (int(state.count), float(state.offset)) == (2, 4.0)
    for found, expected in [
        (table, rows),
        (state.momenta, momenta),
        (state.lasts, lasts),
        (state.levels, levels),
        (state.peaks, peaks),
    ]:
        np.testing.assert_array_equal(unpack_rows(found), expected)


def without_row(table, state, row):
    """Sets what an outlier moved by adding to zero, in a table and its state."""

    def clear(slot):
        rows = np.array(unpack_rows(slot))
        rows[row] = 0
        return packed(rows, slot.layout, slot.kernels)

    state = state._replace(momenta=clear(state.momenta), levels=clear(state.levels))
    return clear(table), state
