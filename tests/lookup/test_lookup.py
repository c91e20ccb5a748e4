"""Whole lookups and gradients against the dense reference, over nasty batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_embedding as te
from tests.conftest import MESHES, mesh_of, needs_kernels
from tests.reference import dense_gradients, dense_lookup
from tests.tiers import matrix, quick_cases
from tpu_embedding.rows.kernels import row_kernels

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
    "multi_hot_int64": lambda v: padded(v).astype(np.int64),
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
    mesh,
    dim=4,
    capacity=None,
    exchange=None,
    hardware=None,
    kernels=None,
    placement=None,
    combiners=("sum", "mean", "sqrtn"),
    dtype=jnp.float32,
    optimizer=OPTIMIZER,
    **feature_options,
):
    """Three tables in one stack, two of them smaller than 8 devices or nearly so.

    Features `a` and `d` share a table. Plans that are equal share compiled programs.
    """
    sizes = {"a": 37, "b": 5, "c": 11}
    tables = {
        name: te.TableConfig(
            vocabulary_size=size,
            dim=dim,
            combiner=combiner,
            name=f"table_of_{name}",
            dtype=dtype,
        )
        for (name, size), combiner in zip(sizes.items(), combiners, strict=True)
    }
    config = {
        name: te.FeatureConfig(table=table, name=name, **feature_options)
        for name, table in {**tables, "d": tables["a"]}.items()
    }
    return te.make_plan(
        config,
        mesh,
        optimizer=optimizer,
        capacity=capacity,
        exchange=exchange,
        kernels=kernels,
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
    tolerance = dict(TOLERANCE)
    if plan.trained_stacks and plan.stacks[0].layout.narrow_dtype is not None:
        # Rounded up or down: by less than one step.
        tolerance["rtol"] += float(jnp.finfo(plan.stacks[0].layout.dtype_name).eps)
    for name in before:
        if not plan.trained_stacks:
            np.testing.assert_array_equal(after[name], before[name])
            continue
        np.testing.assert_allclose(
            after[name], before[name] - expected[name], **tolerance
        )
        np.testing.assert_array_equal(
            after[name][~touched[name]], before[name][~touched[name]]
        )
    return stats, gradients, touched


def cases_on_devices():
    """Yields every case on every number of devices.

    The quick tier runs two of the cases on 1, 3 and 8 devices, and each other case on
    one of these numbers. The tests of single stages run nasty cases on all of them.
    """
    for i, case in enumerate(CASES):
        for num_devices in (1, 2, 3, 8):
            is_quick = num_devices == (8, 3, 1)[i % 3]
            is_quick |= case in ("multi_hot", "ragged_weighted") and num_devices != 2
            yield pytest.param(
                case,
                num_devices,
                marks=() if is_quick else full,
                id=f"{num_devices}devices-{case}",
            )


@pytest.mark.parametrize(
    ("case", "num_devices"),
    quick_cases(
        cases_on_devices(),
        "8devices-all_of_one_shard",
        "3devices-every_row_once",
        "1devices-multi_hot",
        "8devices-ragged",
    ),
)
def test_equals_dense_reference(case, num_devices):
    check_against_reference(make_plan(mesh_of(num_devices)), batch_of(case))


@full  # test_flatten_to_owners.py has every combiner with every kind of feature.
@pytest.mark.parametrize("case", ["weighted", "ragged_weighted", "ragged"])
@pytest.mark.parametrize(
    "combiners", [("mean", "sqrtn", "sum"), ("sqrtn", "sum", "mean")], ids="-".join
)
def test_every_combiner_on_every_table(combiners, case):
    check_against_reference(make_plan(mesh_of(8), combiners=combiners), batch_of(case))


@pytest.mark.parametrize(
    ("num_devices", "capacity", "case"),
    quick_cases(
        matrix(
            [8, 1],
            [1, 3, pytest.param(1000, marks=full)],
            [
                "all_of_one_shard",
                "multi_hot",
                pytest.param("ragged", marks=full),
                "no_ids",
            ],
        ),
        "1-3-multi_hot",
    ),
)
def test_capacity_changes_no_result(case, capacity, num_devices):
    plan = make_plan(mesh_of(num_devices), capacity=capacity)
    stats, _, _ = check_against_reference(plan, batch_of(case))
    if capacity == 1 and case != "no_ids":
        assert stats.rounds["stack_0"] > 1
    if capacity == 1000:
        assert stats.rounds["stack_0"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "num_devices", "case", "options"),
    [
        pytest.param(jnp.bfloat16, 8, "ragged_weighted", {}, marks=full),
        (jnp.bfloat16, 3, "multi_hot", dict(hardware="v5p", capacity=1)),
        pytest.param(
            *(jnp.bfloat16, 8, "multi_hot", dict(exchange="ragged", dim=5)),
            marks=full,
        ),
        pytest.param(
            jnp.bfloat16, 1, "no_ids", dict(dim=1, hardware="v5p"), marks=full
        ),
        pytest.param(jnp.float16, 3, "weighted", dict(dim=2), marks=full),
        pytest.param(
            *(jnp.int8, 3, "ragged_weighted", dict(hardware="v5p", optimizer=None)),
            marks=full,
        ),
        pytest.param(
            *(jnp.int8, 8, "multi_hot", dict(exchange="ragged", optimizer=None)),
            marks=full,
        ),
    ],
)
def test_tables_of_other_dtypes(dtype, num_devices, case, options):
    plan = make_plan(mesh_of(num_devices), dtype=dtype, **options)
    check_against_reference(plan, batch_of(case))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("zipf", marks=full),
        pytest.param("all_of_one_shard", marks=full),
        pytest.param("no_ids", marks=full),
        pytest.param("weighted", marks=full),
        "ragged_weighted",
    ],
)
def test_ragged_exchange_changes_no_result(case):
    check_against_reference(make_plan(mesh_of(8), exchange="ragged"), batch_of(case))


@pytest.mark.parametrize(
    ("num_devices", "capacity"),
    quick_cases(
        [
            (1, None),
            pytest.param(2, 1, marks=full),
            pytest.param(3, None, marks=full),
            (3, 1),
            pytest.param(3, 3, marks=full),
        ],
        "1-None",
    ),
)
def test_ragged_exchange_on_few_devices(num_devices, capacity):
    plan = make_plan(mesh_of(num_devices), capacity=capacity, exchange="ragged")
    stats, _, _ = check_against_reference(plan, batch_of("multi_hot"))
    assert (stats.rounds["stack_0"] > 1) == (capacity is not None)


@full  # test_route.py splits such requests into rounds.
@pytest.mark.parametrize(("num_rows", "rounds"), [(4, 1), (5, 2), (8, 2)])
def test_ragged_rounds_when_an_owner_is_asked_for_too_much(num_rows, rounds):
    # All of 8 shards ask owner 0 for the same rows; it has room for 39 of a round.
    ids = np.tile(np.arange(8) * 8, (16, 1))
    ids[:, num_rows:] = PADDING
    table = te.TableConfig(vocabulary_size=64, dim=2, combiner="sum", name="t")
    plan = te.make_plan(
        {"f": te.FeatureConfig(table=table, name="f")},
        mesh_of(8),
        optimizer=OPTIMIZER,
        exchange="ragged",
    )
    assert plan.stacks[0].round_size(16).received_rows == 40
    stats, _, _ = check_against_reference(plan, {"f": ids})
    assert stats.rounds["stack_0"] == rounds


@pytest.mark.parametrize(
    "surplus", [-1, *(pytest.param(n, marks=full) for n in (0, 1))]
)
def test_rounds_when_capacity_is_missed_or_met_exactly(surplus):
    # All 5 rows of one owner asked by one source: ids 0, 8, 16, ... live on shard 0.
    ids = np.full(8 * 6, PADDING).reshape(8, 6)
    ids[0, :5] = np.arange(5) * 8
    table = te.TableConfig(vocabulary_size=48, dim=2, combiner="sum", name="t")
    plan = te.make_plan(
        {"f": te.FeatureConfig(table=table, name="f")},
        mesh_of(8),
        optimizer=OPTIMIZER,
        capacity=5 + surplus,
    )
    stats, _, _ = check_against_reference(plan, {"f": ids})
    assert stats.rounds["stack_0"] == (2 if surplus < 0 else 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "dim",
    [16, *(pytest.param(dim, marks=full) for dim in (1, 3, 64, 100, 128, 200))],
)
def test_packed_rows_change_no_result(dim):
    plan = make_plan(mesh_of(3), dim=dim, hardware="v5p", capacity=3)
    check_against_reference(plan, batch_of("multi_hot"))


@needs_kernels
@pytest.mark.parametrize(
    ("case", "dim", "num_devices", "capacity", "exchange"),
    [
        ("uniform", 8, 1, None, None),
        pytest.param("uniform", 8, 8, None, "padded", marks=full),
        pytest.param("all_same_id", 16, 2, None, None, marks=full),
        pytest.param("multi_hot", 32, 3, 3, "padded", marks=full),
        pytest.param("multi_hot", 32, 8, 3, "ragged", marks=full),
        pytest.param("ragged_weighted", 64, 3, 3, "ragged", marks=full),
        pytest.param("ragged_weighted", 64, 2, None, "padded", marks=full),
        pytest.param("all_of_one_shard", 8, 8, None, "ragged", marks=full),
        pytest.param("no_ids", 64, 3, None, None, marks=full),
        pytest.param("uniform", 128, 3, 3, None, marks=full),
        pytest.param("ragged_weighted", 128, 8, None, "ragged", marks=full),
        pytest.param("multi_hot", 256, 2, None, "padded", marks=full),
    ],
)
def test_kernels_change_no_result(case, dim, num_devices, capacity, exchange):
    plan = make_plan(
        mesh_of(num_devices),
        dim=dim,
        capacity=capacity,
        exchange=exchange,
        hardware="v5p",
        kernels="interpreter",
    )
    assert plan.stacks[0].kernels.backend == "interpreter"
    check_against_reference(plan, batch_of(case))


READ_ROWS = row_kernels.read_rows


def read_rows_that_are_there(lines, row_ids, dim, *arguments, **options):
    """What a TPU would read elsewhere, Pallas' interpreter reads in the last row."""

    def check(least, most):
        assert 0 <= least <= most < lines.size // dim

    jax.debug.callback(check, jnp.min(row_ids), jnp.max(row_ids))
    return READ_ROWS(lines, row_ids, dim, *arguments, **options)


ALL_NAMES = ("one", "many", "weighted", "padded")


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize(
    ("dim", "num_devices", "exchange", "capacity", "names"),
    [
        pytest.param(8, 1, None, None, ALL_NAMES, marks=full),
        pytest.param(8, 8, "padded", None, ALL_NAMES, marks=full),
        (16, 3, "ragged", None, ALL_NAMES),
        pytest.param(32, 8, "ragged", None, ALL_NAMES, marks=full),
        pytest.param(16, 3, "ragged", 40, ("one", "many"), marks=full),
        pytest.param(32, 8, "padded", None, ("one", "many"), marks=full),
        pytest.param(64, 1, None, None, ("many",), marks=full),
        pytest.param(128, 2, "padded", 20, ("one", "many"), marks=full),
        pytest.param(128, 3, "ragged", None, ("many", "padded"), marks=full),
        pytest.param(256, 8, "padded", None, ("many", "one"), marks=full),
    ],
)
def test_batches_that_fill_tiles(
    dim, num_devices, exchange, capacity, names, monkeypatch
):
    """Features of equal batches, large enough that their samples fill lines."""
    monkeypatch.setattr(row_kernels, "read_rows", read_rows_that_are_there)
    tables = {
        name: te.TableConfig(vocabulary_size=500, dim=dim, combiner=combiner, name=name)
        for name, combiner in {"s": "sum", "m": "mean"}.items()
    }
    table_of = {"one": "s", "many": "s", "weighted": "m", "padded": "m"}
    plan = te.make_plan(
        {
            name: te.FeatureConfig(table=tables[table_of[name]], name=name)
            for name in names
        },
        mesh_of(num_devices),
        optimizer=OPTIMIZER,
        exchange=exchange,
        capacity=capacity,
        kernels="interpreter",
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    batch_size = num_devices * 8 * max(1, 128 // dim)
    ids = rng(1).integers(0, 500, (batch_size, 5))
    weights = rng(2).normal(size=ids.shape).astype(np.float32)
    batch = {
        "one": ids[:, 0],
        "many": ids % 50,
        "weighted": te.DenseIds(ids=ids, weights=weights),
        "padded": np.where(rng(3).random(ids.shape) < 0.4, PADDING, ids),
    }
    check_against_reference(plan, {name: batch[name] for name in names})


def test_mesh_of_several_axes():
    devices = np.asarray(jax.devices()[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    check_against_reference(make_plan(mesh, capacity=2), batch_of("ragged"))


@pytest.mark.parametrize(
    "num_devices",
    [3, *(pytest.param(n, marks=full) for n in (1, 2, 8))],
)
def test_each_touched_row_once(num_devices):
    mesh = mesh_of(num_devices)
    plan = make_plan(mesh)
    _, gradients, touched = check_against_reference(plan, batch_of("zero_weights"))
    updates = gradients.first_round("stack_0")
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


@full
@pytest.mark.parametrize(
    ("num_devices", "capacity", "exchange", "rounds"),
    [
        (1, None, None, 1),
        pytest.param(3, None, "padded", 1, marks=full),
        pytest.param(8, None, "ragged", 1, marks=full),
        pytest.param(8, 20, "padded", 2, marks=full),
    ],
)
def test_repeats_in_a_table_of_many_rows(num_devices, capacity, exchange, rounds):
    """Sums begin as the first occurrence where rows are more than requests."""
    table = te.TableConfig(vocabulary_size=9_000, dim=3, combiner="mean", name="table")
    config = {n: te.FeatureConfig(table=table, name=n) for n in ("one", "many")}
    plan = te.make_plan(
        config,
        mesh_of(num_devices),
        optimizer=OPTIMIZER,
        capacity=capacity,
        exchange=exchange,
    )
    # A third of the ids is one of ten, in any sample of any shard.
    ids = rng(3).integers(0, 9_000, (240, 10))
    ids = np.where(rng(4).random(ids.shape) < 0.3, ids % 10, ids)
    weights = rng(5).normal(size=ids.shape).astype(np.float32)
    batch = {"one": ids[:, 0], "many": te.DenseIds(ids=ids, weights=weights)}
    stats, _, _ = check_against_reference(plan, batch)
    assert stats.rounds["stack_0"] == rounds


@pytest.mark.parametrize(
    ("mesh", "policy"),
    quick_cases(matrix(MESHES, ["error", "drop", "clip"]), "1devices-error"),
    indirect=["mesh"],
)
def test_ids_out_of_range_under_jit(policy, mesh):
    plan = make_plan(mesh, out_of_range_ids=policy)
    bad = np.array([[-1, 2], [37, 3], [70, -(2**31)], [4, 2**31 - 2]], np.int32)
    batch = {"a": bad, "b": np.array([5, -1, 0, 4], np.int32)}
    batch |= {"c": np.arange(4), "d": np.arange(4)}
    tables = te.functional.init_tables(plan, jax.random.key(1))
    result = jax.jit(te.functional.lookup, static_argnames="plan")(tables, batch, plan)
    assert result.stats.out_of_range == {"a": 5, "b": 2, "c": 0, "d": 0}
    expected = dense_lookup(te.functional.unstack_tables(tables, plan), batch, plan)
    for name in expected:
        np.testing.assert_allclose(
            result.activations[name], expected[name], **TOLERANCE
        )


@pytest.mark.parametrize(
    "case",
    [
        "weighted",
        pytest.param("ragged_weighted", marks=full),
        "weights_cancel",
        "zero_weights",
    ],
)
def test_weights_that_are_not_positive_count_on_request(case):
    plan = make_plan(mesh_of(8), validate_weights_and_indices=False)
    check_against_reference(plan, batch_of(case))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(max_sequence_length=2), marks=full),
        pytest.param(dict(max_sequence_length=9), marks=full),
        dict(output_shape=(BATCH * 3,)),
        pytest.param(dict(output_shape=(3, BATCH // 3)), marks=full),
    ],
    ids=str,
)
def test_sequences_and_output_shapes(options):
    plan = make_plan(mesh_of(8), **options)
    batch = {"a": random_ragged(37, 40), "b": padded(5, 4), "c": padded(11, 1)}
    batch["d"] = random_ragged(37, 11)
    check_against_reference(plan, batch)


def test_ids_of_three_axes_are_combined_along_the_last():
    table = te.TableConfig(vocabulary_size=24, dim=2, combiner="mean", name="t")
    ids = np.arange(24).reshape(2, 3, 4)
    combined = te.FeatureConfig(table=table, output_shape=(2, 3), name="combined")
    apart = te.FeatureConfig(table=table, output_shape=(2, 3, 4), name="apart")
    plan = te.make_plan([combined, apart], mesh_of(8))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    rows = te.functional.unstack_tables(tables, plan)["t"]
    first, second = te.functional.lookup(tables, [ids, ids], plan).activations
    np.testing.assert_allclose(first, rows[ids].mean(axis=2), **TOLERANCE)
    np.testing.assert_array_equal(second, rows[ids])
    wrong = te.FeatureConfig(table=table, output_shape=(4,), name="wrong")
    with pytest.raises(ValueError, match=r"'wrong'.*\(4,\).*\(2, 3, 4\)"):
        te.functional.lookup(tables, [ids], te.make_plan([wrong], mesh_of(8)))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_clip_finds_the_right_end_for_ids_of_any_size(dtype):
    plan = make_plan(mesh_of(1), out_of_range_ids="clip")
    tables = te.functional.init_tables(plan, jax.random.key(0))
    large = np.array([2**31 + 5, 36], dtype)
    batch = {name: np.zeros(2, dtype) for name in "bcd"} | {"a": large}
    for features in (batch, te.inputs.prepare_features(batch, plan)):
        first, last = te.functional.lookup(tables, features, plan).activations["a"]
        np.testing.assert_array_equal(first, last)


@full
def test_shards_without_a_place_for_an_id():
    plan = make_plan(mesh_of(2))
    nothing = te.inputs.ShardedRaggedIds(
        values=np.zeros((2, 0), np.int32),
        row_splits=np.zeros((2, 3), np.int32),
        batch_size=4,
    )
    tables = te.functional.init_tables(plan, jax.random.key(1))
    batch = dict.fromkeys("abcd", nothing)
    cotangents = jax.tree.map(
        lambda s: np.ones(s.shape, np.float32),
        te.functional.activation_shapes(batch, plan),
    )
    activations, _, gradients, _ = look_up_and_update(
        tables, te.functional.init_slots(tables, plan), batch, cotangents, plan
    )
    assert not any(jnp.any(x) for x in activations.values())
    assert (gradients.first_round("stack_0").row_ids == PADDING).all()


def test_cotangents_of_another_shape_are_refused():
    plan = make_plan(mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    result = te.functional.lookup(
        tables, {name: np.arange(8) % 5 for name in "abcd"}, plan
    )
    cotangents = dict(result.activations, b=jnp.ones(4))
    with pytest.raises(ValueError, match=r"'b'.*\(8, 4\), got \(4,\)"):
        te.functional.compute_gradients(result.routing, cotangents, plan)


def test_a_batch_routed_for_another_plan_is_refused():
    plan, other = make_plan(mesh_of(2)), make_plan(mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    routed = te.functional.route({name: np.arange(8) % 5 for name in "abcd"}, other)
    with pytest.raises(ValueError, match="got one of another plan"):
        te.functional.read_rows(tables, routed, plan)


def test_two_stacks_and_unused_activations():
    mesh = mesh_of(8)
    tables = [
        te.TableConfig(vocabulary_size=11, dim=dim, name=f"t{dim}", combiner="sum")
        for dim in (2, 3)
    ]
    config = [te.FeatureConfig(table=t, name=t.name) for t in tables]
    plan = te.make_plan(config, mesh, optimizer=OPTIMIZER)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    cotangents = [np.zeros((4, 2), np.float32), np.ones((4, 3), np.float32)]
    slots = te.functional.init_slots(tables, plan)
    ids = [np.arange(4), np.arange(4)]
    *_, new = look_up_and_update(tables, slots, ids, cotangents, plan)
    before, after = (
        te.functional.unstack_tables(tables, plan),
        te.functional.unstack_tables(new, plan),
    )
    np.testing.assert_array_equal(after["t2"], before["t2"])
    np.testing.assert_allclose(after["t3"][:4], before["t3"][:4] - 1, rtol=1e-6)


@full
def test_second_step_compiles_nothing():
    plan = make_plan(mesh_of(8), dim=5)
    compiled_before = look_up_and_update._cache_size()
    for seed in range(3):
        batch = {"a": rng(seed).integers(0, 37, BATCH), "b": padded(5), "c": ZIPF % 11}
        batch["d"] = random_ragged(37, 30 + seed, seed)
        check_against_reference(plan, batch)
    assert look_up_and_update._cache_size() == compiled_before + 1


def test_outputs_are_sharded_like_the_batch():
    plan = make_plan(mesh_of(8))
    batch = {name: jnp.arange(16) % 5 for name in "abcd"}
    tables = te.functional.init_tables(plan, jax.random.key(0))
    result = jax.jit(te.functional.lookup, static_argnames="plan")(tables, batch, plan)
    for activation in result.activations.values():
        assert activation.sharding.is_equivalent_to(plan.batch_sharding, 2)


@full
@settings(max_examples=12)
@given(
    num_devices=st.sampled_from([3, 8]),
    capacity=st.sampled_from([None, 3]),
    exchange=st.sampled_from(["padded", "ragged"]),
    num_values=st.integers(33, 64),
    seed=st.integers(0, 2**16),
)
def test_any_ragged_batch(num_devices, capacity, exchange, num_values, seed):
    plan = make_plan(
        mesh_of(num_devices), capacity=capacity, exchange=exchange, expected_valence=8
    )
    batch = {
        name: random_ragged(size, num_values, seed + i)
        for i, (name, size) in enumerate({"a": 37, "b": 5, "c": 11, "d": 37}.items())
    }
    check_against_reference(plan, batch)


@full
@given(seed=st.integers(0, 2**16))
@settings(max_examples=10)
def test_permuting_samples_permutes_activations(seed):
    plan = make_plan(mesh_of(8))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    order = rng(seed).permutation(BATCH)
    sizes = {"a": 37, "b": 5, "c": 11, "d": 37}
    batch = {name: padded(size, seed=seed) for name, size in sizes.items()}
    permuted = {name: ids[order] for name, ids in batch.items()}
    run = jax.jit(te.functional.lookup, static_argnames="plan")
    activations = run(tables, te.inputs.prepare_features(batch, plan), plan).activations
    result = run(tables, te.inputs.prepare_features(permuted, plan), plan).activations
    for name in batch:
        np.testing.assert_allclose(
            result[name], activations[name][order], rtol=1e-6, atol=1e-6
        )


@full
def test_hundreds_of_ids_per_sample():
    table = te.TableConfig(vocabulary_size=50, dim=3, combiner="sum", name="table")
    feature = te.FeatureConfig(table=table, name="ids")
    plan = te.make_plan(feature, mesh_of(2))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    rows = te.functional.unstack_tables(tables, plan)["table"]
    ids = np.random.default_rng(0).integers(0, 50, (4, 300)).astype(np.int32)
    found = te.functional.lookup(tables, ids, plan).activations
    np.testing.assert_allclose(found, rows[ids].sum(axis=1), rtol=1e-5, atol=1e-5)
