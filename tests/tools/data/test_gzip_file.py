"""Tests random access to packed text, and the damages of gzip files."""

import gzip
import pickle

import numpy as np
import pytest

from tpu_embedding.tools.data import gzip_file
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.gzip_file import GzipFile

NOISE = np.random.default_rng(0).integers(0, 64, 50_000, np.uint8).tobytes()
TEXTS = {
    "one_byte": b"x",
    "repeated": b"abc\n" * 30_000,
    "noise": NOISE,
    "long_then_noise": b"a" * 200_000 + NOISE,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(gzip_file, "SPACING", 10_000)
    monkeypatch.setattr(gzip_file, "NUM_SEGMENTS", 2)
    monkeypatch.setattr(gzip_file, "_CHUNK_BYTES", 1_000)
    monkeypatch.setattr(gzip_file, "_MAX_TEXT_BYTES", 5_000)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_any_piece_of_the_text(tmp_path, text, members):
    path = tmp_path / "text.gz"
    pieces = [text[i::members] for i in range(members)]
    path.write_bytes(b"".join(map(gzip.compress, pieces)) + b"\0" * 2_000)
    text = b"".join(pieces)
    file = GzipFile(path)
    assert file.num_bytes == len(text)
    assert file.read(0, len(text)).tobytes() == text
    random = np.random.default_rng(1)
    file = pickle.loads(pickle.dumps(file))
    for _ in range(20):
        start, stop = np.sort(random.integers(0, len(text) + 1, 2))
        if start < stop:
            assert file.read(int(start), int(stop)).tobytes() == text[start:stop]


PACKED = gzip.compress(NOISE)
DAMAGED = {
    "no_end": (PACKED[:-1_000], "text.gz is truncated: .* no end after 4.,... bytes"),
    "no_checksum": (PACKED[:-8], "is truncated"),
    "half_a_checksum": (PACKED[:-2], "is truncated"),
    "header_alone": (PACKED[:5], "is truncated: .* no end after 0 bytes"),
    "second_member": (PACKED + PACKED[:500], "truncated: .* after 50,..."),
    "checksum": (PACKED[:-8] + b"1234" + PACKED[-4:], "damaged.*incorrect data check"),
    "length": (PACKED[:-4] + b"1234", "damaged: gzip fails with.*length check"),
    "inside": (PACKED[:9_000] + b"\xff" * 50 + PACKED[9_050:], "text.gz is damaged"),
    "not_gzip_after_the_end": (PACKED + b"more", "damaged.*incorrect header check"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_named(tmp_path, data, message):
    (tmp_path / "text.gz").write_bytes(data)
    with pytest.raises(DataError, match=message):
        GzipFile(tmp_path / "text.gz")


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "text.gz"
    path.write_bytes(PACKED)
    file = GzipFile(path)
    path.write_bytes(PACKED[:2_000])
    with pytest.raises(DataError, match="text.gz (is truncated|became shorter)"):
        file.read(40_000, 41_000)
