"""Buffer sizes settle on stationary streams, and always hold their batch."""

import json
import warnings

import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.inputs.buffer_sizes import (
    BufferSizes,
    RaggedDemand,
    _round_up,
)

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


def demand_of(lengths, num_shards=1, name="f", expected_valence=None):
    lengths = np.asarray(lengths)
    per_shard = -(-len(lengths) // num_shards)
    of_shards = [
        lengths[i * per_shard : (i + 1) * per_shard].sum() for i in range(num_shards)
    ]
    return RaggedDemand(
        feature_name=name,
        expected_valence=expected_valence,
        samples_per_shard=per_shard,
        num_ids=int(max(of_shards)),
        num_samples=len(lengths),
        valence_sum=float(lengths.sum()),
        valence_square_sum=float((lengths.astype(float) ** 2).sum()),
    )


def choose(sizes, *demands):
    """Chooses sizes, and checks that they hold the batch."""
    chosen = sizes.choose(demands)
    assert all(n >= d.num_ids for n, d in zip(chosen, demands, strict=True))
    return chosen


def test_stationary_streams_settle_within_20_batches():
    seed, num_steps, num_shards, batch_size = 0, 30, 8, 1024
    generator = np.random.default_rng(seed)
    sizes = te.inputs.BufferSizes()
    for step in range(num_steps):
        demands = [
            demand_of(valences(generator, i, batch_size), num_shards, f"f{i}")
            for i in range(NUM_FEATURES)
        ]
        chosen = choose(sizes, *demands)
        if step == 19:
            settled = chosen
    assert chosen == settled
    assert sizes.num_combinations <= 2


def test_all_features_grow_together():
    sizes = te.inputs.BufferSizes()
    first = choose(
        sizes, demand_of([2] * 100, name="a"), demand_of([3] * 100, name="b")
    )
    assert first == [200 + 8, 300 + 20]  # constant valences, rounded up
    # b meets a sample more than it has room for; a has seen a wider spread meanwhile.
    choose(sizes, demand_of([0, 4] * 50, name="a"), demand_of([3] * 100, name="b"))
    assert sizes.num_growths == 0
    grown = choose(
        sizes, demand_of([2] * 100, name="a"), demand_of([4] * 100, name="b")
    )
    assert grown[0] > first[0] and grown[1] >= 400 * 1.25
    assert (sizes.num_growths, sizes.num_combinations) == (1, 2)
    # Now both fit.
    again = choose(
        sizes, demand_of([0, 4] * 50, name="a"), demand_of([4] * 100, name="b")
    )
    assert again == grown
    assert sizes.num_combinations == 2


def test_expected_valence_is_the_first_size():
    sizes = te.inputs.BufferSizes()
    demand = demand_of([1] * 100, expected_valence=2.5)
    assert choose(sizes, demand) == [250]
    assert choose(sizes, demand_of([2] * 125, expected_valence=2)) == [250]
    # Growth of another feature does not make it smaller.
    other = demand_of([1] * 10, name="other")
    assert choose(sizes, demand, other)[0] == 250
    much = demand_of([100] * 10, name="other")
    assert choose(sizes, demand, much)[0] == 250


def test_drifting_streams_grow_by_a_factor():
    sizes = te.inputs.BufferSizes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for valence in range(1, 500):
            choose(sizes, demand_of([valence] * 100))
    # By a quarter or more each time: log(500) / log(1.25) = 28.
    assert sizes.num_combinations <= 29


def test_growth_is_told_from_the_fourth_on():
    sizes = te.inputs.BufferSizes()
    for valence in (1, 2, 4, 8):
        choose(sizes, demand_of([valence] * 100), demand_of([1] * 100, name="other"))
    assert sizes.num_growths == 3  # without a warning, which would be an error
    with pytest.warns(UserWarning, match="growth 4: 'f' had 1600 ids") as caught:
        grown = choose(sizes, demand_of([16] * 100), demand_of([1] * 100, name="other"))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert f"now {grown[0]}" in message
    assert "expected_valence" in message and f"to {grown[0] / 100:.3g} for" in message
    assert "'other'" not in message


def test_each_batch_size_has_sizes_of_its_own():
    sizes = te.inputs.BufferSizes()
    large = choose(sizes, demand_of([2, 4] * 100))
    small = choose(sizes, demand_of([2, 4] * 5))
    assert small[0] < large[0]
    # The first large batch has told how many ids samples have.
    assert choose(sizes, demand_of([4] * 10)) == small
    assert choose(sizes, demand_of([2, 4] * 100)) == large
    assert (sizes.num_combinations, sizes.num_growths) == (2, 0)


@pytest.mark.parametrize("size", [0, 1, 8, 9, 63, 64, 65, 100, 1000, 1025, 123_456])
def test_rounding_wastes_at_most_an_eighth(size):
    rounded = _round_up(size)
    assert rounded % 8 == 0
    assert size <= rounded <= max(8 * -(-size // 8), size * 9 / 8, 8)


def ragged_layer():
    table = te.TableConfig(vocabulary_size=10, dim=4, name="table")
    return te.TPUEmbedding(
        {"watched": te.FeatureConfig(table=table)}, mesh=mesh_of(2), rngs=nnx.Rngs(0)
    )


def test_a_layer_remembers_sizes():
    layer = ragged_layer()
    for lists in (
        [[1, 2, 3], [4], [], [5]],
        [[1], [], [2], []],
        [[6, 7], [8], [9], []],
    ):
        prepared = layer.prepare({"watched": lists})
    assert prepared["watched"].values.shape == (2, 16)
    assert layer.buffer_sizes.num_combinations == 1


def test_sizes_continue_from_their_json():
    generator = np.random.default_rng(0)
    sizes = BufferSizes()
    for step in range(12):
        demands = [
            demand_of(valences(generator, f, 64), 2, str(f))
            for f in range(NUM_FEATURES)
        ]
        if step == 5:
            copied = BufferSizes.from_json(json.loads(json.dumps(sizes.to_json())))
        if step >= 5:
            assert choose(copied, *demands) == sizes.choose(demands)
        else:
            choose(sizes, *demands)


@pytest.mark.parametrize("field", ["size", "sum", "square_sum"])
def test_sizes_of_another_stream_start_over(field):
    """A forged file cannot make a batch take far more memory than its ids."""
    sizes = BufferSizes()
    choose(sizes, demand_of([3] * 8))
    document = sizes.to_json()
    if field == "size":
        document["buffers"] = [(*document["buffers"][0][:1], [2**30], 0)]
    else:
        numbers = {"sum": (8, 1e15, 1e15), "square_sum": (8, 24.0, 1e18)}
        document["valences"]["f"] = numbers[field]
    forged = BufferSizes.from_json(document)
    assert choose(forged, demand_of([3] * 8)) == [24]
    assert choose(forged, demand_of([90] * 8)) <= [2000]


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], {}, {"valences": [], "buffers": []}),
        {"valences": {"f": [8, 24.0]}, "buffers": []},
        {"valences": {"f": [0, 24.0, 24.0]}, "buffers": []},
        {"valences": {"f": [8, float("nan"), 24.0]}, "buffers": []},
        {"valences": {"f": [8, 1e300, 24.0]}, "buffers": []},
        {"valences": {}, "buffers": [[[["f", 8]], [-24], 0]]},
        {"valences": {}, "buffers": [[[["f", 8]], [2**40], 0]]},
        {"valences": {}, "buffers": [[[["f", 8]], [24, 24], 0]]},
    ],
)
def test_damaged_json_of_sizes(document):
    with pytest.raises(ValueError, match="must be from BufferSizes.to_json"):
        BufferSizes.from_json(document)
