"""CRC-32C against a loop over bits."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tpu_embedding.checkpoint.imports import crc32c as module
from tpu_embedding.checkpoint.imports.crc32c import crc32c, unmask


def bit_by_bit(data):
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 127, 128, 129, 255, 256, 1001, 8192])
def test_equals_the_loop(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert crc32c(data) == bit_by_bit(data.tolist())
    assert crc32c(data.tobytes()) == crc32c(data)


@hypothesis.given(st.binary(max_size=600), st.integers(0, 600))
@hypothesis.settings(max_examples=50)
def test_continues_a_checksum(data, middle):
    assert crc32c(data[middle:], crc32c(data[:middle])) == bit_by_bit(data)


def test_blocks_are_joined(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 300)
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    assert crc32c(data) == bit_by_bit(data.tolist())


def test_takes_any_dtype():
    data = np.arange(100, dtype=np.float32).reshape(10, 10)
    assert crc32c(data) == bit_by_bit(data.tobytes())


def test_known_values():
    # RFC 3720, B.4.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes([0xFF] * 32)) == 0x62A8AB43
    # The masked form of LevelDB.
    assert unmask(
        ((0x8A9136AA >> 15 | 0x8A9136AA << 17) + 0xA282EAD8) & 0xFFFFFFFF
    ) == (0x8A9136AA)
