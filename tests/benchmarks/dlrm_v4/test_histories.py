"""Tests histories of events against a run of MLPerf's reference, and Yambda's files."""

import dataclasses
import functools

import numpy as np
import pytest
from histories import CROSSES, EventDataset, HistorySettings, YambdaSource, xxh64
from yambda import ALBUM_FILE, ARTIST_FILE, EVENT_COLUMNS, EventLog, read_yambda

from tests.benchmarks.dlrm_v4 import FULL
from tests.benchmarks.dlrm_v4.golden_runs import golden, under
from tpu_embedding.tools.train import DataError, load_config

TABLE_SIZES = load_config(FULL).data.table_sizes
PIPELINE = golden("data_pipeline")


def golden_columns():
    return {name: PIPELINE[f"log.{name}"] for name in EVENT_COLUMNS}


@functools.cache
def golden_log():
    return EventLog.of_columns(
        golden_columns(),
        item_artists=PIPELINE["map.item_to_artist"],
        item_albums=PIPELINE["map.item_to_album"],
        name="golden",
    )


def data_of(history, batch_size=6, whole_window="first"):
    source = YambdaSource(
        table_sizes=TABLE_SIZES, history=history, whole_window=whole_window
    )
    return EventDataset(golden_log(), source, batch_size=batch_size)


def golden_history(variant):
    names = ("history_length", "min_history", "scan_window")
    return HistorySettings(**{n: int(PIPELINE[f"{variant}/{n}"]) for n in names})


@pytest.mark.parametrize("variant", ["benchmark", "short_scan"])
def test_samples_are_those_of_the_reference(variant):
    samples = data_of(golden_history(variant))
    wanted, found = (
        under(PIPELINE, f"{variant}/"),
        {"anchor_positions": samples.anchors},
    )
    batch = samples.read(samples.anchors)
    found["history_lengths"] = lengths = batch.dense["history_length"]
    for name in ("item", "artist", "album"):
        ids = batch.features[f"{name}_id"]
        candidate = "" if name == "item" else f"{name}_"
        found[f"history.{name}_id"] = ids["history"].values
        found[f"candidate.item_candidate_{candidate}id"] = ids["candidate"]
        np.testing.assert_array_equal(np.diff(ids["history"].row_splits), lengths)
    is_event = np.arange(samples.history_length) < lengths[:, None]
    for name in ("action_weight", "action_timestamp"):
        padded = batch.dense[name]
        found[f"history.{name}"] = padded[is_event]
        assert not padded[~is_event].any() and padded.dtype == np.int32
    contextual = [batch.features[name] for name in ("uid", *CROSSES)]
    found["contextual_ids"] = np.stack(contextual, axis=1)
    found["candidate.item_query_time"] = batch.dense["query_time"]
    found["candidate.item_action_weight"] = batch.labels
    for name, array in found.items():
        np.testing.assert_array_equal(array, wanted[name], name)


@pytest.mark.parametrize("variant", ["benchmark", "short_scan"])
def test_windows_are_those_of_the_reference(variant):
    data = data_of(golden_history(variant))
    anchors = PIPELINE[f"{variant}/anchor_positions"]
    anchors = anchors[PIPELINE[f"{variant}/window_anchors"]]
    *sizes, num_held_out = PIPELINE[f"{variant}/window_sizes"].tolist()
    np.testing.assert_array_equal(data.evaluation_anchors, anchors[-num_held_out:])
    starts = np.cumsum([0, *sizes])
    steps = [
        anchors[start + 6 * i : start + 6 * i + 6]
        for start, size in zip(starts, sizes, strict=False)
        for i in range(size // 6)
    ]
    assert data.num_train_samples == 6 * len(steps)
    for step, expected in enumerate([*steps, steps[0]]):
        batch, part = data.train_batch(step), data.train_part(step, range(2, 5))
        for field in ("query_time", "action_timestamp"):
            wanted = data.read(expected).dense[field]
            np.testing.assert_array_equal(batch.dense[field], wanted)
            np.testing.assert_array_equal(part.dense[field], wanted[2:5])
    weights = np.concatenate([batch.weights for batch in data.evaluation_batches()])
    assert weights.sum() == data.num_evaluation_samples == num_held_out
    whole = data_of(golden_history(variant), whole_window="last")
    times = golden_log().times[whole.evaluation_anchors]
    assert times.max() - times.min() < 86_400


def test_hashes_are_those_of_the_library():
    for number in ("2", "3"):
        keys = PIPELINE[f"hash.keys{number}"].T
        expected = PIPELINE[f"hash.xxh64_seed0_keys{number}"]
        np.testing.assert_array_equal(xxh64(list(keys)), expected)


def write_files(directory, **changes):
    """Writes the golden log in the published form, with words for types."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = golden_columns()
    words = np.array(["listen", "like", "dislike", "unlike", "undislike"])
    ratios = columns["played_ratio_pct"]
    columns["played_ratio_pct"] = pa.array(ratios, mask=np.isnan(ratios))
    columns["event_type"] = pa.array(words[columns["event_type"]]).dictionary_encode()
    table = pa.table(columns | changes)
    path = directory / "multi_event.parquet"
    pq.write_table(table, path, row_group_size=64)
    for name, column in ((ARTIST_FILE, "artist"), (ALBUM_FILE, "album")):
        items, values = PIPELINE[f"map.{column}_item"], PIPELINE[f"map.{column}_id"]
        table = pa.table({f"{column}_id": values, "item_id": items})
        pq.write_table(table, directory / name, row_group_size=20)
    return path


def test_files_hold_the_log(tmp_path):
    write_files(tmp_path)
    directory = tmp_path / "flat" / "50m"
    directory.mkdir(parents=True)
    (tmp_path / "multi_event.parquet").rename(directory / "multi_event.parquet")
    log = read_yambda(directory)
    for field in dataclasses.fields(EventLog):
        if field.name != "name":
            found, expected = (getattr(x, field.name) for x in (log, golden_log()))
            np.testing.assert_array_equal(found, expected, strict=True)


def test_the_source_reads_files(tmp_path):
    write_files(tmp_path)
    history = HistorySettings(history_length=9, min_history=3)
    source = YambdaSource(table_sizes=TABLE_SIZES, history=history)
    data = source.open(tmp_path, batch_size=6, seed=0)
    outline = source.outline(batch_size=6, seed=0)
    assert outline.table_sizes == data.table_sizes
    assert outline.history_length == data.history_length == 9
    small = dataclasses.replace(source, table_sizes={**TABLE_SIZES, "item_id": 10})
    with pytest.raises(DataError, match="'item_id' of 10"):
        small.open(tmp_path, batch_size=6, seed=0)
