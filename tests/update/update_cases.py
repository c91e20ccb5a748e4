"""Rules, tables and gradients by hand, for the tests of `update/`.

The rules compute on small integers and halves, which float32 does exactly. So a test
compares with equality, and its reference is a few lines of NumPy.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.optimizers.row_optimizer import Touched, declare
from tpu_embedding.optimizers.table_rows import table_rows
from tpu_embedding.rows.access import Parts
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, pack_rows, unpack_rows
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates

NASTY = np.float32([-0.0, np.inf, -np.inf, np.nan, 1e38, 2e-38])
"""Values that an addition of anything but -0.0, or a product with 0, would change."""

LAYOUTS = {
    "dim3": RowLayout(num_rows=11, row_shape=(3,)),
    "dim3-packed": RowLayout(num_rows=45, row_shape=(3,), tile_lanes=128),
    "dim16-packed": RowLayout(num_rows=11, row_shape=(16,), tile_lanes=128),
    "dim128-packed": RowLayout(num_rows=5, row_shape=(128,), tile_lanes=128),
}


class CountedState(NamedTuple):
    """State of `counted`; `hits` is None without rows of single values."""

    count: Any
    momenta: Any
    lasts: Any
    hits: Any


def counted(*, has_hits=True):
    """Makes a rule with each kind of state that there is.

    For a row `w` with the gradient `g`::

        count += 1               belongs to no row
        m = m / 2 + g            moved by adding
        last = g                 forgets what it was
        hits += 1                one int32 per row
        w -= count * m + last
    """

    def init(params):
        hits = jnp.zeros(params.shape[:1], jnp.int32) if has_hits else None
        return CountedState(jnp.int32(0), 2 * params, jnp.zeros_like(params), hits)

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        momenta = 0.5 * state.momenta + updates
        hits = state.hits + 1 if has_hits else None
        steps = count.astype(jnp.float32) * momenta + updates
        return -steps, CountedState(count, momenta, updates, hits)

    return optax.GradientTransformation(init, update)


class Counted:
    """The rows that `counted` gives, in NumPy."""

    def __init__(self, rows):
        self.count = 0
        self.rows = rows.copy()
        self.momenta = 2 * rows
        self.lasts = np.zeros_like(rows)
        self.hits = np.zeros(len(rows), np.int32)

    def step(self, row_ids, gradients):
        """Updates the named rows, each of which is named once."""
        self.count += 1
        self.apply(row_ids, gradients)

    def apply(self, row_ids, gradients):
        """Updates rows without advancing the count."""
        self.momenta[row_ids] = self.momenta[row_ids] / 2 + gradients
        self.lasts[row_ids] = gradients
        self.hits[row_ids] += 1
        self.rows[row_ids] -= self.count * self.momenta[row_ids] + gradients

    def check(self, table, state):
        """Asserts that a table and the state of `counted` have exactly these values."""
        np.testing.assert_array_equal(state.count, self.count)
        for packed, expected in [
            (table, self.rows),
            (state.momenta, self.momenta),
            (state.lasts, self.lasts),
            (state.hits, self.hits),
        ]:
            if packed is not None:
                np.testing.assert_array_equal(unpack_rows(packed), expected)


class BalancedState(NamedTuple):
    """State of `balanced`."""

    count: Any
    sums: Any
    momenta: Any
    hits: Any


def balanced(*, asks_for_occurrences=False):
    """Makes a rule that asks for three totals of a table, one after the other.

    For a row `w` with the gradient `g`, and `T` of its table::

        T = sum(g)                                 over the rows
        U = sum(T where touched)                   needs T
        L = min(w)
        count += 1
        sums += T + U                              per table
        m = m / 2 + g
        hits += 1 if touched
        w -= m + T + U + L

    `L` is the squared norm of all occurrences instead, if it asks for occurrences.
    """

    def init(params):
        return BalancedState(
            count=jnp.int32(0),
            sums=table_rows(params).total(params),
            momenta=jnp.zeros_like(params),
            hits=jnp.zeros(params.shape[:1], jnp.int32),
        )

    def update(updates, state, params: Any = None):
        known = table_rows(updates)
        total = known.total(updates)
        is_touched = known.is_touched[:, None]
        total = total + known.total(jnp.where(is_touched, known.per_row(total), 0))
        least = known.minimum(jnp.min(params, axis=1))
        if known.occurrence_squares is not None:
            least = known.occurrence_squares
        momenta = 0.5 * state.momenta + updates
        steps = momenta + known.per_row(total) + known.per_row(least)[:, None]
        new_state = BalancedState(
            count=state.count + 1,
            sums=state.sums + total,
            momenta=momenta,
            hits=state.hits + known.is_touched,
        )
        return -steps, new_state

    rule = optax.GradientTransformation(init, update)
    driver = Touched(occurrence_norm=asks_for_occurrences)
    return declare(rule, driver=driver)


class Balanced:
    """The rows that `balanced` gives, in NumPy, for tables of some sizes."""

    def __init__(self, sizes, rows):
        self.table_of_row = np.repeat(np.arange(len(sizes)), sizes)
        self.rows = rows.copy()
        self.count = 0
        self.sums = np.stack([rows[self.table_of_row == k].sum(0) for k in self.tables])
        self.momenta = np.zeros_like(rows)
        self.hits = np.zeros(len(rows), np.int32)

    @property
    def tables(self):
        return range(self.table_of_row[-1] + 1)

    def step(self, gradient, touched, moved, occurrence_squares=None):
        """Updates the rows that are `moved`; totals are those of these rows."""
        self.count += 1
        for table in self.tables:
            rows = (self.table_of_row == table) & moved
            if not rows.any():
                continue
            total = gradient[rows].sum(axis=0)
            total = total + total * (rows & touched).sum()
            least = self.rows[rows].min()
            if occurrence_squares is not None:
                least = occurrence_squares[table]
            self.sums[table] += total
            self.momenta[rows] = self.momenta[rows] / 2 + gradient[rows]
            self.rows[rows] -= self.momenta[rows] + total + least
        self.hits[moved & touched] += 1


def integers(shape, seed=0):
    """Returns small integers as float32, none of which is 0."""
    values = np.random.default_rng(seed).integers(1, 9, shape)
    return (values * np.where(values % 2, 1, -1)).astype(np.float32)


def bits(array):
    """Returns the bits of each element, which tell -0 from 0 and equal NaNs."""
    array = np.asarray(array)
    return array.view(np.uint32)


def gradients_of(row_ids, values, occurrences=None):
    """Returns the gradients of one round, whose unused places hold NaN.

    Args:
      row_ids: local rows of a shard.
      values: `[rows, dim]`.
      occurrences: row and squared norm of each occurrence, or None.
    """
    row_ids = np.asarray(row_ids, np.int32)
    values = np.where((row_ids == PADDING_ROW_ID)[:, None], np.nan, values)
    if occurrences is not None:
        ids, squares = occurrences
        # As many ones as the squared norm.
        ones = np.arange(64) < np.asarray(squares)[:, None]
        occurrences = RowUpdates(row_ids=jnp.int32(ids), values=jnp.float32(ones))
    return RowGradients(
        row_ids=jnp.asarray(row_ids),
        values=jnp.float32(values),
        occurrences=occurrences,
    )


def rounds_of(rounds):
    """Returns the gradient of a step from the list of its rounds.

    Args:
      rounds: pairs of `RowGradients` and the pair (first row, end row), or None.
    """
    first, *later = [
        gradients
        if rows is None
        else dataclasses.replace(gradients, covered=RowRange(*map(jnp.int32, rows)))
        for gradients, rows in rounds
    ]

    def fold_later(body, carry):
        return functools.reduce(body, later, carry)

    return Parts(first, fold_later if later else None)


def plan_of(sizes, dim, optimizer, *, num_devices=1, hardware="cpu", dtype=jnp.float32):
    """Returns a plan of one stack with a table of each size, and that stack."""
    features = {
        f"table_{i}": te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size,
                dim=dim,
                combiner="sum",
                name=f"table_{i}",
                dtype=dtype,
            )
        )
        for i, size in enumerate(sizes)
    }
    plan = te.make_plan(
        features,
        mesh_of(num_devices),
        optimizer=optimizer,
        hardware=te.hardware.hardware_by_name(hardware),
    )
    (stack,) = plan.trained_stacks
    return plan, stack


def sharded(plan, function):
    """Jits a function that runs once per device.

    Returns:
      A function of lists, each with one pytree per device, that returns such a list.
    """

    trees = {}

    def run(stacked):
        # Only the leaves have an axis of devices: a type may fix their shapes.
        items = trees["arguments"].unflatten([leaf[0] for leaf in stacked])
        leaves, trees["results"] = jax.tree.flatten(function(*items))
        return [jnp.asarray(leaf)[None] for leaf in leaves]

    mapped = jax.jit(
        jax.shard_map(
            run,
            mesh=plan.mesh,
            in_specs=plan.sample_spec,
            out_specs=plan.sample_spec,
            check_vma=False,
        )
    )

    def call(*per_shard):
        shards = [jax.tree.flatten(items) for items in zip(*per_shard, strict=True)]
        trees["arguments"] = shards[0][1]
        leaves = zip(*(leaves for leaves, _ in shards), strict=True)
        results = mapped([jnp.asarray(np.stack(parts)) for parts in leaves])
        results = [np.asarray(leaf) for leaf in results]
        return [
            trees["results"].unflatten([jnp.asarray(leaf[shard]) for leaf in results])
            for shard in range(plan.num_shards)
        ]

    return call


def shard_of(rows, num_shards):
    """Returns the rows of each shard, filled up with zeros."""
    rows = np.pad(rows, ((0, -len(rows) % num_shards), (0, 0)))
    return [rows[shard::num_shards] for shard in range(num_shards)]


def unshard(shards, num_rows):
    """Returns the rows of a stack in their order, given those of each shard."""
    rows = [np.asarray(unpack_rows(packed)) for packed in shards]
    return np.stack(rows, axis=1).reshape(-1, *rows[0].shape[1:])[:num_rows]


def gradients_of_shards(row_ids, values, num_shards, num_places=6):
    """Returns the gradients of rows of a stack at their owners, one for each shard."""
    result = []
    for shard in range(num_shards):
        is_here = row_ids % num_shards == shard
        missing = num_places - is_here.sum()
        local = np.pad(
            row_ids[is_here] // num_shards, (1, missing), constant_values=PADDING_ROW_ID
        )
        result.append(
            gradients_of(local, np.pad(values[is_here], ((1, missing), (0, 0))))
        )
    return result


def packed(rows, layout) -> PackedRows:
    """Packs NumPy rows."""
    return pack_rows(jnp.asarray(rows), layout)


def check_balanced(reference, tables, states, num_rows):
    """Compares all shards with `Balanced`, bit for bit."""
    for state in states:
        assert state.count == reference.count
        np.testing.assert_array_equal(state.sums, reference.sums)
    for found, expected in [
        (tables, reference.rows),
        ([state.momenta for state in states], reference.momenta),
        ([state.hits for state in states], reference.hits),
    ]:
        np.testing.assert_array_equal(unshard(found, num_rows), expected)
