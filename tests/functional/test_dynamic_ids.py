"""Ids of dynamic tables: rows for new ids, in training, evaluation and every API."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.dynamic_reference import DynamicTable
from tpu_embedding.rows.id_mixing import unmix_ids

functional = te.functional


def plan_of(num_devices=1, dynamic=None, optimizer="adagrad", dim=8, **feature):
    users = te.TableConfig(
        vocabulary_size=dynamic or te.Dynamic(capacity=128), dim=dim, name="user"
    )
    config = {"user": te.FeatureConfig(table=users, **feature)}
    return te.make_plan(config, mesh_of(num_devices), optimizer=optimizer)


def words(ids):
    return functional.Ids64.of_array(np.asarray(ids, np.int64))


def in_places(ids, size=64):
    """Returns ids, and places without one: all calls of a test have one shape."""
    return [*ids] + [-1] * (size - len(ids))


def start(plan):
    tables = functional.init_tables(plan, jax.random.key(0))
    return tables, functional.init_slots(tables, plan)


def counts(stats):
    names = ("hits", "inserts", "evictions", "not_admitted", "no_place", "used_rows")
    return {name: int(getattr(stats, name)) for name in names}


def end_step(tables, slots, plan, features):
    """Trains on a batch whose loss is the sum of the activations."""
    result = functional.lookup(tables, features, plan)
    cotangents = jax.tree.map(jnp.ones_like, result.activations)
    gradients = functional.compute_gradients(result.routing, cotangents, plan)
    return functional.apply_gradients(tables, slots, gradients, plan)


def insert(tables, slots, plan, ids, **options):
    features = {"user": words(ids)}
    return functional.insert_ids(tables, slots, features, plan, **options)


NASTY = [0, 1, -2, 2**63 - 1, -(2**63), 2**32, 2**32 + 3, 3, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_every_id_of_64_bits_has_a_row_of_its_own(num_devices):
    plan = plan_of(num_devices)
    tables, slots = start(plan)
    result = insert(tables, slots, plan, NASTY)
    (stats,) = result.stats.values()
    assert counts(stats)["inserts"] == len(NASTY)
    rows = np.asarray(result.features["user"].ids)
    assert len(set(rows.tolist())) == len(NASTY)
    again = insert(result.tables, result.slots, plan, NASTY[::-1])
    np.testing.assert_array_equal(again.features["user"].ids, rows[::-1])
    assert counts(again.stats["user"])["inserts"] == 0
    found = functional.dynamic_rows(again.tables, plan)["user"]
    np.testing.assert_array_equal(
        found.ids, np.sort(np.asarray(NASTY, np.int64).view(np.uint64))
    )


def test_places_without_an_id_have_no_row():
    plan = plan_of()
    tables, slots = start(plan)
    result = insert(tables, slots, plan, [[5, -1], [-1, -1]])
    np.testing.assert_array_equal(
        np.asarray(result.features["user"].ids)[:, 1], [te.types.PADDING_ROW_ID] * 2
    )
    activations = functional.lookup(result.tables, result.features, plan).activations
    assert np.all(np.asarray(activations["user"])[1] == 0)


def test_a_new_row_starts_from_a_value_of_its_id_on_any_device_count():
    values = []
    for num_devices in (1, 3, 8):
        plan = plan_of(num_devices)
        result = insert(*start(plan), plan, NASTY)
        looked_up = functional.lookup(result.tables, result.features, plan)
        values.append(np.asarray(looked_up.activations["user"]))
    assert len(np.unique(values[0][:, 0])) == len(NASTY)
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(values[0], values[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("hardware", [None, "v5p"])
def test_an_evicted_id_comes_back_with_a_new_row_and_new_slots(dtype, hardware):
    users = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=64), dim=8, name="user", dtype=dtype
    )
    options = (
        {} if hardware is None else {"hardware": te.hardware.hardware_by_name(hardware)}
    )
    config = {"user": te.FeatureConfig(table=users)}
    plan = te.make_plan(config, mesh_of(1), optimizer="adagrad", **options)
    tables, slots = start(plan)
    first = insert(tables, slots, plan, in_places([7]))
    fresh = functional.lookup(first.tables, first.features, plan).activations["user"]
    tables, slots = end_step(first.tables, first.slots, plan, first.features)
    # 64 other ids take all places, id 7's among them.
    others = insert(tables, slots, plan, np.arange(100, 164))
    assert counts(others.stats["user"])["evictions"] == 1
    tables, slots = end_step(others.tables, others.slots, plan, others.features)
    back = insert(tables, slots, plan, in_places([7]))
    assert counts(back.stats["user"])["evictions"] == 1
    activations = functional.lookup(back.tables, back.features, plan).activations
    np.testing.assert_array_equal(activations["user"], fresh)
    row = int(back.features["user"].ids[0])
    slot = functional.slot_values(back.slots, plan)["user"]["accumulators"][row]
    np.testing.assert_array_equal(slot, np.full(8, 0.1, np.float32))


def test_ids_of_one_step_are_never_evicted():
    plan = plan_of(dynamic=te.Dynamic(capacity=64))
    tables, slots = start(plan)
    first = insert(tables, slots, plan, np.arange(64))
    second = insert(first.tables, first.slots, plan, np.arange(100, 110))
    assert counts(second.stats["user"])["no_place"] == 10
    tables, slots = end_step(second.tables, second.slots, plan, first.features)
    third = insert(tables, slots, plan, np.arange(100, 110))
    assert counts(third.stats["user"])["evictions"] == 10


def test_ids_without_a_place_share_the_learned_row():
    dynamic = te.Dynamic(capacity=64, evict=None, default_row="learned")
    for num_devices in (1, 3):
        plan = plan_of(num_devices, dynamic, optimizer=te.optimizers.sgd(1.0))
        tables, slots = start(plan)
        result = insert(tables, slots, plan, np.arange(70))
        assert counts(result.stats["user"])["no_place"] == 6
        rows = np.asarray(result.features["user"].ids)
        assert np.sum(rows == np.bincount(rows).argmax()) == 6
        tables, slots = end_step(result.tables, result.slots, plan, result.features)
        found = functional.lookup(tables, {"user": words([999])}, plan)
        np.testing.assert_array_equal(found.activations["user"], np.full((1, 8), -6.0))


def test_evaluation_inserts_nothing():
    plan = plan_of(3)
    tables, slots = start(plan)
    result = insert(tables, slots, plan, [5, 6])
    before = jax.tree.map(np.array, result.tables)
    activations = functional.lookup(result.tables, {"user": words([5, 8])}, plan)
    assert np.all(np.asarray(activations.activations["user"])[1] == 0)
    found = functional.find_ids(result.tables, {"user": words([5, 8])}, plan)
    assert (int(found.stats["user"].ids), int(found.stats["user"].hits)) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, before, result.tables)


def test_activation_shapes_take_ids_and_rows():
    plan = plan_of(3)
    ids = {"user": te.DenseIds(ids=words(range(6)))}
    rows = functional.find_ids(start(plan)[0], ids, plan).features
    for batch in (ids, rows):
        assert functional.activation_shapes(batch, plan)["user"].shape == (6, 8)


def test_a_feature_that_only_finds_inserts_nothing():
    users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=64), dim=4, name="user")
    config = {
        "seen": te.FeatureConfig(table=users),
        "shown": te.FeatureConfig(table=users, find_only=True),
    }
    for num_devices in (1, 3):
        plan = te.make_plan(config, mesh_of(num_devices), optimizer="sgd")
        tables, slots = start(plan)
        features = {"seen": words([1, 2, 3]), "shown": words([3, 4, 5])}
        result = functional.insert_ids(tables, slots, features, plan)
        assert counts(result.stats["user"])["inserts"] == 3
        shown = np.asarray(result.features["shown"].ids)
        assert shown[0] == np.asarray(result.features["seen"].ids)[2]
        assert np.all(shown[1:] == te.types.PADDING_ROW_ID)


def test_an_id_that_is_only_found_keeps_its_row_in_that_step():
    # The bucket is full, and id 0 is the oldest: the new id must not take its row.
    users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=64), dim=4, name="user")
    config = {
        "seen": te.FeatureConfig(table=users),
        "shown": te.FeatureConfig(table=users, find_only=True),
    }
    plan = te.make_plan(config, optimizer="sgd")
    tables, slots = start(plan)
    for now, seen, shown in ((1, [0], []), (2, range(1, 64), []), (3, [99], [0])):
        features = {"seen": words(in_places(seen)), "shown": words(in_places(shown))}
        result = functional.insert_ids(tables, slots, features, plan, now)
        tables, slots = result.tables, result.slots
    seen, shown = (int(result.features[x].ids[0]) for x in ("seen", "shown"))
    rows = functional.dynamic_rows(tables, plan)["user"]
    id_of_row = dict(zip(rows.rows.tolist(), rows.ids.tolist(), strict=True))
    assert (id_of_row[seen], id_of_row[shown]) == (99, 0)


@pytest.mark.parametrize(
    "policy, evicted",
    [
        (te.dynamic.LeastRecentlyUsed(), 1),
        (te.dynamic.LeastFrequentlyUsed(), 2),
        (te.dynamic.TimeToLive(2), 1),
    ],
)
def test_who_is_evicted(policy, evicted):
    # Id 1 is used twice early, id 2 once later; the rest fills the bucket.
    plan = plan_of(dynamic=te.Dynamic(capacity=64, evict=policy))
    tables, slots = start(plan)
    steps = [[1, *range(10, 72)], [1], [2, *range(10, 72)], [*range(10, 72)], [99]]
    for now, ids in enumerate(steps, start=1):
        result = insert(tables, slots, plan, in_places(ids), now=now)
        tables, slots = result.tables, result.slots
    left = set(functional.dynamic_rows(tables, plan)["user"].ids.tolist())
    assert {1, 2, 99} - left == {evicted}


CLOCKS = [
    1,
    2**31,
    2**32 - 1,
    np.uint32(2**32 - 1),
    np.int64(2**31),
    np.array(7, np.int8),
    jnp.uint32(2**31 + 5),
]


@pytest.mark.parametrize("now", CLOCKS, ids=str)
def test_a_clock_is_any_integer_of_32_bits(now):
    plan = plan_of()
    tables, slots = start(plan)
    result = insert(tables, slots, plan, [5], now=now)
    assert functional.dynamic_rows(result.tables, plan)["user"].last_used == int(now)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_a_clock_may_be_traced(dtype):
    plan = plan_of()
    with jax.enable_x64(dtype == np.int64):
        tables, slots = start(plan)
        step = jax.jit(lambda now: insert(tables, slots, plan, [5], now=now).tables)
        used = [
            int(functional.dynamic_rows(step(dtype(now)), plan)["user"].last_used[0])
            for now in [2**31 - 1, 0, *NO_CLOCKS_OF.get(dtype, [])]
        ]
    # A value out of range counts as left out: this is the first step.
    assert used == [2**31 - 1] + [1] * (len(used) - 1)


def test_a_clock_that_is_left_out_goes_on_from_the_last_one():
    policy = te.dynamic.TimeToLive(2)
    plan = plan_of(dynamic=te.Dynamic(capacity=64, evict=policy))
    tables, slots = start(plan)
    ids = {"user": words(np.arange(64))}
    result = functional.insert_ids(tables, slots, ids, plan, now=29_000_000)
    tables, slots = result.tables, result.slots
    evictions = []
    for step in range(4):
        ids = {"user": words(in_places([100 + step]))}
        result = functional.insert_ids(tables, slots, ids, plan)
        evictions.append(counts(result.stats["user"])["evictions"])
        tables, slots = end_step(result.tables, result.slots, plan, result.features)
    assert evictions == [0, 0, 0, 1]


def test_the_clock_stops_at_its_last_value():
    plan = plan_of()
    tables, slots = start(plan)
    result = insert(tables, slots, plan, in_places([5]), now=2**32 - 1)
    tables, _ = end_step(result.tables, result.slots, plan, result.features)
    assert int(tables["stack_0:ids"].clock[0]) == 2**32 - 1


NO_CLOCKS_OF = {np.int32: [-5], np.int64: [-5, 2**32, 2**40]}
NO_CLOCKS = [
    (0, ValueError, "0"),
    (-1, ValueError, "-1"),
    (2**32, ValueError, "4294967296"),
    (2**70, ValueError, "1180591620717411303424"),
    (np.int64(-5), ValueError, "-5"),
    (np.array(2**40), ValueError, "1099511627776"),
    (jnp.int32(0), ValueError, "0"),
    (True, TypeError, "True"),
    (np.bool_(True), TypeError, "dtype bool"),
    (jnp.array(True), TypeError, "dtype bool"),
    (1.0, TypeError, "1.0"),
    (jnp.float32(3), TypeError, "dtype float32"),
    (np.array(2**70), TypeError, "dtype object"),
    ("5", TypeError, "'5'"),
    ([5], TypeError, r"\[5\]"),
    (np.array([5]), TypeError, r"shape \(1,\)"),
    (jnp.array([5]), TypeError, r"shape \(1,\)"),
    (np.datetime64("2026-11-24"), TypeError, "datetime64"),
    (jax.random.key(0), TypeError, "dtype key"),
]


@pytest.mark.parametrize("now, error, got", NO_CLOCKS)
def test_a_clock_that_is_no_such_integer_is_refused(now, error, got):
    plan = plan_of()
    tables, slots = start(plan)
    message = (
        rf"now must be one integer from 1 to 2\*\*32 - 1, got .*{got}.*np.uint32\("
    )
    with pytest.raises(error, match=message):
        insert(tables, slots, plan, [5], now=now)


@pytest.mark.parametrize("now", [jnp.float32(1), jnp.array([1]), jnp.array(True)])
def test_a_traced_clock_of_another_kind_is_refused(now):
    plan = plan_of()
    tables, slots = start(plan)
    with pytest.raises(TypeError, match="now must be one integer"):
        jax.jit(lambda now: insert(tables, slots, plan, [5], now=now))(now)


def test_ids_of_one_clock_are_not_evicted_and_count_as_used_once():
    plan = plan_of(dynamic=te.Dynamic(capacity=64))
    tables, slots = start(plan)
    for _ in range(2):
        result = insert(tables, slots, plan, np.arange(64), now=9)
        tables, slots = end_step(result.tables, result.slots, plan, result.features)
    found = functional.dynamic_rows(tables, plan)["user"]
    np.testing.assert_array_equal(found.counts, np.ones(64))
    same = insert(tables, slots, plan, [100, 101], now=9).stats["user"]
    later = insert(tables, slots, plan, [100, 101], now=10).stats["user"]
    assert (counts(same)["inserts"], counts(same)["no_place"]) == (0, 2)
    assert (counts(later)["inserts"], counts(later)["evictions"]) == (2, 2)


def test_admission_counts_calls_and_starts_anew_with_each_window():
    def admitted(now, **options):
        admit = te.dynamic.AdmitAfter(2, **options)
        plan = plan_of(dynamic=te.Dynamic(capacity=128, admit=admit))
        tables, slots = start(plan)
        inserts = []
        for each in now:
            result = insert(tables, slots, plan, [5], now=each)
            tables, slots = result.tables, result.slots
            inserts.append(counts(result.stats["user"])["inserts"])
        return inserts

    assert admitted([9, 9]) == [0, 1]
    assert admitted([9, 10], window=5) == [0, 0]
    assert admitted([9, 10, 11], window=5) == [0, 0, 1]


@pytest.mark.parametrize("unique_rows", [False, True])
def test_no_id_is_counted_nowhere(unique_rows):
    plan = plan_of(unique_rows=unique_rows, out_of_range_ids="drop")
    tables, slots = start(plan)
    ids = te.inputs.prepare_features({"user": np.array([[5, -1], [7, -1]])}, plan)
    result = functional.insert_ids(tables, slots, ids, plan)
    assert int(result.stats["user"].ids) == 2
    looked_up = functional.lookup(result.tables, result.features, plan)
    assert int(looked_up.stats.out_of_range["user"]) == 0


def test_admission_after_some_steps():
    admit = te.dynamic.AdmitAfter(3)
    plan = plan_of(dynamic=te.Dynamic(capacity=128, admit=admit))
    tables, slots = start(plan)
    inserted = []
    for _ in range(4):
        result = insert(tables, slots, plan, [5, 5, 2**40])
        inserted.append(counts(result.stats["user"])["inserts"])
        tables, slots = end_step(result.tables, result.slots, plan, result.features)
    assert inserted == [0, 0, 2, 0]


def test_admission_by_probability_repeats_itself():
    admit = te.dynamic.AdmitWithProbability(0.25)
    plan = plan_of(dynamic=te.Dynamic(capacity=8000, admit=admit))
    admitted = []
    for _ in range(2):
        result = insert(*start(plan), plan, np.arange(4000))
        admitted.append(functional.dynamic_rows(result.tables, plan)["user"].ids)
    np.testing.assert_array_equal(*admitted)
    assert abs(len(admitted[0]) - 1000) < 100


def ids_of_bucket(bucket, num_ids, num_buckets):
    """Returns ids that all belong to one bucket."""
    first = np.uint32(-(-bucket * 2**32 // num_buckets) + 5)
    words = unmix_ids(np.full(num_ids, first), np.arange(num_ids, dtype=np.uint32))
    return functional.Ids64(high=words[0], low=words[1]).to_numpy()


@pytest.mark.parametrize(
    "num_devices, admit",
    [(2, te.dynamic.AdmitWithProbability(0.5)), (3, te.dynamic.AdmitAfter(2))],
)
def test_more_ids_of_a_bucket_than_a_round_holds(num_devices, admit):
    dynamic = te.Dynamic(capacity=1024, admit=admit)
    plan = plan_of(num_devices, dynamic, dim=4)
    tables, slots = start(plan)
    flood = ids_of_bucket(5, 3000, dynamic.num_buckets)
    others = ids_of_bucket(11, 1400, dynamic.num_buckets)
    mixed = np.where(np.arange(3000) % 2, flood, 2**64 - 1)
    mixed[::2][:1400] = others
    reference = DynamicTable(dynamic, lambda mixed: np.zeros((len(mixed), 4)))
    for now, ids in enumerate([flood[-64:], flood[-64:], flood, mixed, flood], start=1):
        # The places without an id are spread over the devices.
        batch = np.full((3000,), 2**64 - 1, np.uint64)
        batch[:: 3000 // len(ids)][: len(ids)] = ids
        features = {"user": functional.Ids64.of_array(batch)}
        result = functional.insert_ids(tables, slots, features, plan, now=now)
        tables, slots = result.tables, result.slots
        expected, _ = reference.insert(ids[ids != 2**64 - 1].tolist(), [], now)
        assert counts(result.stats["user"]).items() <= expected.items()
    found = functional.find_ids(tables, features, plan)
    assert int(found.stats["user"].hits) == expected["hits"] + expected["inserts"] == 64
    rows = functional.dynamic_rows(tables, plan)["user"]
    assert dict(zip(rows.ids.tolist(), rows.natural_rows.tolist(), strict=True)) == {
        reference.ids[place.key]: 64 * bucket + lane
        for bucket, places in enumerate(reference.buckets)
        for lane, place in enumerate(places)
        if place.key is not None
    }


def test_admission_goes_on_filtering():
    admit = te.dynamic.AdmitAfter(3)
    plan = plan_of(dynamic=te.Dynamic(capacity=640, admit=admit))
    tables, slots = start(plan)
    inserts = []
    for step in range(1, 101):
        once = np.random.default_rng(step).integers(0, 2**62, 63)
        result = insert(tables, slots, plan, [7, *once], now=step)
        tables, slots = result.tables, result.slots
        inserts.append(counts(result.stats["user"])["inserts"])
        if step <= 3:
            assert counts(result.stats["user"])["inserts"] == (step == 3)
    assert sum(inserts[20:]) < 0.02 * 80 * 63


def test_a_half_life_counts_at_the_next_use():
    policy = te.dynamic.LeastFrequentlyUsed(half_life=5)
    plan = plan_of(dynamic=te.Dynamic(capacity=64, evict=policy))
    tables, slots = start(plan)
    found = []
    for now in [*range(1, 21), 31, 300]:
        result = insert(tables, slots, plan, [5], now=now)
        tables, slots = result.tables, result.slots
        found.append(int(functional.dynamic_rows(tables, plan)["user"].counts[0]))
    # 20 uses, two half lives and a use, many half lives and a use.
    assert found == [*range(1, 21), 20 // 4 + 1, 1]


LEFT_OUT = {
    "mean": (dict(combiner="mean"), [[1, 2, 3]], [[0.0, -1.0, 0.5]], [3]),
    "sum": (dict(combiner="sum"), [[1, 2, 3]], [[0.0, -1.0, 0.5]], [2, 3]),
    "beside": (dict(combiner="sum"), [[1, 1, 2]], [[0.0, 1.0, 0.0]], [1]),
    "sequence": (
        dict(max_sequence_length=2),
        [[1, 2, 3], [4, 5, 6]],
        None,
        [1, 2, 4, 5],
    ),
    "ragged sequence": (
        dict(max_sequence_length=2),
        [[1, 2, 3], [4], [5, 6, 7, 8], []],
        None,
        [1, 2, 4, 5, 6],
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_ids_that_add_nothing_take_no_rows(case):
    options, ids, weights, expected = LEFT_OUT[case]
    table = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=64),
        dim=4,
        name="user",
        combiner=options.pop("combiner", "mean"),
    )
    config = {"user": te.FeatureConfig(table=table, **options)}
    plan = te.make_plan(config, mesh_of(2), optimizer="sgd")
    weights = None if weights is None else {"user": weights}
    prepared = te.inputs.prepare_features({"user": ids}, plan, weights)
    result = functional.insert_ids(*start(plan), prepared, plan)
    found = functional.dynamic_rows(result.tables, plan)["user"]
    assert found.ids.tolist() == expected
    num_ids = len({x for sample in ids for x in sample})
    not_admitted = counts(result.stats["user"])["not_admitted"]
    assert not_admitted == num_ids - len(expected)


def test_copies_of_a_table_insert_the_ids_of_all():
    users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=128), dim=8, name="user")
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    for placement in (te.Replicated(), te.Sharded(axes=("model",))):
        plan = te.make_plan(
            {"user": te.FeatureConfig(table=users)},
            mesh,
            optimizer="adagrad",
            placement=placement,
        )
        tables, slots = start(plan)
        result = insert(tables, slots, plan, NASTY)
        assert counts(result.stats["user"])["inserts"] == len(NASTY)
        tables, slots = end_step(result.tables, result.slots, plan, result.features)
        one = plan_of(1)
        expected = insert(*start(one), one, NASTY)
        of_one, _ = end_step(expected.tables, expected.slots, one, expected.features)
        np.testing.assert_allclose(
            functional.lookup(tables, {"user": words(NASTY)}, plan).activations["user"],
            functional.lookup(of_one, {"user": words(NASTY)}, one).activations["user"],
            rtol=1e-6,
        )


class Model(nnx.Module):
    def __init__(self, plan):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.dense(self.embedding(ids)["user"])


def test_a_flax_model_trains_and_evaluates():
    model = Model(plan_of(3))
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def step(model, optimizer, ids):
        rows = optimizer.insert_ids(model, ids)
        loss, gradients = te.value_and_grad(lambda m: jnp.mean(m(rows) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    ids = {"user": words(NASTY)}
    losses = [float(step(model, optimizer, ids)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert step._cache_size() if hasattr(step, "_cache_size") else True
    assert int(model.embedding.dynamic_stats.get_value()["user"].hits) == len(NASTY)
    assert np.any(np.asarray(model(ids)) != np.asarray(model({"user": words([77])})))


def test_an_optimizer_of_another_model_is_refused():
    class Others(nnx.Module):
        def __init__(self):
            table = te.TableConfig(vocabulary_size=10, dim=4, name="item")
            config = te.FeatureConfig(table=table)
            self.items = te.TPUEmbedding(config, "adagrad", rngs=nnx.Rngs(0))

    model = Model(plan_of())
    optimizer = te.Optimizer(Others(), optax.sgd(0.1))
    message = r"layers \['embedding'\]; the optimizer has \['items'\]. Make"
    with pytest.raises(ValueError, match=message):
        optimizer.insert_ids(model, {"user": words([5])})


def test_a_linen_state_inserts():
    plan = plan_of()
    layer = te.linen.TPUEmbedding(plan)
    ids = {"user": words(NASTY)}
    variables = layer.init(jax.random.key(0), ids)
    state = te.linen.TrainState.create(
        apply_fn=layer.apply, variables=variables, tx=optax.sgd(0.1)
    )
    state, rows = state.insert_ids(ids)

    def loss_fn(variables):
        return jnp.sum(layer.apply(variables, rows)["user"] ** 2)

    before, gradients = te.linen.value_and_grad(loss_fn)(state.variables)
    state = state.apply_gradients(grads=gradients)
    assert float(loss_fn(state.variables)) < float(before)
    again, same_rows, stats = state.insert_ids(ids, with_stats=True)
    assert counts(stats["user"])["hits"] == len(NASTY)
    np.testing.assert_array_equal(same_rows["user"].ids, rows["user"].ids)
    assert jax.tree.structure(again) == jax.tree.structure(state)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_ids_that_jax_may_have_narrowed_are_refused(dtype):
    plan = plan_of()
    tables, slots = start(plan)
    ids = {"user": np.array([3, 5], dtype)}
    for call in (
        lambda: functional.insert_ids(tables, slots, ids, plan),
        lambda: functional.lookup(tables, ids, plan),
        lambda: jax.jit(lambda x: functional.lookup(tables, x, plan).activations)(ids),
    ):
        with pytest.raises(TypeError, match="must hold Ids64.*prepare"):
            call()


def test_ids_in_a_loss_say_what_to_do():
    model = Model(plan_of())
    ids = {"user": words(NASTY)}
    with pytest.raises(TypeError, match="optimizer.insert_ids"):
        te.value_and_grad(lambda m: jnp.sum(m(ids)))(model)
    plan = model.embedding.plan
    result = functional.lookup(model.embedding.tables.get_value(), ids, plan)
    with pytest.raises(TypeError, match="'user' .* te.functional.insert_ids"):
        functional.compute_gradients(result.routing, result.activations, plan)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: plan_of(optimizer=te.optimizers.every_row("adam")), "every_row"),
        (lambda: plan_of(default_id=0), "default_id must be None"),
        (lambda: te.Dynamic(capacity=0), "Dynamic.capacity"),
        (lambda: te.Dynamic(capacity=10, evict="lru"), "Dynamic.evict"),
        (
            lambda: te.TableConfig(
                vocabulary_size=te.Dynamic(capacity=10), dim=4, dtype=jnp.int8
            ),
            "must not be int8",
        ),
        (
            lambda: te.TableConfig(
                vocabulary_size=te.Dynamic(capacity=10),
                dim=4,
                initializer=jax.nn.initializers.lecun_normal(),
            ),
            "rowwise",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_new_id_inherits_nothing_of_a_broken_row(value):
    table = te.TableConfig(vocabulary_size=te.Dynamic(capacity=64), dim=4, name="user")
    plan = te.make_plan(
        {"user": te.FeatureConfig(table=table)},
        mesh_of(1),
        optimizer="adagrad",
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    tables, slots = start(plan)
    for first in (0, 1000):
        inserted = insert(tables, slots, plan, np.arange(first, first + 64))
        tables, slots = inserted.tables, inserted.slots
        result = functional.lookup(tables, inserted.features, plan)
        assert np.isfinite(result.activations["user"]).all()
        cotangents = {"user": jnp.full((64, 4), 1.0 if first else value)}
        gradients = functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = functional.apply_gradients(tables, slots, gradients, plan)
    rows = functional.lookup(tables, inserted.features, plan).activations["user"]
    assert np.isfinite(rows).all()
