"""The wire format of protocol buffers."""

import hypothesis
import hypothesis.strategies as st
import pytest

from tpu_embedding.checkpoint.imports.protobuf import fields, packed_integers, varint


@hypothesis.given(st.integers(0, 2**64 - 1))
@hypothesis.settings(max_examples=50)
def test_integers_round_trip(value):
    data, rest = b"", value
    while rest >= 0x80:
        data += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    data += bytes([rest])
    assert varint(b"\xff" + data + b"\x01", 1) == (value, 1 + len(data))
    assert packed_integers(data * 3) == [value] * 3


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", []),
        (b"\x0d\x01\0\0\0", [(1, 1)]),
        (b"\x09\x02\0\0\0\0\0\0\0", [(1, 2)]),
        (b"\x12\0\x12\1x", [(2, b""), (2, b"x")]),
    ],
)
def test_fields(message, expected):
    assert list(fields(message)) == expected


@pytest.mark.parametrize(
    "message", [b"\x08", b"\x12\x05ab", b"\x0d\x01", b"\x0b", b"\xff" * 11]
)
def test_refuses_other_bytes(message):
    with pytest.raises(ValueError, match="truncated|no integer|wire type"):
        list(fields(message))
