"""Tests random access to lines against splitting the whole file at its newlines."""

import pickle

import pytest

from tpu_embedding.tools.data import line_blocks
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.line_blocks import LineBlocks

CASES = {
    "one_line": b"a\n",
    "no_newline": b"a",
    "last_without_newline": b"a\nbb\nccc",
    "empty_lines": b"\n\nx\n\n\n",
    "crlf": b"a\r\nb\r\n",
    "uneven": b"".join(b"x" * (7 * n % 11) + b"\n" for n in range(40)),
}


@pytest.mark.parametrize("scan_bytes", [1, 3, 2**24])
@pytest.mark.parametrize("block_size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_every_run_of_lines(tmp_path, monkeypatch, text, block_size, scan_bytes):
    monkeypatch.setattr(line_blocks, "SCAN_BYTES", scan_bytes)
    path = tmp_path / "lines"
    path.write_bytes(text)
    lines = text.removesuffix(b"\n").split(b"\n")
    blocks = LineBlocks(path, block_size=block_size, source="")
    assert blocks.num_lines == len(lines)
    blocks = pickle.loads(pickle.dumps(blocks))
    for start in range(len(lines)):
        for stop in range(start + 1, len(lines) + 1):
            data = blocks.read(start, stop)
            assert data == b"\n".join(lines[start:stop]) + b"\n"


def test_missing_and_empty_files(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    for name, message in [
        ("absent", r"absent is not a file\. Get it there"),
        (".", r"is not a file\. Get it there"),
        ("empty", r"empty is empty.*Get it there"),
    ]:
        with pytest.raises(DataError, match=message):
            LineBlocks(tmp_path / name, block_size=4, source="Get it there.")


def test_a_file_that_becomes_shorter(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"abc\n" * 1000)
    blocks = LineBlocks(path, block_size=10, source="")
    path.write_bytes(b"abc\n" * 10)
    with pytest.raises(DataError, match="lines became shorter while it was read"):
        blocks.read(500, 510)
