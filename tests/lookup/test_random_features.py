"""Random configurations, batches, meshes and subsets against the dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_embedding as te
from tests.lookup.placements import MESHES, mesh_of_shape, placements_on
from tests.reference import dense_gradients, dense_lookup, key_of

# A sum of up to some dozens of float32 products in another order than the reference's.
TOLERANCE = dict(rtol=2e-5, atol=2e-5)

PADDING = te.PADDING_ROW_ID
MAX_VALENCE = 4


def pool_by_distance(valence, rows):
    """Weights each row by its distance to the mean: it depends on all of them."""
    is_used = (jnp.arange(len(rows)) < valence)[:, None]
    mean = jnp.sum(jnp.where(is_used, rows, 0), axis=0) / valence
    squares = jnp.sum((rows - mean[None]) ** 2, axis=1, keepdims=True)
    return jnp.sum(jnp.where(is_used, rows / (1 + squares), 0), axis=0)


COMBINERS = (
    "sum",
    "mean",
    "sqrtn",
    te.CustomCombiner(function=pool_by_distance, max_valence=MAX_VALENCE),
)


class Draw:
    """Draws a configuration and a batch from one seed."""

    def __init__(self, seed, mesh):
        self.rng = np.random.default_rng(seed)
        placements = list(placements_on(mesh).values())
        self.batch_size = int(self.rng.integers(1, 20))
        self.vocabulary_size = int(self.rng.integers(1, 40))
        self.tables = [
            te.TableConfig(
                vocabulary_size=self.vocabulary_size,
                dim=self.one_of((1, 3, 4, 16)),
                combiner=self.one_of(COMBINERS),
                name=f"table{i}",
                placement=self.one_of((None, *placements)),
            )
            for i in range(self.rng.integers(1, 4))
        ]
        self.config, self.batch = {}, {}
        for i in range(self.rng.integers(1, 5)):
            self.config[f"f{i}"] = feature = self.feature()
            self.batch[f"f{i}"] = self.ids(feature)

    def one_of(self, values):
        return values[self.rng.integers(len(values))]

    def feature(self):
        table = self.one_of((*self.tables, tuple(self.tables), tuple(self.tables[:1])))
        options = dict(
            out_of_range_ids=self.one_of(("drop", "clip")),
            validate_weights_and_indices=self.one_of((True, False)),
        )
        tables = table if isinstance(table, tuple) else (table,)
        is_custom = any(isinstance(t.combiner, te.CustomCombiner) for t in tables)
        kind = self.one_of(("bag", "bag", "sequence", "default"))
        if kind == "sequence":
            options["max_sequence_length"] = int(self.rng.integers(1, 5))
        elif kind == "default" and not is_custom:
            options["default_id"] = int(self.rng.integers(self.vocabulary_size))
        return te.FeatureConfig(table=table, **options)

    def ids(self, feature):
        """Dense or ragged ids, some outside the table, with weights where allowed."""
        shape = (self.batch_size, int(self.rng.integers(0, MAX_VALENCE + 1)))
        lengths = self.rng.integers(0, shape[1] + 1, self.batch_size)
        is_ragged = self.one_of((True, False))
        shape = (int(lengths.sum()),) if is_ragged else shape
        ids = self.rng.integers(-2, self.vocabulary_size + 2, shape)
        weights = None
        combiners = [table.combiner for table in feature.tables]
        takes_weights = not feature.max_sequence_length and not any(
            isinstance(combiner, te.CustomCombiner) for combiner in combiners
        )
        if takes_weights and self.one_of((True, False)):
            # Sums of eighths cancel exactly, or are far from zero.
            weights = (self.rng.integers(-4, 9, shape) / 8).astype(np.float32)
        if is_ragged:
            splits = np.concatenate([[0], np.cumsum(lengths)])
            return te.RaggedIds(values=ids, row_splits=splits, weights=weights)
        ids = np.where(np.arange(shape[1]) < lengths[:, None], ids, PADDING)
        return te.DenseIds(ids=ids, weights=weights)

    def subset(self):
        names = [name for name in self.config if self.rng.random() < 0.6]
        return {name: self.batch[name] for name in names or list(self.config)[:1]}


@functools.partial(jax.jit, static_argnames="plan")
def step(tables, slots, features, cotangents, plan):
    result = te.lookup(tables, features, plan)
    gradients = te.compute_gradients(result.routing, cotangents, plan)
    tables, _ = te.apply_gradients(tables, slots, gradients, plan)
    return result.activations, tables


def check(seed, mesh, capacity):
    drawn = Draw(seed, mesh)
    plan = te.make_plan(
        drawn.config,
        mesh_of_shape(mesh),
        optimizer=optax.sgd(1.0),
        capacity=capacity,
    )
    batch = drawn.subset()
    tables = te.init_tables(plan, jax.random.key(seed))
    before = te.unstack_tables(tables, plan)
    prepared = te.prepare_features(batch, plan)
    cotangents = jax.tree.map(
        lambda s: drawn.rng.normal(size=s.shape).astype(np.float32),
        te.activation_shapes(prepared, plan),
    )
    slots = te.init_slots(tables, plan)
    activations, tables = step(tables, slots, prepared, cotangents, plan)
    after = te.unstack_tables(tables, plan)

    part = plan.for_batch(batch)
    keys = [key_of(feature) for feature in part.features]
    found = dict(zip(keys, part.flatten_activations(activations), strict=True))
    cotangents = dict(zip(keys, part.flatten_activations(cotangents), strict=True))
    for key, expected in dense_lookup(before, batch, part).items():
        actual = found[key].reshape(expected.shape)
        np.testing.assert_allclose(actual, expected, **TOLERANCE, err_msg=str(key))
    gradients, touched = dense_gradients(before, batch, cotangents, part)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(after[name], before[name] - gradient, **TOLERANCE)
        np.testing.assert_array_equal(
            after[name][~touched[name]], before[name][~touched[name]]
        )


RANDOM = dict(
    seed=st.integers(0, 2**32 - 1),
    mesh=st.sampled_from(list(MESHES)),
    capacity=st.sampled_from([None, None, 2]),
)


@settings(max_examples=2)
@given(**RANDOM)
def test_some_features(seed, mesh, capacity):
    check(seed, mesh, capacity)


@pytest.mark.full
@settings(max_examples=60)
@given(**RANDOM)
def test_many_features(seed, mesh, capacity):
    check(seed, mesh, capacity)
