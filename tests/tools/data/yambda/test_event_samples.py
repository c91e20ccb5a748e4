"""Tests anchors, histories and crossed ids against runs of MLPerf's reference."""

import functools

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_log import (
    LIKED,
    LISTENED,
    SKIPPED,
    EventColumns,
    EventLog,
)
from tpu_embedding.tools.data.yambda.event_samples import (
    BENCHMARK_TABLE_SIZES,
    CONTEXTUAL_FEATURES,
    EventSamples,
    HistorySettings,
)

VARIANTS = ("benchmark", "short_scan", "no_minimum")


@functools.cache
def golden():
    with np.load(GOLDEN / "dlrm_v4" / "data_pipeline.npz") as arrays:
        return {name: arrays[name] for name in arrays}


def golden_actions():
    arrays = golden()
    is_listen = arrays["log.event_type"] == 0
    is_heard = is_listen & (arrays["log.played_ratio_pct"] >= 50)
    actions = np.where(is_heard, LISTENED, np.where(is_listen, SKIPPED, 0))
    return np.where(arrays["log.event_type"] == 1, LIKED, actions)


@functools.cache
def golden_log():
    arrays = golden()
    return EventLog.of_columns(
        EventColumns(
            users=arrays["log.uid"],
            times=arrays["log.timestamp"],
            items=arrays["log.item_id"],
            actions=golden_actions(),
            is_organic=arrays["log.is_organic"],
        ),
        item_artists=arrays["map.item_to_artist"],
        item_albums=arrays["map.item_to_album"],
        name="golden",
    )


@functools.cache
def golden_samples(variant):
    arrays = golden()
    names = ("history_length", "min_history", "scan_window")
    settings = {name: int(arrays[f"{variant}/{name}"]) for name in names}
    # The reference counts the contextual tokens and the candidate, too.
    max_kept = int(arrays[f"{variant}/max_seq_len"]) - len(CONTEXTUAL_FEATURES) - 1
    return EventSamples(
        golden_log(), settings=HistorySettings(**settings, max_kept=max_kept)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_are_those_of_the_reference(variant):
    arrays = golden()
    samples = golden_samples(variant)
    prefix = f"{variant}/"
    expected = {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
    np.testing.assert_array_equal(samples.anchors, expected["anchor_positions"])
    batch = samples.read(samples.anchors)
    features = batch["features"]
    width = samples.settings.width
    lengths = expected["history_lengths"]
    np.testing.assert_array_equal(batch["history_length"], lengths)
    is_event = np.arange(width) < lengths[:, None]
    for name, candidate in (
        ("item_id", "item_candidate_id"),
        ("artist_id", "item_candidate_artist_id"),
        ("album_id", "item_candidate_album_id"),
    ):
        history = features[name]["history"]
        np.testing.assert_array_equal(history.values, expected[f"history.{name}"])
        np.testing.assert_array_equal(np.diff(history.row_splits), lengths)
        np.testing.assert_array_equal(
            features[name]["candidate"], expected[f"candidate.{candidate}"]
        )
        assert features[name]["candidate"].dtype == history.values.dtype == np.int32
    for name in ("action_weight", "action_timestamp"):
        assert batch[name].shape == (len(lengths), width)
        np.testing.assert_array_equal(
            batch[name][is_event], expected[f"history.{name}"]
        )
        assert not batch[name][~is_event].any()
    contextual = [features[name] for name in CONTEXTUAL_FEATURES]
    np.testing.assert_array_equal(
        np.stack(contextual, axis=1), expected["contextual_ids"]
    )
    np.testing.assert_array_equal(
        batch["query_time"], expected["candidate.item_query_time"]
    )
    np.testing.assert_array_equal(
        batch["label"], expected["candidate.item_action_weight"]
    )
    for name, array in batch.items():
        if name != "features":
            assert array.dtype == (np.float32 if name == "label" else np.int32)
    assert features.keys() == BENCHMARK_TABLE_SIZES.keys()


def test_the_tables_are_those_of_the_reference():
    arrays = golden()
    rows = zip(arrays["cross.names"], arrays["cross.rows"], strict=True)
    assert [BENCHMARK_TABLE_SIZES[name] for name, _ in rows] == (
        arrays["cross.rows"].tolist()
    )
    assert sum(BENCHMARK_TABLE_SIZES.values()) == 293_051_712


def brute_history(log, anchor, settings):
    """Returns the history of an anchor by a loop over the events before it."""
    user = np.searchsorted(log.user_bounds, anchor, side="right") - 1
    first = max(log.user_bounds[user], anchor - settings.scan_window)
    left = dict.fromkeys((LISTENED, LIKED, SKIPPED), settings.history_length // 3)
    history = []
    for event in range(anchor - 1, first - 1, -1):
        if left.get(log.actions[event], 0):
            left[log.actions[event]] -= 1
            history.append(event)
    return history[: settings.max_kept][::-1]


def random_log(seed, num_users=4, num_events=120, actions=(0, 1, 1, 2, 4)):
    """Returns a log with many events of one user at one time."""
    generator = np.random.default_rng(seed)
    times = generator.integers(0, 40, num_events) * 5
    return EventLog.of_columns(
        EventColumns(
            users=np.append(generator.integers(0, num_users, num_events), 99),
            times=np.append(times, 200_000),
            items=np.append(np.arange(num_events), 0),
            actions=np.append(generator.choice(actions, num_events), 0),
            is_organic=np.zeros(num_events + 1, np.uint8),
        ),
        item_artists=np.zeros(1, np.int32),
        item_albums=np.zeros(1, np.int32),
        name="random",
    )


HISTORIES = {
    "usual": ({}, {}),
    "scan_of_one_event": ({"scan_window": 1}, {}),
    "one_event_per_action": ({"history_length": 5}, {}),
    "longer_than_any": ({"history_length": 3_000, "scan_window": 2**31 - 2}, {}),
    "cut": ({"max_kept": 4}, {}),
    "no_likes": ({}, {"actions": (1, 4, 0)}),
    "listens_only": ({}, {"actions": (1,)}),
    "one_user": ({"min_history": 50}, {"num_users": 1}),
    "a_user_per_event": ({"min_history": 0}, {"num_users": 10**6}),
}


@pytest.mark.parametrize(
    ("settings", "sizes"), HISTORIES.values(), ids=HISTORIES.keys()
)
def test_histories_are_those_of_a_loop(settings, sizes):
    defaults = {"history_length": 18, "min_history": 3, "scan_window": 20}
    settings = HistorySettings(**(defaults | settings))
    lengths = set()
    for seed in range(5):
        log = random_log(seed, **sizes)
        samples = EventSamples(log, settings=settings)
        expected = [
            event
            for event, action in enumerate(log.actions)
            if action in (LISTENED, SKIPPED)
            and event - log.user_bounds[log.user_bounds <= event][-1]
            >= settings.min_history
        ]
        assert samples.anchors.tolist() == expected
        anchors = samples.anchors[::-1].astype(np.int64)  # An order of the caller's.
        histories = samples.histories(anchors)
        for anchor, first, stop in zip(
            anchors, histories.row_splits[:-1], histories.row_splits[1:], strict=True
        ):
            assert histories.events[first:stop].tolist() == brute_history(
                log, anchor, settings
            )
            lengths.add(int(stop - first))
    assert max(lengths) <= settings.width
    if settings.min_history == 0:
        assert lengths == {0}


def test_a_full_history_and_none():
    log = random_log(0, num_users=1, actions=(1, 2, 4))
    settings = HistorySettings(history_length=9, min_history=0, scan_window=100)
    samples = EventSamples(log, settings=settings)
    batch = samples.read(samples.anchors[[-1, 0]])
    assert batch["history_length"][0] == settings.width == 9
    np.testing.assert_array_equal(
        batch["query_time"][0], batch["action_timestamp"][0, -1]
    )
    empty = EventSamples(
        random_log(0, num_users=10**6, actions=(1,)), settings=settings
    )
    batch = empty.read(empty.anchors[:2])
    assert batch["history_length"].tolist() == [0, 0]
    assert not batch["action_weight"].any()
    np.testing.assert_array_equal(
        batch["query_time"], empty.log.times[empty.anchors[:2]]
    )
    assert empty.read(empty.anchors[:0])["action_weight"].shape == (0, 9)


def test_users_without_an_anchor_have_no_sample():
    log = golden_log()
    counts = np.diff(log.user_bounds)
    settings = HistorySettings(history_length=9, min_history=int(counts.max()) - 30)
    samples = EventSamples(log, settings=settings)
    assert set(samples.contextual_ids(samples.anchors.astype(int))["uid"]) < set(
        log.users
    )
    with pytest.raises(DataError, match="a listen with 400 earlier .* lower Hist"):
        EventSamples(log, settings=HistorySettings(min_history=400))


def test_ids_outside_of_their_tables_are_refused():
    log = golden_log()
    sizes = dict(BENCHMARK_TABLE_SIZES)
    settings = HistorySettings(min_history=0)
    sizes |= {"item_id": 59, "uid": 40, "artist_id": 17}
    message = (
        r"golden: each id .* got table 'uid' of 40 rows, id 40; table 'item_id' of 59 "
        r"rows, id 59\. Set table_sizes to the largest id plus 1, or YambdaSource.has_d"
    )
    with pytest.raises(DataError, match=message):
        EventSamples(log, table_sizes=sizes, settings=settings)
    dense = EventSamples(log.with_dense_ids(), table_sizes=sizes, settings=settings)
    raw = EventSamples(log, settings=settings)
    np.testing.assert_array_equal(dense.anchors, raw.anchors)
    for sizes, message in (
        ({"item_id": 5}, r"table_sizes must name the tables \['album_id', "),
        (BENCHMARK_TABLE_SIZES | {"uid": 0}, r"table_sizes\['uid'\] must .* got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            EventSamples(log, table_sizes=sizes)


SETTINGS = {
    "short": ({"history_length": 2}, "history_length must be an int of at least 3"),
    "negative": ({"min_history": -1}, "min_history must be an int of at least 0"),
    "no_scan": ({"scan_window": 0}, "scan_window must be an int of at least 1"),
    "wide_scan": ({"scan_window": 2**31}, "scan_window must be at most 2147483646"),
    "nothing_kept": ({"max_kept": 0}, "max_kept must be an int of at least 1"),
}


@pytest.mark.parametrize(("fields", "message"), SETTINGS.values(), ids=SETTINGS.keys())
def test_wrong_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        HistorySettings(**fields)
