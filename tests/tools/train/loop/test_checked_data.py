"""Tests the checks of batches that depend on earlier batches; see test_cli_refusals."""

import dataclasses
import pathlib
import re

import numpy as np
import pytest

from tpu_embedding.tools.data.batch_part import slice_batch
from tpu_embedding.tools.train import Batch, DataError, RunConfig, load_config
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset, open_data

CONFIG = load_config("synthetic")
SIZE = 3


class Clicks:
    """Batches of three samples; `changes` maps a step to other fields of its batch."""

    batch_size = SIZE

    def __init__(self, changes=None, evaluation=()):
        self.changes = changes or {}
        self.evaluation = evaluation

    def train_batch(self, step):
        return dataclasses.replace(batch(), **self.changes.get(step, {}))

    def evaluation_batches(self):
        yield from self.evaluation


def batch(**fields):
    return Batch(
        **{
            "features": {"user": np.arange(SIZE)},
            "labels": [0, 1, True],
            "weights": np.ones(SIZE, bool),
            **fields,
        }
    )


def checked(loss="log_loss", **arguments) -> CheckedDataset:
    config: RunConfig = dataclasses.replace(
        CONFIG, batch_size=SIZE, loss=loss, target=None
    )
    return CheckedDataset(Clicks(**arguments), config)


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A source of a user, who may keep files elsewhere."""

    given: list = dataclasses.field(default_factory=list)

    def open(self, data_dir, *, batch_size, seed):
        self.given.append(data_dir)
        return Clicks()


@pytest.mark.parametrize(
    ("data_dir", "opened"),
    [
        ("~/clicks", pathlib.Path.home() / "clicks"),
        (pathlib.Path("clicks"), pathlib.Path("clicks")),
        ("gs://bucket/clicks", "gs://bucket/clicks"),
        (["day_0", "day_1"], ["day_0", "day_1"]),
        (None, None),
    ],
)
def test_paths_of_this_machine_are_read_and_others_passed_on(data_dir, opened):
    source = Recorder()
    open_data(
        dataclasses.replace(CONFIG, data=source, batch_size=SIZE, target=None), data_dir
    )
    assert source.given == [opened]


@pytest.mark.parametrize("data_dir", ["gs://bucket/clicks", ["day_0", "day_1"]])
@pytest.mark.parametrize("name", ["movielens", "dlrm", "dlrm_dcnv2"])
def test_sources_of_the_package_read_files_of_this_machine(name, data_dir):
    with pytest.raises(DataError, match=re.escape(f"{data_dir} is missing on this")):
        open_data(load_config(name), data_dir)


def test_numbers_become_float32():
    data = checked(changes={0: {"dense": np.ones((SIZE, 2), np.int64)}})
    for array in (
        data.first_batch.labels,
        data.first_batch.weights,
        data.first_batch.dense,
    ):
        assert array.dtype == np.float32
    assert data.first_batch.labels.tolist() == [0.0, 1.0, 1.0]


def inputs(**changes):
    times = np.arange(SIZE * 2).reshape(SIZE, 2)
    return {"dense": {"times": times, "prices": [0.5] * SIZE} | changes}


def test_dense_inputs_with_names_keep_their_integers_and_shapes():
    dense = checked(changes={0: inputs()}).first_batch.dense
    assert dense["times"].dtype == np.int32
    assert dense["times"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert dense["prices"].dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {0: inputs()},
            r"train_batch\(1\): dense must be a dict of \['prices', 'times'\], as in",
        ),
        (
            {0: inputs(), 1: inputs(times=np.ones((SIZE, 3), int))},
            r"dense\['times'\] must be an array .* \[3, 2\], got shape \[3, 3\]",
        ),
        (
            {0: inputs(), 1: inputs(times=np.ones((SIZE, 2)))},
            r"dense\['times'\] must hold integers, as in the first batch, got floats",
        ),
        (
            {0: inputs(), 1: inputs(times=np.full((SIZE, 2), 2**31))},
            r"dense\['times'\] must fit into int32, got values from 2147483648",
        ),
        (
            {0: inputs(), 1: inputs(prices=[0.5, np.nan, 1])},
            r"dense\['prices'\] must be finite, got nan for sample 1, and 1 such",
        ),
        ({1: {"dense": np.ones((SIZE, 2))}}, r"dense must be None, as in the first"),
        (
            {0: {"dense": np.ones((SIZE, 2))}},
            r"train_batch\(1\): dense must be an array .* \[3, 2\], got None",
        ),
        (
            {0: {"dense": np.ones((SIZE, 2))}, 1: {"dense": np.ones((SIZE, 1))}},
            r"dense must be an array of numbers of shape \[3, 2\], got shape \[3, 1\]",
        ),
        (
            {1: {"labels": [0.5, 1.5, 0]}},
            r"Clicks.train_batch\(1\): labels must lie in",
        ),
        ({1: {"labels": [[0], [1, 2], 0]}}, "got rows of different lengths"),
        (
            {1: {"labels": [0, -1, 2], "origin": "line {}".format}},
            r"got -1 for sample 1 \(line 1\), and 2 such values in all",
        ),
    ],
)
def test_a_later_batch_differs(changes, message):
    data = checked(changes=changes)
    with pytest.raises(DataError, match=message):
        data.train_batch(1)


def test_range_of_labels_is_that_of_the_loss():
    data = checked("squared_error", changes={1: {"labels": [-7, 0, 5]}})
    assert data.train_batch(1).labels.tolist() == [-7, 0, 5]
    data = checked("squared_error", changes={1: {"labels": [np.inf, 0, 5]}})
    with pytest.raises(DataError, match="labels must be finite, got inf for sample 0"):
        data.train_batch(1)


def test_held_out_batches_are_checked_one_by_one():
    data = checked(
        evaluation=[batch(), batch(weights=[1, 0, 0]), batch(labels=[9] * 3)]
    )
    batches = data.evaluation_batches()
    assert next(batches).weights.tolist() == [1, 1, 1]
    assert next(batches).weights.tolist() == [1, 0, 0]
    with pytest.raises(
        DataError, match=r"Batch 2 of Clicks.evaluation_batches\(\): la"
    ):
        next(batches)


class ClicksByPart(Clicks):
    """Also returns parts of its batches, of which `changes` may damage one."""

    def train_part(self, step, samples):
        whole = batch(origin=lambda i: f"line {samples.start + i + 1}")
        part = slice_batch(dataclasses.replace(whole, origin=None), samples)
        changes = self.changes.get(step, {})
        return dataclasses.replace(part, origin=whole.origin, **changes)


def checked_by_part(**arguments) -> CheckedDataset:
    config = dataclasses.replace(CONFIG, batch_size=SIZE, target=None)
    return CheckedDataset(ClicksByPart(**arguments), config)


@pytest.mark.parametrize("make", [checked, checked_by_part])
def test_part_of_a_batch_equals_its_slice(make):
    data = make()
    part = data.train_part(0, range(1, 3))
    assert part.features["user"].tolist() == [1, 2]
    assert part.labels.tolist() == [1.0, 1.0]
    assert part.labels.dtype == np.float32
    assert data.train_part(0, range(SIZE)).labels.shape == (SIZE,)


def test_part_of_weight_zero_is_accepted():
    data = checked_by_part(changes={1: {"weights": [0, 0]}})
    assert data.train_part(1, range(2)).weights.tolist() == [0.0, 0.0]


def test_error_of_a_part_names_the_place_in_the_whole_batch():
    data = checked_by_part(changes={1: {"labels": [0, 7]}})
    with pytest.raises(DataError, match=r"got 7 for sample 2 \(line 3\)"):
        data.train_part(1, range(1, 3))


def test_part_of_another_size_is_refused():
    data = checked_by_part(changes={1: {"labels": [0, 1, 0]}})
    with pytest.raises(DataError, match=r"labels must be .* of shape \[2\]"):
        data.train_part(1, range(1, 3))
