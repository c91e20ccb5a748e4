"""Buffer sizes settle on stationary streams, and always hold their batch."""

import json

import numpy as np
import pytest

from tests.checkpoint.states import make_layer
from tests.rejections import rejects
from tpu_embedding.inputs.buffer_sizes import BufferSizes, RaggedDemand

NUM_FEATURES = 9


def valences(generator, feature, num_samples):
    """Draws numbers of ids per sample: heavy, light or medium tails by feature."""
    match feature % 3:
        case 0:
            drawn = generator.zipf(1.3 + 0.05 * feature, num_samples)
            return np.minimum(drawn, 100)
        case 1:
            return generator.poisson(0.5 + feature / 2, num_samples)
        case _:
            return generator.geometric(1 / (1 + feature / 3), num_samples) - 1


def demand_of(lengths, name="f", num_shards=1, expected_valence=None):
    shards = np.array_split(np.asarray(lengths, float), num_shards)
    return RaggedDemand(
        feature_name=name,
        expected_valence=expected_valence,
        samples_per_shard=len(shards[0]),
        num_ids=int(max(shard.sum() for shard in shards)),
        num_samples=len(lengths),
        valence_sum=float(sum(lengths)),
        valence_square_sum=float(sum(n * n for n in lengths)),
    )


def choose(sizes, *demands):
    """Chooses sizes, and checks that they hold the batch."""
    chosen = sizes.choose(demands)
    assert all(n >= d.num_ids for n, d in zip(chosen, demands, strict=True))
    return chosen


def test_stationary_streams_settle_and_continue_from_json():
    generator, sizes, copied = np.random.default_rng(0), BufferSizes(), None
    for step in range(30):
        demands = [
            demand_of(valences(generator, i, 1024), f"f{i}", 8)
            for i in range(NUM_FEATURES)
        ]
        if step == 2:
            copied = BufferSizes.from_json(json.loads(json.dumps(sizes.to_json())))
        chosen = choose(sizes, *demands)
        assert copied is None or choose(copied, *demands) == chosen
    assert sizes.num_combinations <= 2


def test_all_features_grow_together():
    sizes, even, spread = BufferSizes(), demand_of([2] * 100, "a"), [0, 4] * 50
    first = choose(sizes, even, demand_of([3] * 100, "b"))
    assert first == [200 + 8, 300 + 20]  # constant valences, rounded up
    assert choose(sizes, demand_of(spread, "a"), demand_of([3] * 100, "b")) == first
    # b outgrows its buffer, while a has a wider spread.
    grown = choose(sizes, demand_of(spread, "a"), demand_of([4] * 100, "b"))
    assert grown[0] >= 200 + 6 * 2 * 10 and grown[1] >= 400 * 1.25
    assert choose(sizes, even, demand_of([4] * 100, "b")) == grown
    assert sizes.num_combinations == 2


def test_expected_valence_is_the_first_size():
    sizes = BufferSizes()
    demand = demand_of([1] * 100, expected_valence=2.5)
    assert choose(sizes, demand) == [250]
    assert choose(sizes, demand_of([2] * 125, expected_valence=2)) == [250]
    # Growth of another feature does not make it smaller.
    for valence in (1, 100):
        assert choose(sizes, demand, demand_of([valence] * 10, "other"))[0] == 250


def test_drifting_streams_grow_by_a_factor_and_warn_from_the_fourth_on():
    sizes, other = BufferSizes(), demand_of([1] * 100, "other")
    for valence in (1, 2, 4, 8):
        choose(sizes, demand_of([valence] * 100), other)  # A warning is an error.
    with pytest.warns(UserWarning, match="expected_valence.* for 'f'[.]") as caught:
        for valence in range(9, 500):
            choose(sizes, demand_of([valence] * 100), other)
    # By a quarter or more each time: 4 + log(500 / 8) / log(1.25) = 22.5.
    assert len(caught) == sizes.num_combinations - 4 <= 19


def test_each_batch_size_has_sizes_of_its_own():
    sizes = BufferSizes()
    large = choose(sizes, demand_of([2, 4] * 100))
    small = choose(sizes, demand_of([2, 4] * 5))
    assert small[0] < large[0]
    assert choose(sizes, demand_of([2, 4] * 100)) == large
    assert sizes.num_combinations == 2


def test_a_layer_remembers_sizes():
    layer = make_layer({"watched": (10, 4)})
    for lists in ([[1, 2, 3], [4], [], [5]], [[1], [], [2], []]):
        prepared = layer.prepare({"watched": lists})
        assert prepared["watched"].values.shape == (2, 16)
    assert layer.buffer_sizes.num_combinations == 1


def test_a_forged_size_takes_no_memory():
    """A forged file cannot make a batch take far more memory than its ids."""
    forged = BufferSizes.from_json({"buffers": [[[["f", 8]], [2**60]]]})
    assert choose(forged, demand_of([3] * 8)) == [24]


@pytest.mark.parametrize("is_stored", [False, True])
def test_sparse_batches_shrink_no_buffer(is_stored):
    sizes = BufferSizes()
    (large,) = choose(sizes, demand_of([2000]))
    if is_stored:
        sizes = BufferSizes.from_json(sizes.to_json())
        choose(sizes, demand_of([2000]))
    for _ in range(4):
        assert choose(sizes, demand_of([1])) == choose(sizes, demand_of([2000]))
    assert choose(sizes, demand_of([1])) == [large]
    assert sizes.num_combinations == 1


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], {}, {"buffers": 7}, {"buffers": [7]}, {"buffers": [[]]}),
        {"buffers": [[[["f", 8]], [24, 24]]]},
        {"buffers": [[[["f", 8]], [float("nan")]]]},
        {"buffers": [[[["f", 8]], [float("inf")]]]},
    ],
)
def test_damaged_json_of_sizes(document):
    with rejects(ValueError, field="document", value=document):
        BufferSizes.from_json(document)
