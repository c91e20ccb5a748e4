"""Tests the order of events, their time split and their new ids."""

import numpy as np
import pytest

from tests.tools.data.yambda.test_event_samples import golden, golden_log
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_log import (
    LIKED,
    LISTENED,
    SKIPPED,
    EventColumns,
    EventLog,
    TimeSplit,
)

SESSION_GAP = 1_800


def test_the_split_is_that_of_the_reference():
    arrays = golden()
    times = arrays["log.timestamp"].astype(int)
    split = TimeSplit.of_last_time(int(times.max()))
    for name, period in (("train", split.train), ("test", split.test)):
        assert period.start == arrays[f"split.{name}_start"]
        assert period.stop == arrays[f"split.{name}_end"]
        count = sum(time in period for time in times.tolist())
        assert count == arrays[f"split.num_{name}_events"]


def test_the_order_is_that_of_the_reference():
    arrays, log = golden(), golden_log()
    users = np.repeat(log.users, np.diff(log.user_bounds))
    for name, values in (
        ("uid", users),
        ("item_ids", log.items),
        ("timestamps", log.times),
        ("is_organic", log.is_organic),
        ("is_listen_plus", log.actions == LISTENED),
        ("is_like", log.actions == LIKED),
        ("is_skip", log.actions == SKIPPED),
        ("unique_uids", log.users),
        ("user_start", by_id(log.users, log.user_bounds[:-1])),
        ("user_end", by_id(log.users, log.user_bounds[1:])),
    ):
        np.testing.assert_array_equal(values, arrays[f"flat.{name}"], name)
    is_listen = np.isin(log.actions, (LISTENED, SKIPPED))
    np.testing.assert_array_equal(is_listen, arrays["flat.event_types"] == 0)
    np.testing.assert_array_equal(log.item_artists, arrays["map.item_to_artist"])
    np.testing.assert_array_equal(log.item_albums, arrays["map.item_to_album"])
    popularity = np.bincount(log.items, minlength=len(log.item_artists))
    np.testing.assert_array_equal(popularity, arrays["item_popularity"])
    # Sessions end at gaps of more than half an hour. They follow from the order.
    starts = np.append(True, np.diff(log.times) > SESSION_GAP)
    starts[log.user_bounds[:-1]] = True
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, len(starts)))
    np.testing.assert_array_equal(users[first], arrays["sessions.uid"])
    np.testing.assert_array_equal(lengths, arrays["sessions.length"])


def by_id(ids, values):
    """Returns the values at the places of their ids, and -1 elsewhere."""
    array = np.full(ids.max() + 1, -1)
    array[ids] = values
    return array


def columns(**changes):
    """Returns events of two users. The last one is two days behind the others."""
    arrays = {
        "users": [7, 3, 7, 3, 7, 3],
        "times": [10, 20, 10, 10, 5, 200_000],
        "items": [0, 1, 2, 3, 4, 5],
        "actions": [1, 2, 4, 0, 1, 1],
        "is_organic": [1, 0, 0, 1, 0, 1],
    }
    return EventColumns(
        **{name: np.array(array) for name, array in (arrays | changes).items()}
    )


def make_log(columns, **changes):
    maps = {"item_artists": np.array([9, 0, 5]), "item_albums": np.array([4])}
    return EventLog.of_columns(columns, **(maps | changes), name="events")


def test_events_of_one_time_keep_their_order():
    log = make_log(columns())
    assert log.users.tolist() == [3, 7]
    assert log.user_bounds.tolist() == [0, 2, 5]
    assert log.items.tolist() == [3, 1, 4, 0, 2]
    assert log.times.tolist() == [10, 20, 5, 10, 10]
    assert log.actions.tolist() == [0, 2, 1, 1, 4]
    assert log.is_organic.tolist() == [1, 0, 0, 1, 0]
    # Items behind the maps have no artist and no album.
    assert log.item_artists.tolist() == [9, 0, 5, 0, 0]
    assert log.item_albums.tolist() == [4, 0, 0, 0, 0]
    assert {a.dtype for a in (log.users, log.times, log.items)} == {np.dtype(np.int32)}
    order = np.random.default_rng(0).permutation(5_000)
    users, times = order % 3, order // 3 % 2
    log = make_log(
        columns(
            users=np.append(users, 0),
            times=np.append(times, 200_000),
            items=np.arange(5_001),
            actions=np.ones(5_001),
            is_organic=np.ones(5_001),
        )
    )
    expected = sorted(range(5_000), key=lambda event: (users[event], times[event]))
    assert log.items.tolist() == expected


def test_new_ids_leave_no_number_out():
    log = make_log(columns(items=[80, 1, 2, 80, 5, 5]))
    dense = log.with_dense_ids()
    assert dense.users.tolist() == [0, 1]
    assert log.items.tolist() == [80, 1, 5, 80, 2]
    assert dense.items.tolist() == [3, 0, 2, 3, 1]
    assert dense.item_artists.tolist() == [0, 1, 0, 0]
    assert dense.item_albums.tolist() == [0, 0, 0, 0]
    known = make_log(columns(), item_artists=np.array([7, 3, 7, 3, 9]))
    assert known.with_dense_ids().item_artists.tolist() == [2, 1, 2, 1, 3]
    np.testing.assert_array_equal(dense.times, log.times)


@pytest.mark.parametrize("num_events", [0, 1])
def test_a_log_without_training_events_is_refused(num_events):
    events = EventColumns(**{k: v[:num_events] for k, v in vars(columns()).items()})
    with pytest.raises(
        DataError, match=f"events must have an event .* of {num_events}"
    ):
        make_log(events)


def test_large_ids_of_items_are_refused_before_arrays_of_their_size_are_made():
    with pytest.raises(
        DataError, match="items must be at most 268435455, got 268435456"
    ):
        make_log(columns(items=[80, 1, 2**28, 80, 5, 5]))
