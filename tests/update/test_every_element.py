"""An elementwise rule on every row, against NumPy on the dense gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import full_cases, matrix, with_ids
from tests.update.update_cases import Counted, counted, integers, packed
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.packed_rows import RowLayout, unpack_rows
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update import every_element
from tpu_embedding.update.every_element import apply_to_every_element
from tpu_embedding.update.lazy_update import lift_to_rows
from tpu_embedding.update.table_writer import TableWriter

OPTIMIZER = RowOptimizer(transformation=counted(has_hits=False), rows="every")

LAYOUTS = {
    "single_values": RowLayout(num_rows=23, row_shape=(1,)),
    "dim3": RowLayout(num_rows=23, row_shape=(3,)),
    "dim3-packed": RowLayout(num_rows=139, row_shape=(3,), line_lanes=128),
    "dim16-packed": RowLayout(num_rows=35, row_shape=(16,), line_lanes=128),
    "dim200-packed": RowLayout(num_rows=7, row_shape=(200,), line_lanes=128),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture
def blocks(request, monkeypatch):
    """Blocks that do not divide the lines of most layouts."""
    monkeypatch.setattr(every_element, "_LINES_PER_BLOCK", request.param)
    monkeypatch.setattr(every_element, "_VALUES_PER_BLOCK", 2 * request.param)
    return request.param


def start(layout):
    rows = integers((layout.num_rows, layout.dim))
    table = packed(rows, layout)
    return table, lift_to_rows(OPTIMIZER).init(table), Counted(rows)


def gradient_of(row_ids, layout, seed=0):
    """The gradient of rows, and places of padding, which hold zeros."""
    values = integers((len(row_ids), layout.dim), seed)
    dense = np.zeros((layout.num_rows, layout.dim), np.float32)
    dense[row_ids] = values
    row_ids = np.int32([PADDING_ROW_ID, *row_ids, PADDING_ROW_ID])
    values = np.pad(values, ((1, 1), (0, 0)))
    return RowUpdates(row_ids=jnp.asarray(row_ids), values=jnp.asarray(values)), dense


def new_apply():
    """A jitted function that has not yet been traced with other block sizes."""
    return jax.jit(
        functools.partial(apply_to_every_element, OPTIMIZER, writer=TableWriter())
    )


@pytest.mark.parametrize(
    ("blocks", "layout"),
    full_cases(
        matrix(with_ids({"small_blocks": 2, "one_odd_block": 5}), with_ids(LAYOUTS)),
        *("small_blocks-single_values", "small_blocks-dim3-packed"),
        *("small_blocks-dim16-packed", "small_blocks-dim200-packed"),
        "one_odd_block-dim3-packed",
    ),
    indirect=["blocks"],
)
def test_every_row_moves_as_with_the_dense_gradient(layout, blocks):
    apply = new_apply()
    table, state, reference = start(layout)
    for seed in range(2):
        row_ids = np.int32([layout.num_rows - 1, 0, 3])
        gradient, dense = gradient_of(row_ids, layout, seed)
        table, state = apply(table, state, gradient, None)
        reference.step(slice(None), dense)
        reference.check(table, state)


def rows_of_range(layout, first, end):
    return np.int32([end - 1, first]), RowRange(jnp.int32(first), jnp.int32(end))


@each_layout
def test_ranges_of_rows_do_not_overlap(layout, monkeypatch):
    """One step in three rounds; each row moves once, by the round of its range."""
    monkeypatch.setattr(every_element, "_LINES_PER_BLOCK", 2)
    monkeypatch.setattr(every_element, "_VALUES_PER_BLOCK", 4)
    apply = new_apply()
    table, state, reference = start(layout)
    cuts = [0, 2, layout.num_rows - 2, layout.num_rows]
    whole = np.zeros((layout.num_rows, layout.dim), np.float32)
    old_state = state
    for first, end in zip(cuts, cuts[1:], strict=False):
        row_ids, rows = rows_of_range(layout, first, end)
        gradient, dense = gradient_of(row_ids, layout, seed=first)
        whole += dense
        before = unpack_rows(table)
        table, state = apply(
            table, state._replace(count=old_state.count), gradient, rows
        )
        others = np.ones(layout.num_rows, bool)
        others[first:end] = False
        np.testing.assert_array_equal(unpack_rows(table)[others], before[others])
    reference.step(slice(None), whole)
    reference.check(table, state)


def test_what_is_not_finite_stays_in_its_row():
    layout = LAYOUTS["dim16-packed"]
    table, state, reference = start(layout)
    gradient, dense = gradient_of(np.int32([1, 34]), layout)
    reference.step(slice(None), dense)
    values = gradient.values.at[1].set(jnp.nan)
    gradient = RowUpdates(row_ids=gradient.row_ids, values=values)
    table, state = new_apply()(table, state, gradient, None)
    others = np.arange(layout.num_rows) != 1
    np.testing.assert_array_equal(unpack_rows(table)[others], reference.rows[others])
    found = unpack_rows(state.momenta)[others]
    np.testing.assert_array_equal(found, reference.momenta[others])
    assert np.isnan(unpack_rows(table)[1]).all()


def test_blocks_of_the_pass_fit_caches():
    """4 MiB of float32 each."""
    assert every_element._LINES_PER_BLOCK * 128 * 4 == 4 * 2**20
    assert every_element._VALUES_PER_BLOCK * 4 == 4 * 2**20


@pytest.mark.full
@needs_kernels
def test_bfloat16_slots_have_the_spare_row_of_their_table(monkeypatch):
    """The pass slices table and slots alike, the last and shorter block, too."""
    monkeypatch.setattr(every_element, "_LINES_PER_BLOCK", 7)
    optimizer = te.optimizers.every_row(optax.adam(0.1, mu_dtype=jnp.bfloat16))
    results = []
    for kernels in ("xla", "interpreter"):
        plan = one_table_plan(
            *(optimizer, 64, 32, mesh_of(1)),
            hardware=te.hardware.hardware_by_name("v5p"),
            kernels=kernels,
        )
        tables, slots = initial_state(plan, integers((64, 32)))
        for seed in (1, 2):
            ids = np.int32([0, 5, 63, 63])
            tables, slots = update(tables, slots, ids, integers((4, 32), seed), plan)
        results.append(te.functional.unstack_tables(tables, plan)["table"])
    # Duplicates are summed in another order.
    np.testing.assert_allclose(*results, rtol=1e-6, atol=1e-6)
