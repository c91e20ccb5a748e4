"""Samples that share lines: where they lie, and how rows are read into them."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.lookup.pooled import XLA, integers, kernel_backends, pooling_of
from tpu_embedding.lookup._sample_lines import SampleLines, sample_lines
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows, unpack_rows

# dim, samples of a feature
SIZES = [(8, 128), (16, 64), (32, 64), (64, 16)]
every_size = pytest.mark.parametrize(("dim", "num_samples"), SIZES)


def lines_for(dim, num_samples):
    layout = RowLayout(num_rows=512 // dim, row_shape=(dim,), line_lanes=128)
    return SampleLines(num_samples=num_samples, layout=layout)


@every_size
def test_samples_of_a_line_are_a_stride_apart(dim, num_samples):
    lines = lines_for(dim, num_samples)
    k = 128 // dim
    assert lines.lines_per_feature == num_samples // k
    features = [jnp.array(integers(num_samples, dim, seed=i)) for i in (1, 2)]
    packed = lines.pack(features)
    assert packed.layout == lines.layout.resized(2 * num_samples)
    assert packed.lines.shape == (2 * num_samples // k, 128)
    for i, feature in enumerate(features):
        picture = np.zeros((num_samples // k, 128))
        for line in range(num_samples // k):
            for place in range(k):
                sample = feature[line + place * (num_samples // k)]
                picture[line, place * dim : (place + 1) * dim] = sample
        start = i * num_samples // k
        np.testing.assert_array_equal(
            packed.lines[start : start + num_samples // k], picture
        )
        np.testing.assert_array_equal(lines.lines_of(feature), picture)
        np.testing.assert_array_equal(lines.unpack(jnp.array(picture)), feature)


@every_size
def test_places_of_samples(dim, num_samples):
    lines = lines_for(dim, num_samples)
    features = [jnp.array(integers(num_samples, dim, seed=i)) for i in (1, 2, 3)]
    rows = unpack_rows(lines.pack(features))
    samples = jnp.arange(3 * num_samples, dtype=jnp.int32)[::-1]
    places = lines.place_of(samples)
    assert sorted(places.tolist()) == list(range(3 * num_samples))
    np.testing.assert_array_equal(rows[places], np.concatenate(features)[::-1])


@every_size
def test_gains_of_the_rows_of_a_line(dim, num_samples):
    lines = lines_for(dim, num_samples)
    # Two ids per sample: the gains of all first ids, then those of all second ids.
    gains = jnp.array(integers(2 * num_samples))
    by_lane = lines.gains(gains)
    for i in range(2):
        of_ids = gains[i * num_samples : (i + 1) * num_samples]
        expected = lines.lines_of(jnp.repeat(of_ids[:, None], dim, axis=1))
        half = len(by_lane) // 2
        np.testing.assert_array_equal(by_lane[i * half : (i + 1) * half], expected)


@needs_kernels
@pytest.mark.parametrize(("dim", "num_samples"), [(16, 64), (64, 16)])
def test_rows_are_read_into_lines(dim, num_samples):
    lines = lines_for(dim, num_samples)
    num_rows = lines.layout.num_rows
    rows = integers(num_rows, dim)
    generator = np.random.default_rng(0)
    # One id, three summed, and two that stay apart.
    sizes, valences = [num_samples, num_samples, 2 * num_samples], [1, 3, 1]
    places = generator.integers(0, num_rows, 6 * num_samples)
    places[::7] = 2**31 - 1  # read as the last row
    results = lines.gather(
        pack_rows(jnp.array(rows), lines.layout),
        jnp.array(places, jnp.int32),
        sizes,
        valences,
        "interpreter",
    )
    gathered = rows[np.minimum(places, num_rows - 1)]
    one, many, apart = np.split(gathered, [num_samples, 4 * num_samples])
    expected = [one, many.reshape(3, num_samples, dim).sum(axis=0)]
    expected += np.split(apart, 2)
    found = [results[0], results[1], *jnp.split(results[2], 2)]
    for result, samples in zip(found, expected, strict=True):
        np.testing.assert_array_equal(lines.unpack(result), samples)


def test_samples_share_lines_where_the_backends_say_so():
    lines = lines_for(32, 64)
    poolings = [pooling_of("many", 64)]
    chosen = sample_lines(kernel_backends(lines.layout, poolings), lines.layout)
    assert chosen == lines
    assert sample_lines(XLA, lines.layout) is None
