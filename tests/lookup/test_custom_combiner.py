"""Combiners of the user's own, against JAX on the dense table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

P = te.inputs.PADDING_ROW_ID
MAX_VALENCE = 3
# The reference adds and multiplies in another order.
TOLERANCE = dict(rtol=1e-5, atol=1e-6)


def softmax_pool(valence, rows):
    """Depends on the order of the rows, on all of them, and divides by the valence."""
    is_used = jnp.arange(len(rows)) < valence
    numbers = jnp.arange(len(rows), dtype=jnp.float32)
    logits = jnp.where(is_used, jnp.sum(rows, axis=1) + numbers, -jnp.inf)
    return jax.nn.softmax(logits) @ rows / jnp.sqrt(valence)


COMBINER = te.CustomCombiner(function=softmax_pool, max_valence=MAX_VALENCE)
TABLE = te.TableConfig(vocabulary_size=11, dim=4, combiner=COMBINER, name="custom")
OTHER = te.TableConfig(vocabulary_size=11, dim=4, combiner="mean", name="other")

# Sample by sample; -2 and 11 are outside the table.
SAMPLES = [
    [1, 2, 3],
    [],
    [4],
    [5, 5],
    [-2, 6, 11],
    [7, -2, 8],
    [11],
    [9, 10],
    [0, 0, 0],
]
KEPT = [[i for i in ids if 0 <= i < 11] for ids in SAMPLES]


def dense_ids():
    """Padding lies between the ids, too."""
    ids = np.full((len(SAMPLES), MAX_VALENCE), P)
    for row, sample in zip(ids, SAMPLES, strict=True):
        row[MAX_VALENCE - len(sample) :] = sample
    return ids


def ragged_ids(samples=SAMPLES):
    return te.RaggedIds(
        values=np.concatenate([np.zeros(0, int), *samples]).astype(int),
        row_splits=np.cumsum([0, *map(len, samples)]),
    )


FORMS = {"dense": dense_ids, "ragged": ragged_ids}


def pool_densely(table):
    """What the layer computes, sample by sample, as a function of the dense table."""
    pooled = []
    for ids in KEPT:
        if not ids:
            pooled.append(jnp.zeros(4))
            continue
        rows = jnp.zeros((MAX_VALENCE, 4)).at[: len(ids)].set(table[np.array(ids)])
        pooled.append(softmax_pool(jnp.int32(len(ids)), rows))
    return jnp.stack(pooled)


def plan_of(num_devices, config=None, **options):
    feature = te.FeatureConfig(table=TABLE, out_of_range_ids="drop", name="f")
    return te.make_plan(
        config or {"f": feature, "other": te.FeatureConfig(table=OTHER)},
        mesh_of(num_devices),
        optimizer=optax.sgd(1.0),
        **options,
    )


@pytest.mark.parametrize(
    ("form", "num_devices", "capacity"),
    [
        ("dense", 1, None),
        pytest.param("ragged", 2, 1, marks=pytest.mark.full),
    ],
)
def test_equals_the_dense_table(form, num_devices, capacity):
    """Forward and gradient; in several rounds it pools after the last one."""
    plan = plan_of(num_devices, capacity=capacity)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    before = te.functional.unstack_tables(tables, plan)
    batch = {"f": FORMS[form](), "other": np.arange(len(SAMPLES))}
    batch = te.inputs.prepare_features(batch, plan)
    result = te.functional.lookup(tables, batch, plan)
    if capacity == 1:
        assert result.stats.rounds["stack_0"] > 1
    assert result.stats.out_of_range["f"] == 4
    expected, derivative = jax.vjp(jax.jit(pool_densely), before["custom"])
    np.testing.assert_allclose(result.activations["f"], expected, **TOLERANCE)
    np.testing.assert_array_equal(
        result.activations["other"], before["other"][: len(SAMPLES)]
    )

    cotangents = jax.random.normal(jax.random.key(1), expected.shape)
    gradients = te.functional.compute_gradients(
        result.routing, {"f": cotangents, "other": cotangents}, plan
    )
    slots = te.functional.init_slots(tables, plan)
    tables, _ = te.functional.apply_gradients(tables, slots, gradients, plan)
    after = te.functional.unstack_tables(tables, plan)
    (gradient,) = derivative(cotangents)
    np.testing.assert_allclose(
        before["custom"] - after["custom"], gradient, **TOLERANCE
    )
    assert np.isfinite(after["custom"]).all()
    np.testing.assert_array_equal(
        after["custom"][[2, 6]] == before["custom"][[2, 6]], 0
    )


def test_too_many_ids_are_refused_not_cut():
    plan = plan_of(2)
    batch = {"f": ragged_ids([[1], [1, 2, 3, 4, 5]]), "other": np.arange(2)}
    with pytest.raises(ValueError, match=r"'f'.*max_valence=3.*got 5 in sample 1"):
        te.inputs.prepare_features(batch, plan)
    with pytest.raises(ValueError, match=r"'f'.*max_valence=3.*shape \(2, 4\)"):
        te.functional.activation_shapes(
            {"f": np.zeros((2, 4), int), "other": np.arange(2)}, plan
        )


def test_weights_are_refused():
    plan = plan_of(1)
    weighted = te.DenseIds(ids=dense_ids(), weights=np.ones((9, 3), np.float32))
    with pytest.raises(ValueError, match="'f' must have no weights.*CustomCombiner"):
        te.functional.activation_shapes({"f": weighted, "other": np.arange(9)}, plan)
