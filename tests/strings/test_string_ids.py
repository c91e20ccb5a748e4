"""Ids of strings, by hashing and by vocabulary, in every container."""

import errno
import json
import os
import pickle
import resource
import types
from unittest.mock import Mock

import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects

PADDING = te.inputs.PADDING_ROW_ID


@pytest.mark.parametrize(
    ("strings", "num_buckets", "salt", "expected"),
    [
        # keras.layers.Hashing, from its documentation.
        (["A", "B", "C", "D", "E"], 3, None, [1, 0, 1, 1, 2]),
        (["A", "B", "C", "D", "E"], 3, (133, 137), [1, 2, 1, 0, 2]),
        (["A", "B", "C", "D", "E"], 3, 133, [0, 0, 2, 1, 0]),
        # tf.strings.to_hash_bucket_fast and to_hash_bucket_strong, from theirs.
        (["Hello", "TensorFlow", "2.x"], 3, None, [0, 2, 2]),
        (["Hello", "TF"], 3, [1, 2], [2, 0]),
    ],
)
def test_hashes_are_those_of_keras_and_tensorflow(strings, num_buckets, salt, expected):
    ids = te.inputs.hash_ids(strings, num_buckets, salt=salt)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected


def test_integers_are_hashed_as_their_digits():
    numbers = [0, 7, -12, 2**63 - 1, -(2**63)]
    expected = te.inputs.hash_ids([str(n) for n in numbers], 1000).tolist()
    assert te.inputs.hash_ids(numbers, 1000).tolist() == expected
    assert te.inputs.hash_ids(np.array([0, 7], np.int8), 1000).tolist() == expected[:2]
    large = np.array([2**64 - 1], np.uint64)
    assert te.inputs.hash_ids(large, 1000) == te.inputs.hash_ids([str(2**64 - 1)], 1000)


def test_strings_in_deep_lists_keep_their_bytes_and_types():
    # NumPy would strip the zero byte, and make a string of the number.
    flat = te.inputs.hash_ids([b"a\x00", b"bbbb"], 1000).tolist()
    deep = te.inputs.hash_ids([[[b"a\x00"], [b"bbbb"]]], 1000)
    assert deep.tolist() == [[[flat[0]], [flat[1]]]]
    with rejects(TypeError):
        te.inputs.hash_ids([[["a"], [1]]], 1000)


LOOKUPS = {
    "hash": lambda strings: te.inputs.hash_ids(strings, 1000),
    "vocabulary": te.inputs.Vocabulary(["a", "b", "c"], num_oov_buckets=2).ids,
}


@pytest.mark.parametrize("ids_of", LOOKUPS.values(), ids=LOOKUPS)
def test_containers_keep_their_structure(ids_of):
    a, b, c = ids_of(["a", "b", "c"]).tolist()
    assert ids_of([["a", "b"], ["c", "a"]]).tolist() == [[a, b], [c, a]]
    assert ids_of(np.array([["a"], ["b"]])).tolist() == [[a], [b]]
    assert ids_of(np.array("a")).tolist() == a
    assert ids_of([]).tolist() == []
    uneven = ids_of([["a"], [], ["b", "c"]])
    assert uneven.values.tolist() == [a, b, c]
    assert uneven.row_splits.tolist() == [0, 1, 1, 3]
    weights = np.ones(2)
    ragged = ids_of(te.RaggedIds(values=["a", "b"], row_splits=[0, 2], weights=weights))
    assert ragged.values.tolist() == [a, b] and ragged.weights is weights
    sparse = ids_of(
        te.SparseIds(
            indices=[[0, 1], [1, 0]],
            values=np.array([b"a", b"c"]),
            dense_shape=[2, 2],
            weights=weights,
        )
    )
    assert sparse.values.tolist() == [a, c] and sparse.weights is weights
    assert sparse.indices.tolist() == [[0, 1], [1, 0]]
    dense = ids_of(te.DenseIds(ids=["a"], weights=weights))
    assert isinstance(dense, te.DenseIds) and dense.ids.tolist() == [a]
    assert dense.weights is weights
    strings = np.array([b"a"], object)
    tensor = types.SimpleNamespace(values=strings, row_splits=np.array([0, 0, 1]))
    assert ids_of(tensor).values.tolist() == [a]
    nothing = te.RaggedIds(values=[], row_splits=[0, 0])
    assert ids_of(nothing).values.dtype == np.int32


@pytest.mark.parametrize("padding", ["", b""])
def test_padding_of_hashes(padding):
    strings = np.array([["a", ""], ["", "b"]])
    ids = te.inputs.hash_ids(strings, 1000, padding=padding)
    assert (ids == PADDING).tolist() == [[False, True], [True, False]]
    assert ids[0, 0] == te.inputs.hash_ids(["a"], 1000)[0]
    assert te.inputs.hash_ids([0, 5], 10, padding=0)[0] == PADDING


def test_vocabulary_numbers_as_keras_string_lookup():
    # Expected ids from the documentation of keras.layers.StringLookup.
    vocabulary = te.inputs.Vocabulary(["a", "b", "c", "d"])
    assert vocabulary.ids([["a", "c", "d"], ["d", "z", "b"]]).tolist() == [
        [1, 3, 4],
        [4, 0, 2],
    ]
    two = te.inputs.Vocabulary(["a", "b", "c", "d"], num_oov_buckets=2)
    assert two.ids([["a", "c", "d"], ["m", "z", "b"]]).tolist() == [
        [2, 4, 5],
        [0, 1, 3],
    ]
    assert (vocabulary.vocabulary_size, two.vocabulary_size) == (5, 6)


def test_mask_token_takes_id_0_and_looks_up_nothing():
    vocabulary = te.inputs.Vocabulary(["a", "b"], mask_token="")
    assert vocabulary.ids(["", "a", "b", "z"]).tolist() == [PADDING, 2, 3, 1]
    assert vocabulary.ids([b"", b"b"]).tolist() == [PADDING, 3]
    assert vocabulary.vocabulary_size == 4


def test_vocabulary_of_a_file(tmp_path):
    path = tmp_path / "genres.txt"
    path.write_bytes("\ufeffcomedy\r\nfilm noir\nAmélie\n".encode())
    vocabulary = te.inputs.Vocabulary.from_file(path)
    assert vocabulary.tokens == ("comedy", "film noir", "Amélie")
    assert vocabulary.ids(["Amélie", "film noir", "x"]).tolist() == [3, 2, 0]
    assert len(vocabulary) == 3
    copied = pickle.loads(pickle.dumps(vocabulary))
    assert copied.ids(["comedy", "x"]).tolist() == [1, 0]


def test_files_that_keras_wrote_begin_with_special_tokens(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("\n[UNK]\n[UNK]\na\nb")
    vocabulary = te.inputs.Vocabulary.from_file(path, num_oov_buckets=2, mask_token="")
    assert vocabulary.tokens == ("a", "b")
    assert vocabulary.ids(["a"]).tolist() == [3]


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        (b"a\nb\na\n", "tokens", "a"),
        (b"a\n\nb\n", "token 1", ""),
        (b"a\nAm\xe9lie\n", "a vocabulary", b"\xe9"),
    ],
    ids=["twice", "empty line", "latin 1"],
)
def test_wrong_vocabulary_files(tmp_path, content, field, value):
    path = tmp_path / "genres.txt"
    path.write_bytes(content)
    with rejects(field=field, value=value, fix=str(path)):
        te.inputs.Vocabulary.from_file(path)


HUGE = ["a", "x" * 10**7]
WRONG_CALLS = {
    "buckets": (lambda: te.inputs.hash_ids(["a"], 0), ValueError, "num_buckets"),
    "salt": (lambda: te.inputs.hash_ids(["a"], 2, salt=-1), ValueError, "salt"),
    "floats": (lambda: te.inputs.hash_ids([1.5], 2), TypeError, "hash_ids"),
    "no string": (lambda: TWO.ids(["a", 3.5, "b"]), TypeError, "Strings"),
    "one string": (lambda: te.inputs.Vocabulary("ab"), TypeError, "tokens"),
    "oov": (
        lambda: te.inputs.Vocabulary("ab", num_oov_buckets=-1),
        *(ValueError, "num_oov_buckets"),
    ),
    "numbers": (lambda: TWO.ids(np.array([17])), TypeError, "Vocabulary.ids"),
    "unknown without buckets": (
        lambda: te.inputs.Vocabulary(["a"], num_oov_buckets=0).ids(["a", "x", "y"]),
        *(ValueError, "strings"),
    ),
    "white space": (
        lambda: te.inputs.Vocabulary(["u0 "], strip_whitespace=True),
        *(ValueError, "token 0"),
    ),
    # Strings of megabytes are not hashed.
    "huge": (lambda: te.inputs.fingerprint_ids(HUGE), ValueError, "Strings to hash"),
    "huge to hash": (
        lambda: te.inputs.hash_ids(HUGE, 9),
        *(ValueError, "Strings to hash"),
    ),
    "huge and salt": (
        lambda: te.inputs.hash_ids(HUGE, 9, salt=1),
        *(ValueError, "Strings to hash"),
    ),
    "huge in buckets": (
        lambda: te.inputs.Vocabulary(["a"], num_oov_buckets=2).ids(HUGE),
        *(ValueError, "Strings to hash"),
    ),
}
TWO = te.inputs.Vocabulary(["a", "b"])


@pytest.mark.parametrize(
    ("call", "kind", "field"), WRONG_CALLS.values(), ids=WRONG_CALLS
)
def test_wrong_calls(call, kind, field):
    with rejects(kind, field=field):
        call()


VOCABULARIES = {
    "plain": te.inputs.Vocabulary(["a", "é\n", '"']),
    "mask and buckets": te.inputs.Vocabulary(
        ["a", "[UNK]", "b"], num_oov_buckets=2, mask_token=""
    ),
    "nothing unknown": te.inputs.Vocabulary(["3", "-4"], num_oov_buckets=0),
    "strips": te.inputs.Vocabulary(["a"], mask_token="", strip_whitespace=True),
    "own token": te.inputs.Vocabulary(["[UNK]", "b"], oov_token="<unknown>"),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_saved_vocabulary_gives_the_same_ids(vocabulary, tmp_path):
    vocabulary.save(tmp_path / "tokens.json")
    loaded = te.inputs.Vocabulary.load(tmp_path / "tokens.json")
    assert repr(loaded) == repr(vocabulary)
    assert loaded.tokens == vocabulary.tokens
    strings = list(vocabulary.tokens)
    if vocabulary.num_oov_buckets:
        strings += ["x", "y", "", "[UNK]", " a\t", b"a "]
    assert loaded.ids(strings).tolist() == vocabulary.ids(strings).tolist()
    assert loaded.vocabulary_size == vocabulary.vocabulary_size
    listed = json.loads((tmp_path / "tokens.json").read_text())["tokens"]
    assert listed[vocabulary.ids([strings[0]])[0]] == strings[0]


def test_integers_stand_for_their_digits_if_tokens_are_numbers():
    vocabulary = te.inputs.Vocabulary(["b", "17", "-3"])
    assert vocabulary.ids([[17, -3], [4, 17]]).tolist() == [[2, 3], [0, 2]]


def test_white_space_is_stripped_by_choice():
    tokens = ["u0", "é"]
    vocabulary = te.inputs.Vocabulary(
        tokens, num_oov_buckets=2, mask_token="", strip_whitespace=True
    )
    spaced = [" u0", "u0\t", "\u00a0é\u3000", "  ", " x ", b"u0 ", "é\u3000".encode()]
    plain = ["u0", "u0", "é", "", "x", b"u0", "é".encode()]
    assert vocabulary.ids(spaced).tolist() == vocabulary.ids(plain).tolist()
    assert vocabulary.ids([b" \xff "]).tolist() == vocabulary.ids([b"\xff"]).tolist()
    exact = te.inputs.Vocabulary(tokens)
    assert exact.ids([" u0", b"u0", "u0"]).tolist() == [0, 1, 1]


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file(failing, tmp_path, monkeypatch):
    path = tmp_path / "tokens.json"
    old = te.inputs.Vocabulary(["a", "b"])
    old.save(path)
    if failing == "write":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    else:
        error = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
    try:
        with rejects(OSError, fix=str(path)):
            te.inputs.Vocabulary(map(str, range(10_000))).save(path)
    finally:
        if failing == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert te.inputs.Vocabulary.load(path).tokens == old.tokens
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


def test_one_bucket_needs_no_hash():
    assert te.inputs.Vocabulary(["a"]).ids(["x" * 10**7]).tolist() == [0]
