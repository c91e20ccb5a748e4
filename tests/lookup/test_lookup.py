"""Whole lookups and gradients against the dense reference, over nasty batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.reference import dense_gradients, dense_lookup
from tests.rejections import rejects
from tpu_embedding.lookup import _backward, _forward, _rounds

full = pytest.mark.full

# A sum of up to some hundred float32 products in another order than the reference's.
TOLERANCE = dict(rtol=2e-5, atol=2e-5)

BATCH = 21  # divides by neither 2 nor 8
PADDING = te.inputs.PADDING_ROW_ID


def rng(seed=0):
    return np.random.default_rng(seed)


def ragged(values, splits, weights=None):
    return te.RaggedIds(
        values=np.asarray(values, np.int64),
        row_splits=np.asarray(splits),
        weights=None if weights is None else np.asarray(weights, np.float32),
    )


def random_ragged(vocabulary_size, num_values, seed=0, weights=None):
    generator = rng(seed)
    cuts = np.sort(generator.integers(0, num_values + 1, BATCH - 1))
    values = generator.integers(0, vocabulary_size, num_values)
    return ragged(values, [0, *cuts, num_values], weights)


def padded(vocabulary_size, valence=4, seed=0):
    generator = rng(seed)
    ids = generator.integers(0, vocabulary_size, (BATCH, valence))
    ids[generator.random(ids.shape) < 0.4] = PADDING
    ids[0] = PADDING
    return ids


ZIPF = np.minimum(rng(3).zipf(1.3, BATCH) - 1, 36)
CASES = {
    "uniform": lambda v: rng().integers(0, v, BATCH),
    "zipf": lambda v: ZIPF % v,
    "all_same_id": lambda v: np.full(BATCH, v - 1),
    "all_of_one_shard": lambda v: (rng().integers(0, v, BATCH) // 24 * 24) % v,
    "every_row_once": lambda v: np.arange(BATCH) % v,
    "no_ids": lambda v: np.full((BATCH, 4), PADDING),
    "multi_hot": lambda v: padded(v),
    "duplicates_in_bag": lambda v: np.repeat(rng().integers(0, v, (BATCH, 1)), 4, 1),
    "weighted": lambda v: te.DenseIds(
        ids=padded(v), weights=rng(5).normal(size=(BATCH, 4)).astype(np.float32)
    ),
    "zero_weights": lambda v: te.DenseIds(
        ids=padded(v), weights=np.zeros((BATCH, 4), np.float32)
    ),
    "weights_cancel": lambda v: te.DenseIds(
        ids=np.zeros((BATCH, 4), int),
        weights=np.tile(np.float32([1, -1, 2, -2]), (BATCH, 1)),
    ),
    "ragged": lambda v: random_ragged(v, 40),
    "ragged_weighted": lambda v: random_ragged(v, 40, weights=rng(2).normal(size=40)),
    "ragged_no_values": lambda v: ragged([], [0] * (BATCH + 1)),
    "ragged_all_in_one_sample": lambda v: ragged(
        rng().integers(0, v, 40), [0] * BATCH + [40]
    ),
}


OPTIMIZER = optax.sgd(1.0)


def make_plan(
    mesh, dim=4, capacity=None, hardware=None, placement=None, **feature_options
):
    """Three tables in one stack, two of them smaller than 8 devices or nearly so.

    Features `a` and `d` share a table. Plans that are equal share compiled programs.
    """
    sizes = {"a": (37, "sum"), "b": (5, "mean"), "c": (11, "sqrtn")}
    tables = {
        name: te.TableConfig(
            vocabulary_size=size, dim=dim, combiner=combiner, name=f"table_of_{name}"
        )
        for name, (size, combiner) in sizes.items()
    }
    config = {
        name: te.FeatureConfig(table=table, name=name, **feature_options)
        for name, table in {**tables, "d": tables["a"]}.items()
    }
    return te.make_plan(
        config,
        mesh,
        optimizer=OPTIMIZER,
        capacity=capacity,
        placement=placement,
        hardware=None if hardware is None else te.hardware.hardware_by_name(hardware),
    )


def batch_of(case):
    """The case for three features; the fourth looks up in the first one's table."""
    make = CASES[case]
    return {"a": make(37), "b": make(5), "c": make(11), "d": np.arange(BATCH) % 37}


@functools.partial(jax.jit, static_argnames="plan")
def look_up_and_update(tables, slots, features, cotangents, plan):
    result = te.functional.lookup(tables, features, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    tables, _ = te.functional.apply_gradients(tables, slots, gradients, plan)
    return result.activations, result.stats, gradients, tables


def check_against_reference(plan, batch):
    """Looks a batch up and applies SGD with rate 1; both must equal the reference."""
    tables = te.functional.init_tables(plan, jax.random.key(1))
    before = te.functional.unstack_tables(tables, plan)
    prepared = te.inputs.prepare_features(batch, plan)
    shapes = te.functional.activation_shapes(prepared, plan)
    cotangents = jax.tree.map(
        lambda s: rng(7).normal(size=s.shape).astype(np.float32), shapes
    )
    activations, stats, gradients, tables = look_up_and_update(
        tables, te.functional.init_slots(tables, plan), prepared, cotangents, plan
    )
    for name, expected in dense_lookup(before, batch, plan).items():
        assert activations[name].dtype == jnp.float32
        assert activations[name].shape == shapes[name].shape
        np.testing.assert_allclose(
            activations[name].reshape(expected.shape), expected, **TOLERANCE
        )
    expected, touched = dense_gradients(before, batch, cotangents, plan)
    after = te.functional.unstack_tables(tables, plan)
    for name in before:
        np.testing.assert_allclose(
            after[name], before[name] - expected[name], **TOLERANCE
        )
        np.testing.assert_array_equal(
            after[name][~touched[name]], before[name][~touched[name]]
        )
    return stats, gradients, touched


FORMS = {
    "one": [
        "uniform",
        "zipf",
        "all_same_id",
        "all_of_one_shard",
        "every_row_once",
    ],
    "multi_hot": ["multi_hot", "no_ids", "duplicates_in_bag"],
    "weighted": ["weighted", "zero_weights", "weights_cancel"],
    "ragged": ["ragged", "ragged_all_in_one_sample", "ragged_no_values"],
    "ragged_weighted": ["ragged_weighted"],
}
"""Cases by form. Cases with one form share a program."""


@pytest.mark.parametrize(
    ("form", "num_devices"),
    [
        *((form, 2) for form in ("one", "weighted", "ragged_weighted")),
        *(pytest.param(form, 2, marks=full) for form in ("multi_hot", "ragged")),
        pytest.param("one", 8, marks=full),
        pytest.param("ragged_weighted", 8, marks=full),
        pytest.param("ragged_weighted", 1, marks=full),
    ],
)
def test_equals_dense_reference(form, num_devices):
    # Buffers of one size for all ragged batches.
    plan = make_plan(mesh_of(num_devices), expected_valence=4)
    for case in FORMS[form]:
        check_against_reference(plan, batch_of(case))


def test_blocks_cut_anywhere_change_no_result(monkeypatch):
    # 1 CPU device sums gradients in blocks. Blocks of 3 ids cut rows and padding.
    monkeypatch.setattr(_backward, "_BLOCK_BYTES", 3 * 4 * 128)
    monkeypatch.setattr(_backward, "_BLOCK_ALIGNMENT", 3)
    # Programs are cached per plan, so no other test may use this one.
    plan = make_plan(mesh_of(1), dim=3, expected_valence=4)
    for form in ("one", "weighted", "ragged_weighted"):
        for case in FORMS[form]:
            check_against_reference(plan, batch_of(case))


@pytest.mark.parametrize(
    ("num_devices", "hardware"), [(1, None), (2, None), (2, "v5p")], ids=str
)
def test_forms_of_gathers_and_long_samples(num_devices, hardware):
    plan = make_plan(mesh_of(num_devices), dim=5, hardware=hardware)
    batch = batch_of("weighted")
    # More ids per sample than are added one by one.
    valence = _forward._MAX_UNROLLED_VALENCE + 2
    batch["c"] = padded(11, valence)
    batch["d"] = random_ragged(37, 40, weights=rng(2).normal(size=40))
    check_against_reference(plan, batch)


def test_long_arrays_are_searched_alike(monkeypatch):
    monkeypatch.setattr(_rounds, "_MAX_COMPARISONS", 0)
    # No other test may compile this plan.
    plan = make_plan(mesh_of(2), dim=7, capacity=2)
    stats, _, _ = check_against_reference(plan, batch_of("multi_hot"))
    assert stats.rounds["stack_0"] > 1


@full
@pytest.mark.parametrize(("num_devices", "capacity"), [(8, 1), (1, 3)])
def test_capacity_changes_no_result(num_devices, capacity):
    plan = make_plan(mesh_of(num_devices), capacity=capacity)
    for case in ("no_ids", "multi_hot"):
        stats, _, _ = check_against_reference(plan, batch_of(case))
    assert stats.rounds["stack_0"] > 1


@pytest.mark.parametrize("surplus", [-1, pytest.param(0, marks=full)])
def test_rounds_when_capacity_is_missed_or_met_exactly(surplus):
    # All 5 rows of one owner asked by one source: ids 0, 2, 4, ... live on shard 0.
    ids = np.full(2 * 6, PADDING).reshape(2, 6)
    ids[0, :5] = np.arange(5) * 2
    table = te.TableConfig(vocabulary_size=48, dim=2, combiner="sum", name="t")
    plan = te.make_plan(
        {"f": te.FeatureConfig(table=table, name="f")},
        mesh_of(2),
        optimizer=OPTIMIZER,
        capacity=5 + surplus,
    )
    stats, _, _ = check_against_reference(plan, {"f": ids})
    assert stats.rounds["stack_0"] == (2 if surplus < 0 else 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "dim", [16, pytest.param(3, marks=full), pytest.param(200, marks=full)]
)
def test_packed_rows_change_no_result(dim):
    plan = make_plan(mesh_of(2), dim=dim, hardware="v5p", capacity=1)
    stats, _, _ = check_against_reference(plan, batch_of("multi_hot"))
    assert stats.rounds["stack_0"] > 1


def test_each_touched_row_once():
    mesh = mesh_of(2)
    plan = make_plan(mesh)
    _, gradients, touched = check_against_reference(plan, batch_of("zero_weights"))
    updates = gradients.row_updates("stack_0")
    row_ids = np.asarray(updates.row_ids).reshape(mesh.size, -1)
    stack = plan.stacks[0]
    owned = [
        shard_rows[shard_rows != PADDING] * mesh.size + shard
        for shard, shard_rows in enumerate(row_ids)
    ]
    values = np.asarray(updates.values).reshape(mesh.size, -1, 4)
    assert (values[row_ids == PADDING] == 0).all()
    rows = np.sort(np.concatenate(owned))
    expected = np.flatnonzero(np.concatenate([touched[t.name] for t in stack.tables]))
    # Weight 0 under `sum` gives gradient 0, and the row is touched all the same.
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("policy", ["drop", "clip"])
def test_ids_out_of_range_under_jit(policy):
    plan = make_plan(mesh_of(2), out_of_range_ids=policy)
    bad = np.array([[-1, 2], [37, 3], [70, -(2**31)], [4, 2**31 - 2]], np.int32)
    batch = {"a": bad, "b": np.array([5, -1, 0, 4], np.int32)}
    batch |= {"c": np.arange(4), "d": np.arange(4)}
    tables = te.functional.init_tables(plan, jax.random.key(1))
    result = jax.jit(te.functional.lookup, static_argnames="plan")(tables, batch, plan)
    assert result.stats.out_of_range == {"a": 5, "b": 2, "c": 0, "d": 0}
    expected = dense_lookup(te.functional.unstack_tables(tables, plan), batch, plan)
    for name, found in result.activations.items():
        np.testing.assert_allclose(found, expected[name], **TOLERANCE)
        assert found.sharding.is_equivalent_to(plan.batch_sharding, 2)


@pytest.mark.parametrize("form", ["one", "many", "ragged"])
def test_policies_combiners_and_default_ids(form):
    ids = np.array([0, 6, 7, -1, PADDING, PADDING - 1, -(2**31), 3, 3, 5, PADDING, 4])
    weights = np.float32([1, -1, 2, 0.5, 1, 1, 1, 0, 0.25, -2, 0, 0])
    cancel = np.float32([1, -1, 2, -2, 4, -4, 1, -1, 1, -1, 0, 0])
    features, batch = [], {}
    for combiner in ("sum", "mean", "sqrtn"):
        table = te.TableConfig(
            vocabulary_size=7, dim=2, combiner=combiner, name=f"table_of_{combiner}"
        )
        for i, (policy, validates, default_id) in enumerate(
            [
                ("drop", True, None),
                ("drop", False, 6),
                ("clip", True, 6),
                ("clip", False, None),
            ]
        ):
            feature = te.FeatureConfig(
                table=table,
                out_of_range_ids=policy,
                validate_weights_and_indices=validates,
                default_id=default_id,
                name=f"{combiner}_{i}",
            )
            features.append(feature)
            weight_of_each_id = weights if i % 2 else cancel
            if form == "ragged":
                # The third sample is empty.
                batch[feature.name] = te.RaggedIds(
                    values=ids.astype(np.int32),
                    row_splits=np.array([0, 2, 5, 5, 9, 12]),
                    weights=weight_of_each_id,
                )
            else:
                shape = (12,) if form == "one" else (4, 3)
                batch[feature.name] = te.DenseIds(
                    ids=ids.reshape(shape), weights=weight_of_each_id.reshape(shape)
                )
    config = {feature.name: feature for feature in features}
    plan = te.make_plan(config, mesh_of(2), optimizer=OPTIMIZER)
    check_against_reference(plan, batch)


def test_weights_of_zero_have_a_finite_gradient():
    """The root of their sum is not differentiated at 0."""
    plan = make_plan(mesh_of(1), validate_weights_and_indices=False)
    tables = te.functional.init_tables(plan, jax.random.key(1))

    def total(weights):
        features = te.DenseIds(ids=jnp.zeros((4, 3), jnp.int32), weights=weights)
        batch = dict.fromkeys("abcd", features)
        result = te.functional.lookup(tables, batch, plan)
        return sum(jnp.sum(result.activations[name]) for name in "bc")

    gradient = jax.grad(total)(jnp.zeros((4, 3)))
    np.testing.assert_array_equal(gradient, np.zeros((4, 3)))


@pytest.mark.full
def test_weights_that_are_not_positive_count_on_request():
    plan = make_plan(mesh_of(2), validate_weights_and_indices=False)
    for case in FORMS["weighted"]:
        check_against_reference(plan, batch_of(case))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(output_shape=(3, BATCH // 3)), marks=full),
        pytest.param(dict(max_sequence_length=2), marks=full),
    ],
    ids=str,
)
def test_sequences_and_output_shapes(options):
    plan = make_plan(mesh_of(2), **options)
    batch = {"a": random_ragged(37, 40), "b": padded(5, 4), "c": padded(11, 1)}
    batch["d"] = random_ragged(37, 11)
    check_against_reference(plan, batch)


def test_ids_of_three_axes_are_combined_along_the_last():
    table = te.TableConfig(vocabulary_size=24, dim=2, combiner="mean", name="t")
    ids = np.arange(24).reshape(2, 3, 4)
    combined = te.FeatureConfig(table=table, output_shape=(2, 3), name="combined")
    apart = te.FeatureConfig(table=table, output_shape=(2, 3, 4), name="apart")
    plan = te.make_plan([combined, apart], mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    rows = te.functional.unstack_tables(tables, plan)["t"]
    first, second = te.functional.lookup(tables, [ids, ids], plan).activations
    np.testing.assert_allclose(first, rows[ids].mean(axis=2), **TOLERANCE)
    np.testing.assert_array_equal(second, rows[ids])
    wrong = te.FeatureConfig(table=table, output_shape=(4,), name="wrong")
    with rejects(fix="'wrong'"):
        te.functional.lookup(tables, [ids], te.make_plan([wrong], mesh_of(1)))


@pytest.mark.parametrize("dtype", ["int64", "uint32"])
def test_clip_finds_the_right_end_for_ids_of_any_size(dtype):
    plan = make_plan(mesh_of(1), out_of_range_ids="clip")
    tables = te.functional.init_tables(plan, jax.random.key(0))
    large = np.array([2**31 + 5, 36], dtype)
    batch = {name: np.zeros(2, dtype) for name in "bcd"} | {"a": large}
    for features in (batch, te.inputs.prepare_features(batch, plan)):
        first, last = te.functional.lookup(tables, features, plan).activations["a"]
        np.testing.assert_array_equal(first, last)


def test_cotangents_of_another_shape_are_rejected():
    plan = make_plan(mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    result = te.functional.lookup(
        tables, {name: np.arange(8) % 5 for name in "abcd"}, plan
    )
    cotangents = dict(result.activations, b=jnp.ones(4))
    with rejects(field="cotangent of feature 'b'"):
        te.functional.compute_gradients(result.routing, cotangents, plan)


@pytest.mark.full
def test_two_stacks_and_unused_activations():
    config = {
        f"t{dim}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=11, dim=dim, name=f"t{dim}")
        )
        for dim in (2, 3)
    }
    plan = te.make_plan(config, mesh_of(1), optimizer=OPTIMIZER)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    cotangents = {"t2": np.zeros((4, 2), np.float32), "t3": np.ones((4, 3), np.float32)}
    slots = te.functional.init_slots(tables, plan)
    ids = dict.fromkeys(config, np.arange(4))
    *_, new = look_up_and_update(tables, slots, ids, cotangents, plan)
    before, after = (te.functional.unstack_tables(x, plan) for x in (tables, new))
    np.testing.assert_array_equal(after["t2"], before["t2"])
    np.testing.assert_allclose(after["t3"][:4], before["t3"][:4] - 1, rtol=1e-6)
