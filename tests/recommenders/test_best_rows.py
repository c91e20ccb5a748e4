"""The best rows of a table: equal to NumPy's stable sort, wherever the rows are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.placements import mesh_of_shape
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.inputs import PADDING_ROW_ID
from tpu_embedding.recommenders import best_rows

DIM, SIZES = 4, {"few": 5, "many": 37}
PLACEMENTS = {
    "1": ("1", te.Sharded()),
    "2x2": ("2x2", te.Sharded()),
    "model": ("2x2", te.Sharded(axes=("model",))),
    "replicated": ("2x2", te.Replicated()),
    "2x2x2": ("2x2x2", te.Sharded()),
}


def layer_of(mesh, placement=None, **options):
    """Returns plan, tables and values; two tables share a stack."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=DIM, name=name, **options)
        )
        for name, size in SIZES.items()
    }
    plan = te.make_plan(features, mesh, placement=placement)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    random = np.random.default_rng(0)
    # Small integers: products are exact, and many are equal.
    values = {n: random.integers(-2, 3, (s, DIM)) for n, s in SIZES.items()}
    tables, _ = te.functional.with_table_values(tables, values, plan, {})
    queries = random.integers(-2, 3, (7, DIM)).astype(np.float32)
    return plan, tables, values, queries


def wanted(scores, k):
    """Returns the best scores and their ids; of equal ones, the lower id first."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    return best, np.where(np.isinf(best), PADDING_ROW_ID, order)


@pytest.mark.parametrize("case", quick_cases(PLACEMENTS, "2x2"))
def test_equals_a_stable_sort_on_every_mesh(case, monkeypatch):
    # Several blocks per device. The last one reaches beyond the table.
    monkeypatch.setattr(best_rows, "ROWS_PER_BLOCK", 4)
    mesh, placement = PLACEMENTS[case]
    plan, tables, values, queries = layer_of(mesh_of_shape(mesh), placement)
    kernel = np.array([[1, 0], [2, 1], [0, -1], [-1, 3]], np.float32)
    excluded = np.random.default_rng(1).integers(0, 37, (7, 3), np.int32)
    excluded[:, 2] = PADDING_ROW_ID

    @jax.jit
    def find(tables, queries, kernel):
        few = te.functional.top_k(tables, queries, plan, 5, table="few")
        many = te.functional.top_k(
            tables,
            queries[:, :2],
            plan,
            36,
            table="many",
            transform=lambda rows: rows @ kernel,
            excluded=excluded,
        )
        return few, many

    few, many = find(tables, queries, kernel)
    scores, ids = wanted(queries @ values["few"].T.astype(np.float32), 5)
    np.testing.assert_array_equal(few.scores, scores)
    np.testing.assert_array_equal(few.ids, ids)
    scores = queries[:, :2] @ (values["many"] @ kernel).T
    np.put_along_axis(scores, excluded[:, :2], -np.inf, axis=1)
    scores, ids = wanted(scores, 36)
    assert np.isinf(scores).any()
    np.testing.assert_array_equal(many.scores, scores)
    np.testing.assert_array_equal(many.ids, ids)


def test_rows_without_a_finite_product_come_last_and_padding_never():
    plan, tables, values, queries = layer_of(mesh_of_shape("2x2"))
    bad = values["few"].astype(np.float32)
    bad[1], bad[3] = np.nan, -np.inf
    with pytest.warns(UserWarning, match="NaN or infinite"):
        tables, _ = te.functional.with_table_values(tables, {"few": bad}, plan, {})
    best = te.functional.top_k(tables, np.ones_like(queries), plan, 5, table="few")
    assert np.asarray(best.ids)[:, 3:].tolist() == [[1, 3]] * 7
    assert set(np.asarray(best.ids)[0, :3]) == {0, 2, 4}
    # An id beyond int32 matches no row. Its lower half would.
    beyond = np.full((len(queries), 1), 2**32 + 2)
    queries = np.ones_like(queries)
    kept = te.functional.top_k(tables, queries, plan, 3, table="few", excluded=beyond)
    np.testing.assert_array_equal(kept.ids, best.ids[:, :3])


@pytest.mark.full
def test_excluded_ids_on_devices_keep_their_bits():
    plan, tables, _, queries = layer_of(mesh_of_shape("2"))
    find = functools.partial(te.functional.top_k, tables, queries, plan, 3, table="few")
    best = find().ids
    ids = np.asarray(best, np.int64)[:, :1]
    without_first = find(excluded=ids).ids
    assert not np.any(np.asarray(without_first) == ids)
    for excluded, wanted in (
        *((ids, without_first), (ids + 2**32, best)),
        *((ids.astype(np.uint32), without_first), (np.zeros((7, 0)), best)),
    ):
        with jax.enable_x64(excluded.itemsize == 8):
            found = find(excluded=jnp.asarray(excluded)).ids
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(find(excluded=[[]] * 7).ids, best)


@pytest.mark.parametrize("enable_x64", [False, True])
def test_float64_queries_and_towers(enable_x64):
    plan, tables, _, queries = layer_of(mesh_of_shape("2"))
    find = functools.partial(te.functional.top_k, tables, k=3, plan=plan, table="few")
    expected = find(queries)
    with jax.enable_x64(enable_x64):
        dtype = jax.dtypes.canonicalize_dtype(float)
        doubled = find(
            queries.astype(float), transform=lambda rows: 2 * rows.astype(dtype)
        )
        plain = find(queries.astype(float))
    for factor, result in ((2, doubled), (1, plain)):
        assert (result.scores.dtype, result.ids.dtype) == (jnp.float32, jnp.int32)
        np.testing.assert_array_equal(result.ids, expected.ids)
        np.testing.assert_array_equal(result.scores, factor * expected.scores)


def test_zeros_of_any_sign_are_equal():
    table = te.TableConfig(vocabulary_size=3, dim=1, name="t")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of_shape("2"))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    values = {"t": np.array([[0.0], [-0.0], [1.0]])}
    tables, _ = te.functional.with_table_values(tables, values, plan, {})
    best = te.functional.top_k(tables, jnp.array([[-1.0]]), plan, 2)
    assert best.ids.tolist() == [[0, 1]]


@pytest.mark.full
def test_rows_are_those_of_a_lookup():
    """Narrow rows and quantized ones are scored as a lookup returns them."""
    for options in ({"dtype": "bfloat16"}, {"dtype": "int8"}):
        plan, tables, _, queries = layer_of(mesh_of_shape("2"), **options)
        ids = {"many": np.arange(SIZES["many"], dtype=np.int32)}
        rows = te.functional.lookup(tables, ids, plan).activations
        best = te.functional.top_k(tables, queries, plan, 37, table="many")
        scores = queries @ np.asarray(rows["many"]).T
        # Sums of four products in another order.
        np.testing.assert_allclose(best.scores, wanted(scores, 37)[0], atol=1e-5)


def test_wrong_arguments_are_named():
    plan, tables, _, queries = layer_of(mesh_of_shape("1"))

    def find(k=1, queries=queries, tables=tables, **options):
        te.functional.top_k(tables, queries, plan, k, **{"table": "few"} | options)

    for k in (6, 0):
        with rejects(field="k", value=k):
            find(k)
    with rejects(field="table", value=None):
        find(table=None)
    for options in ({"queries": queries[:, :3]}, {"transform": lambda x: x[:, :3]}):
        with rejects(field="queries"):
            find(**options)
    wrong = [3], [[1, 2], [3]], np.zeros((6, 1), int), np.full((7, 1), 2.7)
    for excluded in wrong:
        with rejects(field="excluded"):
            find(excluded=excluded)
    with rejects(TypeError, fix="te.nn.top_k(layer, queries, k)"):
        find(tables=plan)


def test_a_dynamic_table_has_no_row_numbers():
    vocabulary = te.Dynamic(capacity=8)
    table = te.TableConfig(vocabulary_size=vocabulary, dim=DIM, name="t")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of_shape("1"))
    with rejects(field="table 't'", value=vocabulary):
        te.functional.top_k({}, jnp.zeros((1, DIM)), plan, 1)
