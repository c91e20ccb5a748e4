"""Hashes equal the reference implementations' hashes, for every length."""

import json

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tests.rejections import rejects
from tpu_embedding.strings import fingerprints
from tpu_embedding.strings.fingerprints import encode, farmhash64, siphash64

GIVEN = json.loads((GOLDEN / "string_hashes.json").read_text())
LENGTHS, FARM, SIP = zip(*GIVEN["length, fingerprint64, siphash24"], strict=True)
KEY = tuple(GIVEN["key"])


TEXTS = [bytes((31 * n + 7 * i * i + i) % 256 for i in range(n)) for n in LENGTHS]


def test_the_vector_of_the_siphash_paper():
    key = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    assert siphash64(encode([bytes(range(15))]), key)[0] == 0xA129CA6149BE45E5


@pytest.mark.parametrize("num_strings", [0, 1, 7, 8, 9, 100, len(TEXTS)])
def test_hashes_of_every_length_class(monkeypatch, num_strings):
    if num_strings < len(TEXTS):  # Parts change no hash.
        monkeypatch.setattr(fingerprints, "_STRINGS_PER_PART", 8)
    strings = encode(TEXTS[:num_strings])
    assert farmhash64(strings).tolist() == list(FARM[:num_strings])
    assert siphash64(strings, KEY).tolist() == list(SIP[:num_strings])


WORDS = ["", "a", "movie", "user_12345678", "x" * 40, "y" * 100]
BYTES = [word.encode() for word in WORDS]
UNICODE = ["Amélie", "七人の侍", "plain"]
ENCODED = [word.encode() for word in UNICODE]
FORMS = {
    "U": (np.array(WORDS), BYTES),
    "S": (np.array(WORDS).astype("S"), BYTES),
    "object": (np.array(WORDS, object), BYTES),
    "list": (WORDS, BYTES),
    "mixed": ([*WORDS[:3], *BYTES[3:]], BYTES),
    "StringDType": (np.array(WORDS, np.dtypes.StringDType()), BYTES),
    "UTF-8": (UNICODE, ENCODED),
    "UTF-8 of an array": (np.array(UNICODE), ENCODED),
}


@pytest.mark.parametrize(("strings", "expected"), FORMS.values(), ids=FORMS)
def test_every_form_of_text_has_the_same_bytes(strings, expected):
    encoded = encode(strings)
    assert encoded.lengths.tolist() == list(map(len, expected))
    np.testing.assert_array_equal(farmhash64(encoded), farmhash64(encode(expected)))


def test_strings_equal_to_one():
    encoded = encode(["", "a", "ab", "b", "", "abc"])
    assert encoded.equal_to(b"").tolist() == [True, False, False, False, True, False]
    assert encoded.equal_to(b"ab").tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("value", [None, 1, 1.5, ["a"]])
def test_values_that_are_no_strings(value):
    with rejects(TypeError, field="Strings", value=value):
        encode(["a", value])
