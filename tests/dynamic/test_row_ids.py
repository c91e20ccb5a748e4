"""Ids of dynamic tables: rows for new ids, in training, evaluation and every API."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.dynamic.dynamic_reference import DynamicTable
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.dynamic.ids_64 import unmix_ids

functional = te.functional


def plan_of(num_devices=1, dynamic=None, optimizer="adagrad", dim=8, **feature):
    table = {k: feature.pop(k) for k in ("dtype", "initializer") if k in feature}
    dynamic = dynamic or te.Dynamic(capacity=128)
    users = te.TableConfig(vocabulary_size=dynamic, dim=dim, name="user", **table)
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


def test_every_id_of_64_bits_has_a_row_of_its_own():
    plan = plan_of(2)
    tables, slots = start(plan)
    result = insert(tables, slots, plan, in_places(NASTY, 12))
    (stats,) = result.stats.values()
    assert counts(stats)["inserts"] == len(NASTY)
    rows = np.asarray(result.features["user"].ids)
    # Places without an id have no row.
    np.testing.assert_array_equal(rows[10:], [te.types.PADDING_ROW_ID] * 2)
    assert len(set(rows[:10].tolist())) == len(NASTY)
    again = insert(result.tables, result.slots, plan, in_places(NASTY, 12)[::-1])
    np.testing.assert_array_equal(again.features["user"].ids, rows[::-1])
    assert counts(again.stats["user"])["inserts"] == 0
    found = functional.dynamic_rows(again.tables, plan)["user"]
    np.testing.assert_array_equal(
        found.ids, np.sort(np.asarray(NASTY, np.int64).view(np.uint64))
    )


@pytest.mark.full
def test_a_new_row_starts_from_a_value_of_its_id_on_any_device_count():
    values = []
    for num_devices in (1, 2):
        plan = plan_of(num_devices)
        result = insert(*start(plan), plan, in_places(NASTY, 12))
        looked_up = functional.lookup(result.tables, result.features, plan)
        values.append(np.asarray(looked_up.activations["user"])[:10])
    assert len(np.unique(values[0][:, 0])) == len(NASTY)
    np.testing.assert_array_equal(values[0], values[1])


def packed_plan():
    """Narrow rows that share lines."""
    users = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=64), dim=8, name="user", dtype=jnp.bfloat16
    )
    config = {"user": te.FeatureConfig(table=users)}
    hardware = te.hardware.hardware_by_name("v5p")
    return te.make_plan(config, mesh_of(1), optimizer="adagrad", hardware=hardware)


def test_an_evicted_id_comes_back_with_a_new_row_and_new_slots():
    plan = packed_plan()
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


def test_ids_without_a_place_share_the_learned_row():
    dynamic = te.Dynamic(capacity=64, evict=None, default_row="learned")
    plan = plan_of(1, dynamic, optimizer=te.optimizers.sgd(1.0))
    tables, slots = start(plan)
    result = insert(tables, slots, plan, np.arange(70))
    assert counts(result.stats["user"])["no_place"] == 6
    rows = np.asarray(result.features["user"].ids)
    assert np.sum(rows == np.bincount(rows).argmax()) == 6
    tables, slots = end_step(result.tables, result.slots, plan, result.features)
    found = functional.lookup(tables, {"user": words([998, 999])}, plan)
    np.testing.assert_array_equal(found.activations["user"], np.full((2, 8), -6.0))


def test_evaluation_inserts_nothing():
    plan = plan_of(2)
    tables, slots = start(plan)
    result = insert(tables, slots, plan, in_places([5, 6], 12))
    before = jax.tree.map(np.array, result.tables)
    ids = {"user": words(in_places([5, 8], 12))}
    activations = functional.lookup(result.tables, ids, plan)
    assert np.all(np.asarray(activations.activations["user"])[1] == 0)
    found = functional.find_ids(result.tables, ids, plan)
    assert (int(found.stats["user"].ids), int(found.stats["user"].hits)) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, before, result.tables)


CLOCKS = [
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


@pytest.mark.full
def test_a_clock_may_be_traced():
    plan, dtype = plan_of(), np.int64
    with jax.enable_x64(True):
        tables, slots = start(plan)
        step = jax.jit(lambda now: insert(tables, slots, plan, [5], now=now).tables)
        used = [
            int(functional.dynamic_rows(step(dtype(now)), plan)["user"].last_used[0])
            for now in [2**31 - 1, 0, -5, 2**32, 2**40]
        ]
    # A value out of range counts as left out: this is the first step.
    assert used == [2**31 - 1] + [1] * (len(used) - 1)


NO_CLOCKS = [
    (0, ValueError),
    (np.int64(-5), ValueError),
    (jnp.int32(0), ValueError),
    (True, TypeError),
    (1.0, TypeError),
    ("5", TypeError),
    (np.array([5]), TypeError),
    (np.datetime64("2026-11-24"), TypeError),
]


@pytest.mark.parametrize("now, error", NO_CLOCKS)
def test_a_clock_that_is_not_such_an_integer_is_rejected(now, error):
    plan = plan_of()
    tables, slots = start(plan)
    with rejects(error, field="now", value=now, fix="np.uint32("):
        insert(tables, slots, plan, [5], now=now)
    if isinstance(now, float):
        with rejects(error, field="now"):
            jax.jit(lambda x: insert(tables, slots, plan, [5], now=x))(now)


def test_admission_counts_calls_and_starts_again_with_each_window():
    admit = te.dynamic.AdmitAfter(2, window=5)
    plan = plan_of(dynamic=te.Dynamic(capacity=128, admit=admit))

    def admitted(now):
        tables, slots = start(plan)
        inserts = []
        for each in now:
            result = insert(tables, slots, plan, [5], now=each)
            tables, slots = result.tables, result.slots
            inserts.append(counts(result.stats["user"])["inserts"])
        return inserts

    assert admitted([9, 9]) == [0, 1]
    assert admitted([9, 10, 11]) == [0, 0, 1]


def ids_of_bucket(bucket, num_ids, num_buckets):
    """Returns ids that all belong to one bucket."""
    first = np.uint32(-(-bucket * 2**32 // num_buckets) + 5)
    words = unmix_ids(np.full(num_ids, first), np.arange(num_ids, dtype=np.uint32))
    return functional.Ids64(high=words[0], low=words[1]).to_numpy()


@pytest.mark.full
def test_more_ids_of_a_bucket_than_a_round_holds():
    dynamic = te.Dynamic(capacity=1024, admit=te.dynamic.AdmitAfter(2))
    plan = plan_of(2, dynamic, dim=4)
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


LEFT_OUT = {
    "mean": (dict(combiner="mean"), [[1, 2, 3]], [[0.0, -1.0, 0.5]], [3]),
    "ragged sequence": (
        dict(max_sequence_length=2),
        [[1, 2, 3], [4], [5, 6, 7, 8], []],
        None,
        [1, 2, 4, 5, 6],
    ),
}


@pytest.mark.parametrize("case", quick_cases(LEFT_OUT, "mean", every_case=True))
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


def test_nan_weight_of_a_new_id_reaches_the_activations():
    table = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=64), dim=4, name="user", combiner="mean"
    )
    plan = te.make_plan({"user": te.FeatureConfig(table=table)}, optimizer="sgd")
    ids = functional.Ids64.of_array(np.array([[1, 2]]))
    # Weights computed inside the step: on the host, `prepare` rejects NaN.
    features = {"user": te.DenseIds(ids=ids, weights=jnp.array([[jnp.nan, 1.0]]))}
    result = functional.insert_ids(*start(plan), features, plan)
    assert counts(result.stats["user"])["inserts"] == 2
    looked_up = functional.lookup(result.tables, result.features, plan)
    assert jnp.isnan(looked_up.activations["user"]).all()


class Model(nnx.Module):
    def __init__(self, plan):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 1, rngs=nnx.Rngs(1))

    def __call__(self, ids):
        return self.dense(self.embedding(ids)["user"])


def test_an_optimizer_of_another_model_is_rejected():
    class Others(nnx.Module):
        def __init__(self):
            table = te.TableConfig(vocabulary_size=10, dim=4, name="item")
            config = te.FeatureConfig(table=table)
            self.items = te.TPUEmbedding(config, "adagrad", rngs=nnx.Rngs(0))

    model = Model(plan_of())
    optimizer = te.Optimizer(Others(), optax.sgd(0.1))
    with rejects(ValueError):
        optimizer.insert_ids(model, {"user": words([5])})


@pytest.mark.full
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


def test_ids_that_jax_may_have_narrowed_are_rejected():
    plan = plan_of()
    tables, slots = start(plan)
    ids = {"user": np.array([3, 5])}
    for call in (
        lambda: functional.insert_ids(tables, slots, ids, plan),
        lambda: functional.lookup(tables, ids, plan),
        lambda: jax.jit(lambda x: functional.lookup(tables, x, plan).activations)(ids),
    ):
        with rejects(TypeError, fix="te.functional.Ids64.of_array"):
            call()


def test_ids_in_a_loss_say_what_to_do():
    model = Model(plan_of())
    ids = {"user": words(NASTY)}
    with rejects(TypeError, fix="optimizer.insert_ids(model, ids)"):
        te.value_and_grad(lambda m: jnp.sum(m(ids)))(model)
    plan = model.embedding.plan
    result = functional.lookup(model.embedding.tables.get_value(), ids, plan)
    with rejects(TypeError, fix="te.functional.insert_ids"):
        functional.compute_gradients(result.routing, result.activations, plan)


@pytest.mark.parametrize(
    "options, fix",
    [
        (dict(optimizer=te.optimizers.every_row(te.optimizers.adam(0.1))), "every_row"),
        (dict(default_id=0), "default_id"),
        (dict(dtype=jnp.int8), "int8"),
        (dict(initializer=jax.nn.initializers.lecun_normal()), "rowwise"),
    ],
)
def test_what_is_not_supported_is_rejected(options, fix):
    with rejects((ValueError, TypeError), fix=fix):
        plan_of(**options)


@pytest.mark.full
def test_a_new_id_inherits_nothing_of_a_broken_row():
    plan = packed_plan()
    tables, slots = start(plan)
    for first in (0, 1000):
        inserted = insert(tables, slots, plan, np.arange(first, first + 64))
        tables, slots = inserted.tables, inserted.slots
        result = functional.lookup(tables, inserted.features, plan)
        assert np.isfinite(result.activations["user"]).all()
        cotangents = {"user": jnp.full((64, 8), 1.0 if first else np.nan)}
        gradients = functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = functional.apply_gradients(tables, slots, gradients, plan)
    rows = functional.lookup(tables, inserted.features, plan).activations["user"]
    assert np.isfinite(rows).all()
