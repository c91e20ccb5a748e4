"""Dumps of dynamicemb become dynamic tables: files as its ranks write them."""

import json

import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import import_tables, open_tables

DIM, NUM_KEYS, NUM_RANKS = 4, 90, 3


def dumped():
    random = np.random.default_rng(0)
    keys = random.integers(-(2**62), 2**62, NUM_KEYS)
    values = random.normal(size=(NUM_KEYS, DIM)).astype(np.float32)
    slots = random.random((NUM_KEYS, 2 * DIM)).astype(np.float32)
    return keys, values, slots


def write(directory, scores=None, slots=None, item="emb_opt_values", **described):
    """Writes the files of one table; keys go to the ranks as dynamicemb deals them."""
    path = directory / "model.embeddings"
    path.mkdir(parents=True)
    keys, values, _ = dumped()
    files = {"emb_keys": keys, "emb_values": values}
    if scores is not None:
        files["emb_scores"] = np.asarray(scores, np.int64)
    if slots is not None:
        files[item] = slots
    for rank in range(NUM_RANKS):
        is_own = keys % NUM_RANKS == rank
        for name, array in files.items():
            file = path / f"user_{name}.rank_{rank}.world_size_{NUM_RANKS}"
            file.write_bytes(array[is_own].tobytes())
    if described:
        (path / "user_opt_args.json").write_text(json.dumps(described, indent=4))
    return path


def make(rule, num_devices=1, dim=DIM, capacity=640):
    table = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=capacity), dim=dim, name="user"
    )
    layer = te.TPUEmbedding(
        {"user": te.FeatureConfig(table=table)},
        rule,
        mesh=mesh_of(num_devices),
        rngs=nnx.Rngs(0),
    )
    return layer, te.Optimizer(layer, optax.sgd(0.1))


def imported(layer, optimizer):
    """Returns rows, slots and directory in the order of the dumped keys."""
    keys, _, _ = dumped()
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    at = np.searchsorted(found.ids, keys.view(np.uint64))
    np.testing.assert_array_equal(found.ids[at], keys.view(np.uint64))
    slots = optimizer.slot_values()["user"]
    return (
        np.asarray(layer(layer.prepare({"user": keys}))["user"]),
        {name: array[found.rows[at]] for name, array in slots.items()},
        found.last_used[at],
        found.counts[at],
    )


ADAM = {"opt_type": "adam", "evict_strategy": "EvictStrategy.KCustomized"}


@pytest.mark.parametrize("num_devices", [1, 8])
def test_keys_values_slots_and_steps(tmp_path, num_devices):
    _, values, slots = dumped()
    steps = np.arange(NUM_KEYS) % 7 + 3
    write(tmp_path, scores=steps, slots=slots, step_score=12, **ADAM)
    layer, optimizer = make(te.optimizers.adam(0.1), num_devices)
    report = import_tables(tmp_path, layer, optimizer)
    assert report.slots == {"user": {"momenta": "m", "velocities": "v"}}
    rows, found, last_used, counts = imported(layer, optimizer)
    np.testing.assert_array_equal(rows, values)
    np.testing.assert_array_equal(found["momenta"], slots[:, :DIM])
    np.testing.assert_array_equal(found["velocities"], slots[:, DIM:])
    np.testing.assert_array_equal(last_used, steps)
    assert set(counts) == {1}
    (directory,) = [v for k, v in layer.tables.get_value().items() if ":" in k]
    assert set(np.asarray(directory.clock)) == {13}


RULES = {
    "exact_adagrad": (te.optimizers.adagrad(0.1), slice(0, DIM)),
    "exact_row_wise_adagrad": (te.optimizers.rowwise_adagrad(0.1), slice(0, 1)),
}


@pytest.mark.parametrize("opt_type", RULES)
def test_accumulators_of_either_version(tmp_path, opt_type):
    rule, columns = RULES[opt_type]
    slots = dumped()[2][:, columns]
    item = "emb_opt_values" if opt_type == "exact_adagrad" else "opt_values"
    write(tmp_path, slots=slots, item=item, opt_type=opt_type)
    layer, optimizer = make(rule)
    import_tables(tmp_path, layer, optimizer)
    _, found, last_used, _ = imported(layer, optimizer)
    np.testing.assert_array_equal(found["accumulators"].reshape(NUM_KEYS, -1), slots)
    # Without scores, all were just used.
    assert set(last_used) == {1}


def test_scores_of_other_policies(tmp_path):
    seconds = np.arange(NUM_KEYS) % 5
    write(
        tmp_path / "lru",
        scores=seconds * 10**9 + 17,
        opt_type="sgd",
        evict_strategy="EvictStrategy.KLru",
    )
    uses = np.arange(NUM_KEYS) + 2**40 * (np.arange(NUM_KEYS) == 3)
    write(
        tmp_path / "lfu",
        scores=uses,
        opt_type="sgd",
        evict_strategy="EvictStrategy.KLfu",
    )
    layer, optimizer = make(te.optimizers.sgd(0.1))
    import_tables(tmp_path / "lru", layer, optimizer)
    _, _, last_used, counts = imported(layer, optimizer)
    np.testing.assert_array_equal(last_used, 5 - seconds)
    import_tables(tmp_path / "lfu", layer, optimizer)
    _, _, last_used, counts = imported(layer, optimizer)
    np.testing.assert_array_equal(counts, np.minimum(uses, 2**32 - 1))
    assert len(set(last_used)) == 1


def test_the_last_used_ids_stay(tmp_path):
    write(tmp_path, scores=np.arange(NUM_KEYS), step_score=100, **ADAM)
    layer, optimizer = make(te.optimizers.sgd(0.1), capacity=64)
    report = import_tables(tmp_path, layer, optimizer, rows="shared")
    assert report.without_place == {"user": NUM_KEYS - 64}
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    assert set(found.ids) == set(dumped()[0][-64:].view(np.uint64))


def test_two_collections_may_have_a_table_of_one_name(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert open_tables(tmp_path).tables.keys() == {
        f"{x}/model.embeddings/user" for x in "ab"
    }
    (name,) = open_tables(tmp_path / "a").tables
    assert name == "user"


def rename_all(path):
    for file in list(path.glob("*rank_1*")):
        file.rename(file.with_name(file.name.replace("size_3", "size_2")))


def cut(item, size):
    def damage(path):
        file = path / f"user_{item}.rank_1.world_size_3"
        file.write_bytes(file.read_bytes()[:-size])

    return damage


def repeat_key(path):
    first, second = (path / f"user_emb_keys.rank_{i}.world_size_3" for i in (0, 1))
    keys = np.fromfile(second, np.int64)
    keys[0] = np.fromfile(first, np.int64)[0]
    keys.tofile(second)


def reserve_key(path):
    file = path / "user_emb_keys.rank_0.world_size_3"
    keys = np.fromfile(file, np.int64)
    keys[2] = -1
    keys.tofile(file)


DAMAGES = [
    (lambda p: (p / "user_emb_values.rank_2.world_size_3").unlink(), "are missing"),
    (lambda p: [x.unlink() for x in p.glob("*values*")], "must be beside the keys"),
    (rename_all, "must be of one job, got files of 2 and of 3 ranks|of 3 and of 2"),
    (cut("emb_keys", 3), "multiple of 8 bytes, got"),
    (cut("emb_keys", 8), "numbers for each of the .* keys of its rank, got"),
    (cut("emb_values", 8), "numbers for each of the .* keys of its rank, got"),
    (cut("emb_scores", 8), "numbers for each of the .* keys of its rank, got"),
    (repeat_key, "ids must be distinct, got"),
    (reserve_key, r"must not be 2\*\*64 - 1 .* got it for row 2 and 1 rows"),
    (lambda p: (p / "user_opt_args.json").write_text("{"), "must be JSON, got"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_dumps(tmp_path, damage, message):
    damage(write(tmp_path, scores=np.arange(NUM_KEYS), step_score=12, **ADAM))
    with pytest.raises(CheckpointError, match=message):
        open_tables(tmp_path)


def test_another_dim_is_refused(tmp_path):
    write(tmp_path)
    layer, optimizer = make(te.optimizers.sgd(0.1), dim=8)
    with pytest.raises(CheckpointError, match="has dim 4, the model 8"):
        import_tables(tmp_path, layer, optimizer)
