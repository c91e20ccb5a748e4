"""Features in all forms, and the dense matrix that pools rows into their samples."""

import jax.numpy as jnp
import numpy as np

from tpu_embedding.lookup._forward import PoolingSpec

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
    """Sorts ids by row; those without a row lie between the others, too.

    Returns:
      The position of each sorted id before sorting, and its place.
    """
    is_used = places < num_rows
    # Rows of other rounds come before, between and behind those of this round.
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
