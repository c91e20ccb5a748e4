"""Hashes equal those of the reference implementations, for every length."""

import json

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tpu_embedding.strings import fingerprints
from tpu_embedding.strings.fingerprints import encode, farmhash64

GIVEN = json.loads((GOLDEN / "string_hashes.json").read_text())
LENGTHS, FARM, _ = zip(*GIVEN["length, fingerprint64, siphash24"], strict=True)


def text(n):
    return bytes((31 * n + 7 * i * i + i) % 256 for i in range(n))


TEXTS = [text(n) for n in LENGTHS]


def test_hashes_of_every_length_class():
    assert farmhash64(encode(TEXTS)).tolist() == list(FARM)


@pytest.mark.parametrize("num_strings", [0, 1, 7, 8, 9, 100])
def test_parts_change_no_hash(monkeypatch, num_strings):
    monkeypatch.setattr(fingerprints, "_STRINGS_PER_PART", 8)
    strings = encode(TEXTS[:num_strings])
    assert farmhash64(strings).tolist() == list(FARM[:num_strings])


WORDS = ["", "a", "movie", "user_12345678", "x" * 40, "y" * 100]


@pytest.mark.parametrize(
    "strings",
    [
        WORDS,
        np.array(WORDS),
        np.array(WORDS).astype("S"),
        np.array(WORDS, object),
        [word.encode() for word in WORDS],
        [*WORDS[:3], *(word.encode() for word in WORDS[3:])],
        np.array(WORDS, np.dtypes.StringDType()),
    ],
    ids=["list", "U", "S", "object", "bytes", "mixed", "StringDType"],
)
def test_every_form_of_text_has_the_same_bytes(strings):
    encoded = encode(strings)
    assert encoded.lengths.tolist() == [len(word) for word in WORDS]
    expected = farmhash64(encode(WORDS))
    np.testing.assert_array_equal(farmhash64(encoded), expected)


@pytest.mark.parametrize("form", [list, np.array])
def test_text_is_encoded_as_utf8(form):
    words = ["Amélie", "七人の侍", "plain"]
    encoded = [word.encode() for word in words]
    np.testing.assert_array_equal(
        farmhash64(encode(form(words))), farmhash64(encode(encoded))
    )


def test_strings_equal_to_one():
    encoded = encode(["", "a", "ab", "b", "", "abc"])
    assert encoded.equal_to(b"").tolist() == [True, False, False, False, True, False]
    assert encoded.equal_to(b"ab").tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("value", [None, 1, 1.5, ["a"]])
def test_values_that_are_no_strings(value):
    with pytest.raises(TypeError, match="got .* at 1"):
        encode(["a", value])
