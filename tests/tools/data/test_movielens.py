"""Tests the reader of MovieLens-100K on small files, and the real ones if present."""

import numpy as np
import pytest

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.movielens import NUM_RATINGS, MovieLens
from tpu_embedding.types import PADDING_ROW_ID

USERS = (
    "1|24|M|writer|85711\n2|17|F|other|94043\n3|56|M|other|32067\n4|18|F|writer|43537\n"
)
MOVIES = (
    "1|Amélie (2001)|01-Jan-1995||http://a|0|1|1\n"
    "2|Heat (1995)|01-Jan-1995||http://b|0|0|1\n"
    "3|unknown||||1|0|0\n"
    "4|No genre|01-Jan-1995||http://d|0|0|0\n"
    "5|Unrated|01-Jan-1995||http://e|1|0|0\n"
)
TRAIN = [
    (1, 1, 5),
    (1, 2, 3),
    (1, 3, 4),
    (1, 4, 2),
    (2, 2, 4),
    (2, 4, 1),
    (3, 1, 2),
]
TEST = [(1, 5, 3), (2, 1, 5), (4, 3, 1)]


def ratings_text(ratings):
    return "".join(f"{u}\t{m}\t{r}\t874965758\n" for u, m, r in ratings)


def history_ids(ratings):
    return {NUM_RATINGS * (m - 1) + r - 1 for _, m, r in ratings}


FILES = {
    "u.user": USERS,
    "u.item": MOVIES,
    "u.genre": "unknown|0\nAction|1\nDrama|2\n\n",
    "u.occupation": "other\nwriter\n",
    "u1.base": ratings_text(TRAIN),
    "u1.test": ratings_text(TEST),
}


@pytest.fixture
def directory(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    return tmp_path


def dataset(directory, **options):
    return MovieLens(directory, **({"batch_size": 4} | options))


def histories(batch):
    history = batch.features["history"]
    return np.split(history.values, history.row_splits[1:-1])


def samples(batch):
    """Returns (user, movie, rating) of each sample, numbered as in the files."""
    return [
        (int(u) + 1, int(m) + 1, int(r))
        for u, m, r in zip(
            batch.features["user"], batch.features["movie"], batch.labels, strict=True
        )
    ]


def assert_same_batch(actual, expected):
    for name, ids in expected.features.items():
        if name == "history":
            np.testing.assert_array_equal(actual.features[name].values, ids.values)
            np.testing.assert_array_equal(
                actual.features[name].row_splits, ids.row_splits
            )
        else:
            np.testing.assert_array_equal(actual.features[name], ids)
    np.testing.assert_array_equal(actual.labels, expected.labels)
    np.testing.assert_array_equal(actual.weights, expected.weights)


def test_facts_of_the_files(directory):
    data = dataset(directory)
    assert data.vocabulary_sizes == {
        "user": 4,
        "movie": 5,
        "age": 7,
        "gender": 2,
        "occupation": 2,
        "genres": 3,
        "history": 25,
    }
    assert (data.num_train_samples, data.num_test_samples) == (7, 3)
    assert data.max_genres == 2
    assert data.mean_rating == pytest.approx(21 / 7)


def test_features_follow_user_and_movie(directory):
    (batch,) = dataset(directory, batch_size=3).evaluation_batches()
    features = batch.features
    assert samples(batch) == TEST
    assert features["age"].tolist() == [1, 0, 1]
    assert features["gender"].tolist() == [1, 0, 0]
    assert features["occupation"].tolist() == [1, 0, 1]
    assert features["genres"].tolist() == [
        [0, PADDING_ROW_ID],
        [1, 2],
        [0, PADDING_ROW_ID],
    ]


def test_movie_without_genre_is_all_padding(directory):
    (directory / "u1.test").write_text(ratings_text([(3, 4, 1)]))
    (batch,) = dataset(directory, batch_size=1).evaluation_batches()
    assert batch.features["genres"].tolist() == [[PADDING_ROW_ID] * 2]


@pytest.mark.parametrize("age, bucket", [(0, 0), (17, 0), (18, 1), (55, 5), (56, 6)])
def test_age_buckets_begin_where_they_say(directory, age, bucket):
    (directory / "u.user").write_text(USERS.replace("|24|", f"|{age}|"))
    (batch,) = dataset(directory, batch_size=3).evaluation_batches()
    assert batch.features["age"][0] == bucket


def test_dtypes_and_shapes(directory):
    data = dataset(directory)
    for batch in [data.train_batch(0), *data.evaluation_batches()]:
        shapes = {
            name: ids.shape
            for name, ids in batch.features.items()
            if name not in ("genres", "history")
        }
        assert set(shapes.values()) == {(4,)}
        assert batch.features["genres"].shape == (4, 2)
        history = batch.features["history"]
        assert history.row_splits.shape == (5,)
        assert history.row_splits[-1] == len(history.values)
        for ids in [
            *(ids for name, ids in batch.features.items() if name != "history"),
            history.values,
            history.row_splits,
        ]:
            assert ids.dtype == np.int32
        assert batch.labels.dtype == batch.weights.dtype == np.float32
        assert batch.dense is None


@pytest.mark.parametrize("batch_size", [1, 3, 7, 16])
def test_each_epoch_uses_each_sample_once(directory, batch_size):
    data = dataset(directory, batch_size=batch_size)
    stream = [s for step in range(21) for s in samples(data.train_batch(step))]
    epochs = [stream[i : i + 7] for i in range(0, 21, 7)]
    assert all(sorted(epoch) == TRAIN for epoch in epochs)
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


def test_training_batches_are_full(directory):
    data = dataset(directory)
    for step in range(5):
        assert data.train_batch(step).weights.tolist() == [1.0] * 4


@pytest.mark.parametrize("max_history", [None, 1, 2])
def test_batch_is_a_function_of_seed_and_step(directory, max_history):
    first = dataset(directory, max_history=max_history)
    expected = [first.train_batch(step) for step in range(6)]
    resumed = dataset(directory, max_history=max_history)
    for step in (5, 0, 3, 5):
        assert_same_batch(resumed.train_batch(step), expected[step])


def test_seed_changes_the_order(directory):
    orders = {
        tuple(samples(dataset(directory, batch_size=7, seed=seed).train_batch(0)))
        for seed in range(5)
    }
    assert len(orders) > 1


def test_history_of_training_leaves_out_its_own_rating(directory):
    data = dataset(directory)
    for step in range(7):
        batch = data.train_batch(step)
        for sample, history in zip(samples(batch), histories(batch), strict=True):
            others = [s for s in TRAIN if s[0] == sample[0] and s != sample]
            assert len(history) == len(others)
            assert set(history.tolist()) == history_ids(others)


def test_history_of_evaluation_is_all_of_the_training_file(directory):
    (batch,) = dataset(directory, batch_size=3).evaluation_batches()
    for sample, history in zip(samples(batch), histories(batch), strict=True):
        rated = [s for s in TRAIN if s[0] == sample[0]]
        assert len(history) == len(rated)
        assert set(history.tolist()) == history_ids(rated)
    assert len(histories(batch)[2]) == 0  # User 4 has no training rating.


def test_max_history_takes_each_part_of_that_size(directory):
    data = dataset(directory, max_history=2)
    seen = {sample: set() for sample in TRAIN}
    for step in range(200):
        batch = data.train_batch(step)
        for sample, history in zip(samples(batch), histories(batch), strict=True):
            others = [s for s in TRAIN if s[0] == sample[0] and s != sample]
            ids = set(history.tolist())
            assert len(history) == len(ids) == min(2, len(others))
            assert ids <= history_ids(others)
            seen[sample] |= ids
    for sample, ids in seen.items():
        others = [s for s in TRAIN if s[0] == sample[0] and s != sample]
        assert ids == history_ids(others)


def test_max_history_bounds_evaluation(directory):
    (batch,) = dataset(directory, batch_size=3, max_history=3).evaluation_batches()
    assert [len(history) for history in histories(batch)] == [3, 2, 0]
    assert set(histories(batch)[0].tolist()) <= history_ids(TRAIN[:4])


@pytest.mark.parametrize(
    "batch_size, weights",
    [
        (1, [[1], [1], [1]]),
        (2, [[1, 1], [1, 0]]),
        (3, [[1, 1, 1]]),
        (5, [[1, 1, 1, 0, 0]]),
    ],
)
def test_evaluation_yields_each_sample_once(directory, batch_size, weights):
    batches = list(dataset(directory, batch_size=batch_size).evaluation_batches())
    assert [batch.weights.tolist() for batch in batches] == weights
    counted = [
        sample
        for batch in batches
        for sample, weight in zip(samples(batch), batch.weights, strict=True)
        if weight
    ]
    assert counted == TEST


def test_ids_need_not_be_consecutive(directory):
    for name, user in [("u.user", "2|17|"), ("u1.base", "2\t"), ("u1.test", "2\t")]:
        text = (directory / name).read_text()
        text = text.replace(f"\n{user}", f"\n70{user}")
        (directory / name).write_text(text)
    data = dataset(directory, batch_size=3)
    assert data.vocabulary_sizes["user"] == 4
    (batch,) = data.evaluation_batches()
    assert batch.features["user"].tolist() == [0, 1, 3]


def test_windows_line_ends_are_read(directory):
    for name, text in FILES.items():
        (directory / name).write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    (batch,) = dataset(directory, batch_size=3).evaluation_batches()
    assert samples(batch) == TEST


# Case: (file, text to replace, replacement, pattern of the expected message).
DAMAGES = {
    "user line short": ("u.user", "|85711", "", r"u\.user, line 1: expected 5 fields"),
    "movie line long": ("u.item", "http://b", "x|y", r"u\.item, line 2.*got 9"),
    "genre line short": ("u.genre", "Action|1", "Action", r"u\.genre, line 2"),
    "blank line": ("u.user", "\n2|", "\n\n2|", r"u\.user, line 2.*got 1"),
    "train by spaces": ("u1.base", "1\t2\t3\t", "1 2 3 ", r"u1\.base, line 2.*got 1"),
    "user not a number": ("u.user", "3|56", "x|56", r"line 3: user must be an integer"),
    "age not a number": ("u.user", "|24|", "|24.5|", r"line 1: age.*'24\.5'"),
    "negative age": ("u.user", "|24|", "|-24|", r"line 1: age.*'-24'"),
    "movie not a number": ("u.item", "3|unk", "3a|unk", r"line 3: movie .*'3a'"),
    "rating not a number": ("u1.base", "\t3\t87", "\t3.5\t87", r"line 2: rating"),
    "timestamp not a number": ("u1.test", "874965758\n2", "now\n2", r"line 1: time"),
    "int() would take it": ("u1.base", "3\t4\t8", "3\t0_4\t8", r"line 3.*'0_4'"),
    "rating 0": ("u1.base", "2\t2\t4", "2\t2\t0", r"base, line 5: rating.*got 0"),
    "rating 6": ("u1.test", "1\t5\t3", "1\t5\t6", r"test, line 1: rating.*got 6"),
    "unknown user": ("u1.base", "3\t1\t2", "9\t1\t2", r"line 7: unknown user '9'"),
    "unknown movie": ("u1.test", "4\t3\t1", "4\t8\t1", r"line 3: unknown movie '8'"),
    "unknown occupation": ("u.user", "writer|4", "spy|4", r"line 4: unknown occ.*spy"),
    "unknown gender": ("u.user", "|F|other", "|f|other", r"line 2: gender.*'f'"),
    "genre flag": ("u.item", "http://b|0|0|1", "http://b|0|2|1", r"genre 1.*'2'"),
    "genre numbers": ("u.genre", "Drama|2", "Drama|3", r"line 3.*expected 2, got 3"),
    "genre twice": ("u.genre", "Drama", "Action", r"line 3: genre 'Action'.*line 2"),
    "occupation twice": ("u.occupation", "writer", "other", r"line 2: occupation"),
    "user twice": ("u.user", "4|18", "2|18", r"line 4: user '2'.*first on line 2"),
    "movie twice": ("u.item", "4|No", "3|No", r"line 4: movie '3'.*first on line 3"),
    "rating twice": ("u1.base", "1\t3\t4", "1\t2\t4", r"line 3: user 1 rates movie 2"),
    "test in train": ("u1.test", "2\t1\t5", "2\t2\t5", r"u1\.test, line 2.*u1\.base"),
}


@pytest.mark.parametrize("case", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named_with_its_line(directory, case):
    name, old, new, message = case
    damaged = FILES[name].replace(old, new, 1)
    assert damaged != FILES[name]
    (directory / name).write_bytes(damaged.encode("latin-1"))
    with pytest.raises(DataError, match=message):
        dataset(directory)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_says_where_to_get_it(directory, name):
    (directory / name).unlink()
    with pytest.raises(DataError, match=rf"{name} is missing.*GroupLens, ml-100k"):
        dataset(directory)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file_is_refused(directory, name, text):
    (directory / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is empty"):
        dataset(directory)


@pytest.mark.parametrize(
    "field, value", [("batch_size", 0), ("seed", -1), ("max_history", 0)]
)
def test_bad_arguments_are_named(directory, field, value):
    with pytest.raises(ValueError, match=rf"{field} .*got {value}"):
        dataset(directory, **{field: value})


def test_all_bad_arguments_are_named_at_once(directory):
    with pytest.raises(ValueError, match="batch_size.*seed.*max_history"):
        dataset(directory, batch_size=0, seed=-1, max_history=0)


def test_real_files(movielens_dir):
    data = MovieLens(movielens_dir, batch_size=1000)
    assert data.vocabulary_sizes == {
        "user": 943,
        "movie": 1682,
        "age": 7,
        "gender": 2,
        "occupation": 21,
        "genres": 19,
        "history": 8410,
    }
    assert (data.num_train_samples, data.num_test_samples) == (80_000, 20_000)
    assert data.mean_rating == pytest.approx(3.52835)
    batch = data.train_batch(0)
    sizes = np.bincount(data._train.users)
    np.testing.assert_array_equal(
        np.diff(batch.features["history"].row_splits),
        sizes[batch.features["user"]] - 1,
    )
    assert sum(batch.weights.sum() for batch in data.evaluation_batches()) == 20_000
