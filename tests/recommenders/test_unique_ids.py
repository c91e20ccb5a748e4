"""Unique ids of each device, their index and their attributes."""

import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

PADDING = te.inputs.PADDING_ROW_ID
NO_ID_64 = np.uint64(2**64 - 1)
LISTS = [[3, 3, 7], [], [7, 49, 3, 0, 1, 2, 8], [5], [3], [9, 9, 9], [1]]
CANDIDATES = np.array([7, 3, 3, 5, 11, 0, 1])
HISTORY = te.RaggedIds.from_lists(LISTS)


def plan_of(num_devices, **options):
    table = te.TableConfig(vocabulary_size=50, dim=4, name="item")
    feature = te.FeatureConfig(table=table, output_shape=(-1,), **options)
    return te.make_plan({"items": feature}, mesh_of(num_devices))


@pytest.mark.parametrize("offset", [0, 2**20, 2**40], ids=["near", "far", "wide"])
def test_each_device_has_its_ids_once(offset):
    values = HISTORY.values.astype(np.int64) * (1 if offset < 2**30 else 2**31) + offset
    ids = {
        "history": te.RaggedIds(values=values, row_splits=HISTORY.row_splits),
        "candidate": CANDIDATES * (1 if offset < 2**30 else 2**31) + offset,
    }
    found = te.inputs.unique_ids(ids, plan_of(3), "items", length=5)
    padding = NO_ID_64 if offset == 2**40 else PADDING
    of_devices = found.ids.reshape(3, found.size)
    for device, start in enumerate((0, 3, 6)):
        samples = range(start, min(start + 3, 7))
        of_device = of_devices[device]
        used = of_device[of_device != padding]
        assert np.all(np.diff(used.astype(np.int64)) > 0)
        for sample in samples:
            values = ids["history"].values[slice(*HISTORY.row_splits[sample:][:2])][:5]
            index = found.index["history"][sample]
            assert of_device[index[: len(values)]].tolist() == values.tolist()
            assert index[len(values) :].tolist() == [found.size] * (5 - len(values))
            place = found.index["candidate"][sample]
            assert of_device[place] == ids["candidate"][sample]


def test_sizes_settle_and_hold_every_batch():
    sizes, found = te.inputs.BufferSizes(), []
    random = np.random.default_rng(0)
    for largest in (5, 5, 49, 49, 49):
        ids = random.integers(0, largest, (8, 60))
        unique = te.inputs.unique_ids(ids, plan_of(2), "items", sizes)
        of_devices = unique.ids.reshape(2, -1)
        places = unique.index.reshape(2, -1)
        assert np.array_equal(
            np.take_along_axis(of_devices, places, 1), ids.reshape(2, -1)
        )
        found.append(unique.size)
    assert found[0] == found[1] < found[2] == found[4] < 240


def test_padding_and_the_attributes_of_ids():
    ids = np.array([[1, 1, PADDING], [5, 7, 1]])
    artists = np.array([[6, 6, 3], [PADDING, 3, 6]])
    unique = te.inputs.unique_ids(ids, plan_of(1), "items")
    assert unique.index.tolist() == [[0, 0, unique.size], [1, 2, 0]]
    found = unique.attribute_ids(artists).tolist()
    assert found == [6, PADDING, 3] + [PADDING] * (unique.size - 3)


def test_ids_outside_the_table_are_the_features_to_drop():
    ids = np.array([[1, 60, 2**40], [60, 70, 2]])
    plan = plan_of(1, out_of_range_ids="drop")
    unique = te.inputs.unique_ids(ids, plan, "items")
    batch = te.inputs.prepare_features({"items": unique.ids}, plan)
    kept = batch["items"][(batch["items"] >= 0) & (batch["items"] < 50)]
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ({"a": np.ones(2, int), "b": np.ones(3, int)}, "ids"),
        (np.array([0.5]), "ids"),
        ([[1, 2], [3]], None),
        (np.zeros((2, 3, 4), int), "ids"),
        (HISTORY, "length"),
    ],
)
def test_wrong_ids_are_rejected(ids, field):
    with rejects(field=field, fix="from_lists" if field is None else ""):
        te.inputs.unique_ids(ids, plan_of(1), "items")
    with rejects(field="feature", value="songs"):
        te.inputs.unique_ids(CANDIDATES, plan_of(1), "songs")
    unique = te.inputs.unique_ids(np.array([[1, 2], [3, 4]]), plan_of(1), "items")
    for wrong in (np.array([3, 4]), dict.fromkeys("ab", np.ones((2, 2), int))):
        with rejects(field="attributes"):
            unique.attribute_ids(wrong)
