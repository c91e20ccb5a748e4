"""Ids of 64 bits for dynamic tables, prepared from every form."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

NONE = 2**64 - 1
LAST = 2**31 - 1
IDS = [[5, 2**40 + 1], [2**63 - 1, LAST]]
TABLE = te.TableConfig(vocabulary_size=te.Dynamic(capacity=128), dim=4, name="user")


def prepare(ids, weights=None, **options):
    config = {"user": te.FeatureConfig(table=TABLE, **options)}
    plan = te.make_plan(config, mesh_of(2))
    loader_plan = pickle.loads(pickle.dumps(plan.for_loaders()))
    if weights is not None:
        weights = {"user": weights}
    return te.inputs.prepare_features({"user": ids}, loader_plan, weights)["user"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (np.array(IDS), IDS),
        (np.array(IDS, np.uint64), IDS),
        (IDS, IDS),
        (np.array([2**63, 2**64 - 2], np.uint64), [2**63, 2**64 - 2]),
        (np.array([-2, 3]), [2**64 - 2, 3]),
        (np.array([-2, LAST], np.int32), [2**64 - 2, NONE]),
        (np.array([2**32 - 1, LAST], np.uint32), [2**32 - 1, LAST]),
    ],
)
def test_dense_ids_keep_all_bits(ids, expected):
    assert prepare(ids).to_numpy().tolist() == expected


SPARSE = te.SparseIds(
    indices=np.array([[0, 0], [1, 1]]),
    values=np.array([2**40, 7]),
    dense_shape=np.array([2, 2]),
)


def test_ragged_and_sparse_ids_are_padded_with_no_id():
    for ids, expected in (([[2**40], [7, 8]], [2**40, 7, 8]), (SPARSE, [2**40, 7])):
        values = prepare(ids).values.to_numpy()
        assert values[values != NONE].tolist() == expected


def test_the_reserved_id_is_rejected_or_dropped():
    ids = np.array([-1, 4])
    with rejects(ValueError, fix="FeatureConfig.out_of_range_ids"):
        prepare(ids)
    prepared = prepare(ids, out_of_range_ids="drop")
    assert prepared.to_numpy().ravel().tolist() == [NONE, 4]


def test_clip_is_rejected():
    with rejects(ValueError, field="out_of_range_ids"):
        prepare(np.array([1, 2]), out_of_range_ids="clip")


CUT = jnp.asarray(np.array([2**40 + 7], np.uint64).astype(np.uint32))


@pytest.mark.parametrize(
    "ids",
    [
        CUT,
        CUT.astype(jnp.int32),
        (CUT,),
        [CUT, CUT],
        [[CUT[0]], [CUT[0], CUT[0]]],
        te.DenseIds(ids=CUT, weights=np.ones(1)),
        te.RaggedIds(values=CUT, row_splits=np.array([0, 1])),
        te.SparseIds(
            indices=np.zeros((1, 2), int), values=CUT, dense_shape=np.ones(2, int)
        ),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_ids_that_jax_has_cut_are_rejected_at_every_door(ids):
    for weights in (None, [[1.0]]):
        with rejects(TypeError, fix="np.asarray(ids)"):
            prepare(ids, weights)


def test_words_pass_and_known_rows_are_rejected():
    words = te.functional.Ids64.of_array(np.array([2**40, 7]))
    assert prepare(words).to_numpy().tolist() == [2**40, 7]
    dense = te.DenseIds(ids=words, weights=np.array([1.0, 2.0]))
    prepared = prepare(dense)
    assert prepared.ids.to_numpy().tolist() == [2**40, 7]
    with rejects(TypeError):
        prepare(te.functional.RowIds(np.array([1], np.int32)))


def test_fingerprints_of_strings_are_ids():
    strings = np.array([["a", "b"], ["a", "c" * 100]])
    words = prepare(te.inputs.fingerprint_ids(strings)).to_numpy()
    assert words[0, 0] == words[1, 0]
    assert len(set(words.ravel().tolist())) == 3
    ragged = prepare(te.inputs.fingerprint_ids([["b"], ["a", "b"]]))
    assert words[0, 1] in ragged.values.to_numpy()


def test_strings_are_rejected():
    for strings in (np.array(["a", "b"]), np.array(["a", 3], object)):
        with rejects(TypeError, fix="te.inputs.fingerprint_ids"):
            prepare(strings)
