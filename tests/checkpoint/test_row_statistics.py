"""Statistics of rows equal those of NumPy on whole tables, however they are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import quick_cases, with_ids
from tpu_embedding.checkpoint import describe, table_statistics
from tpu_embedding.checkpoint.arrays import iterate_rows
from tpu_embedding.tables import row_windows

NUM_ROWS, DIM = 301, 3


def save(directory, optimizer, *, values=None, slots=None, dtype="float32"):
    table = te.TableConfig(
        vocabulary_size=NUM_ROWS, dim=DIM, name="movie", dtype=np.dtype(dtype)
    )
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(2), optimizer=optimizer)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    if values is not None:
        tables = te.functional.with_table_values(tables, {"movie": values}, plan)
    state = {"tables": tables}
    if optimizer is not None:
        state["slots"] = te.functional.init_slots(tables, plan)
        if slots is not None:
            state["slots"] = te.functional.with_slot_values(
                state["slots"], {"movie": slots}, plan
            )
    te.save(directory, state, plan=plan)


@pytest.fixture(
    params=quick_cases(with_ids({f"{n}rows": n for n in (8, 64, 2**20)}), "8rows")
)
def rows_of_a_chunk(request, monkeypatch):
    monkeypatch.setattr(row_windows, "rows_per_block", lambda row_bytes: request.param)
    return min(request.param, NUM_ROWS)


def test_statistics_of_chunks(rows_of_a_chunk, tmp_path):
    generator = np.random.default_rng(0)
    values = generator.normal(size=(NUM_ROWS, DIM)).astype(np.float32)
    values[7] = 0
    values[100], values[300] = np.nan, np.inf
    touched = generator.choice(NUM_ROWS, 40, replace=False)
    sums = np.full((NUM_ROWS, DIM), 0.25, np.float32)
    sums[touched, generator.integers(0, DIM, 40)] += 1  # one element of each row
    optimizer = te.optimizers.adagrad(0.1, initial_accumulator_value=0.25)
    with pytest.warns(UserWarning, match="NaN or infinite were written"):
        save(tmp_path / "c", optimizer, values=values, slots={"accumulators": sums})

    starts = [start for start, _ in iterate_rows(tmp_path / "c", "movie")]
    chunk_rows = describe(tmp_path / "c").tables["movie"].values.chunk_rows
    # Smaller chunks bound the padding of the last one.
    assert chunk_rows and rows_of_a_chunk % chunk_rows == 0
    assert starts == list(range(0, NUM_ROWS, chunk_rows))
    found = table_statistics(tmp_path / "c", "movie")
    assert (found.num_not_finite, found.num_untouched) == (2, NUM_ROWS - 40)
    norms = np.linalg.norm(np.delete(values, [100, 300], 0).astype(np.float64), axis=1)
    assert found.norms.minimum == 0
    assert found.norms.maximum == pytest.approx(norms.max(), rel=1e-12)
    # The width of a bin.
    assert found.norms.median == pytest.approx(np.median(norms), rel=2**-11)
    edges = np.linspace(0, norms.max(), 11)
    np.testing.assert_allclose(
        # A row whose norm is within the width of a bin of an edge may be on its other
        # side.
        *(found.norms.in_bins(edges), np.histogram(norms, edges)[0]),
        atol=1,
    )
    assert found.norms.in_bins(edges).sum() == NUM_ROWS - 2


UNKNOWN = {
    "no optimizer": (None, "no slot variables"),
    "no slots": (optax.sgd(0.1), "no slot variables"),
    "initial values from the rows": (
        optax.GradientTransformation(
            lambda rows: (rows,),
            lambda updates, state, rows: (updates, (state[0] + updates,)),
        ),
        "initial values of its slot variables differ",
    ),
    "one of two from the rows": (
        optax.GradientTransformation(
            lambda rows: (jnp.zeros_like(rows), rows),
            lambda updates, state, rows: (updates, (state[0], state[1] + updates)),
        ),
        "initial values of its slot variables differ",
    ),
}


@pytest.mark.parametrize(("optimizer", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_untouched_rows_that_cannot_be_told(tmp_path, optimizer, reason):
    save(tmp_path / "c", optimizer)
    found = table_statistics(tmp_path / "c", "movie")
    assert found.num_untouched is None
    assert reason in found.why_not


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)]
)
def test_narrow_tables(tmp_path, dtype):
    values = np.full((NUM_ROWS, DIM), 3.0, np.float32)
    optimizer = te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16)
    save(tmp_path / "c", optimizer, values=values, dtype=dtype)
    found = table_statistics(tmp_path / "c", "movie")
    assert found.norms.minimum == found.norms.maximum == found.norms.median
    assert found.norms.median == pytest.approx(np.sqrt(27))
    assert found.num_untouched == NUM_ROWS


@pytest.mark.parametrize(
    "optimizer",
    quick_cases(
        [
            pytest.param(te.optimizers.adafactor(0.1), id="adafactor"),
            pytest.param(te.optimizers.ftrl(0.1), id="ftrl"),
            pytest.param(
                optax.GradientTransformation(
                    lambda rows: (0.1 * jnp.ones(rows.shape, rows.dtype),),
                    lambda updates, state, rows: (updates, (state[0] + updates,)),
                ),
                id="computed",
            ),
            pytest.param(optax.adam(0.1), id="adam"),
            pytest.param(te.optimizers.every_row(optax.adam(0.1)), id="every row"),
        ],
        "adafactor",
        "computed",
    ),
)
def test_initial_values_of_optimizers(tmp_path, optimizer):
    save(tmp_path / "c", optimizer)
    assert table_statistics(tmp_path / "c", "movie").num_untouched == NUM_ROWS


@pytest.mark.full
def test_training_touches_rows(tmp_path):
    """Rows that were looked up are touched, and no others."""
    table = te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, name="movie")
    model = te.TPUEmbedding(
        te.FeatureConfig(table=table), te.optimizers.adagrad(0.1), rngs=nnx.Rngs(0)
    )
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    ids = np.array([3, 5, 3, 200])
    _, gradients = te.value_and_grad(lambda model: model(ids).sum())(model)
    optimizer.update(model, gradients)
    te.save(tmp_path / "c", (model, optimizer))
    (name,) = describe(tmp_path / "c").tables
    assert table_statistics(tmp_path / "c", name).num_untouched == NUM_ROWS - 3
