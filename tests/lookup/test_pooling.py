"""Rows pooled into samples, and cotangents summed into rows, against a dense matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import each_once
from tpu_embedding.lookup._backward import cotangent_reader, spread
from tpu_embedding.lookup._forward import PoolingSpec, pool_buffer, samples_of

# Multiples of 1/2, so that all sums are exact in float32.
GAINS = np.array([1, -1, 2, 0, -3, 0.5], np.float32)
SCALES = np.array([0.5, 1, 0, 2, -1], np.float32)


def pooling_of(form, num_samples=8):
    """Returns one feature.

    Args:
      form: "one", "many" (3 ids), "long" (130 ids) or "ragged", with "+gains",
        "+scales" or both.
      num_samples: output samples.
    """
    name = form.split("+")[0]
    valence = {"one": 1, "many": 3, "long": 130, "ragged": 1}[name]
    num_ids, sample_ids = num_samples * valence, None
    if name == "ragged":
        num_ids = 2 * num_samples
        # Sample 1 is empty, sample 2 has many ids; the last two places are unused.
        sample_ids = np.sort(np.arange(num_ids) % num_samples)
        sample_ids[sample_ids == 1] = 2
        sample_ids[-2:] = num_samples
        sample_ids = jnp.array(sample_ids, jnp.int32)
    return PoolingSpec(
        gains=jnp.array(np.resize(GAINS, num_ids)) if "gains" in form else None,
        scales=jnp.array(np.resize(SCALES, num_samples)) if "scales" in form else None,
        sample_ids=sample_ids,
        num_samples=num_samples,
        valence=valence,
    )


def places_of(poolings, num_rows, seed=0):
    """Returns places of ids: any but the last, many equal, some without a row."""
    generator = np.random.default_rng(seed)
    places = []
    for pooling in poolings:
        of_feature = generator.integers(0, num_rows - 1, pooling.num_ids)
        of_feature[generator.random(pooling.num_ids) < 0.2] = num_rows
        of_feature[generator.random(pooling.num_ids) < 0.3] = num_rows - 2
        if pooling.sample_ids is not None:
            is_unused = np.asarray(pooling.sample_ids) == pooling.num_samples
            of_feature[is_unused] = num_rows
        places.append(of_feature)
    return np.concatenate(places).astype(np.int32)


def sort_by_row(places, num_rows):
    """Sorts ids by row. Ids without a row are between the others.

    Returns:
      The position of each sorted id before sorting, and its place.
    """
    is_used = places < num_rows
    # Rows of other rounds come before, between and after this round's rows.
    keys = np.where(is_used, 2 * places + 1, np.arange(len(places)) % 8 * 8)
    order = np.argsort(keys, kind="stable").astype(np.int32)
    return jnp.array(order), jnp.array(places[order])


def matrix_of(poolings, places, num_rows):
    """Returns `[samples, rows]`, gain times scale of each id, written id by id."""
    num_samples = sum(pooling.num_samples for pooling in poolings)
    matrix = np.zeros((num_samples, num_rows))
    first_sample, i = 0, 0
    for pooling in poolings:
        for j in range(pooling.num_ids):
            sample = j % pooling.num_samples
            if pooling.sample_ids is not None:
                sample = int(pooling.sample_ids[j])
            if places[i] < num_rows:
                gain = 1.0 if pooling.gains is None else float(pooling.gains[j])
                scale = 1.0 if pooling.scales is None else float(pooling.scales[sample])
                matrix[first_sample + sample, places[i]] += gain * scale
            i += 1
        first_sample += pooling.num_samples
    return matrix


def integers(*shape, seed=1):
    values = np.random.default_rng(seed).integers(-9, 10, shape)
    return values.astype(np.float32)


NATURAL = {
    "one": ["one"],
    "two of one": ["one", "one"],
    "one, scaled": ["one+scales", "one"],
    "one, weighted": ["one", "one+gains"],
    "all forms": [
        "many", "one+gains+scales", "ragged", "long", "many+gains+scales",
        "ragged+gains+scales", "long+gains", "one",
    ],
}  # fmt: skip


@functools.partial(jax.jit, static_argnames="gathers")
def jitted_combine(rows, places, poolings, gathers):
    return samples_of(pool_buffer(rows, places, poolings, gathers), poolings)


def check_combine(poolings, dim=3, gathers="whole"):
    num_rows = 9
    places = places_of(poolings, num_rows)
    rows = integers(num_rows, dim)
    # No id reads the last place, so it may hold anything.
    rows[-1] = np.nan
    pooled = jitted_combine(rows.copy(), places, poolings, gathers)
    assert [x.shape for x in pooled] == [(p.num_samples, dim) for p in poolings]
    assert all(x.dtype == jnp.float32 for x in pooled)
    rows[-1] = 0
    expected = matrix_of(poolings, places, num_rows) @ rows
    np.testing.assert_array_equal(np.concatenate(pooled), expected)


@functools.partial(jax.jit, static_argnums=3)
def jitted_spread(cotangents, sorted_ids, poolings, buffer_size):
    reader = cotangent_reader(cotangents, poolings)
    return spread(reader, *sorted_ids, buffer_size)


def check_spread(poolings, places, dim=3):
    """Compares the gradients of used rows; other places are undefined."""
    num_rows = 9
    cotangents = [
        integers(pooling.num_samples, dim, seed=i) for i, pooling in enumerate(poolings)
    ]
    sorted_ids = sort_by_row(places, num_rows)
    gradients = jitted_spread(cotangents, sorted_ids, poolings, num_rows)
    assert gradients.shape == (num_rows, dim)
    expected = matrix_of(poolings, places, num_rows).T @ np.concatenate(cotangents)
    is_used = np.isin(np.arange(num_rows), places)
    assert is_used.any()
    np.testing.assert_array_equal(gradients[is_used], expected[is_used])


@pytest.mark.parametrize(
    ("case", "gathers"), each_once(NATURAL, ["whole", "fused", "by_feature"])
)
def test_combine_of_features(case, gathers):
    check_combine([pooling_of(form) for form in NATURAL[case]], gathers=gathers)


@pytest.mark.parametrize("case", NATURAL)
def test_spread_of_features(case):
    poolings = [pooling_of(form) for form in NATURAL[case]]
    for seed in (0, 5):
        check_spread(poolings, places_of(poolings, 9, seed))
    # Almost all ids are repeats.
    check_spread(poolings, np.where(places_of(poolings, 9) == 9, 9, 0))


@pytest.mark.parametrize("dim", [1, 32, 200])
def test_dims(dim):
    poolings = [pooling_of("many+gains+scales"), pooling_of("ragged")]
    check_combine(poolings, dim)
    check_spread(poolings, places_of(poolings, 9), dim)


def test_ids_without_rows_give_zeros():
    poolings = [pooling_of("many"), pooling_of("ragged+gains")]
    num_ids = sum(pooling.num_ids for pooling in poolings)
    for place in (7, 8, 2**31 - 1):
        places = np.full(num_ids, place, np.int32)
        rows = np.full((8, 3), np.nan, np.float32)
        for pooled in jitted_combine(rows, places, poolings, "whole"):
            np.testing.assert_array_equal(pooled, np.zeros((8, 3)))
