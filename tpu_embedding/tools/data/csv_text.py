"""Reads the rows of a CSV file as texts, in blocks, with line numbers."""

import codecs
import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import pathlib
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, Final

from tpu_embedding.tools.data.batch import DataError

BLOCK_ROWS: Final = 10_000
"""Number of rows read at a time. The first block determines the columns' kinds."""


@dataclasses.dataclass(frozen=True)
class CsvBlock:
    """Consecutive rows of a file.

    Attributes:
      path: path of the file.
      lines: line number at which each row starts.
      cells: texts of each column, stripped of white space.
    """

    path: pathlib.Path
    lines: Sequence[int]
    cells: dict[str, list[str]]

    def error(self, name: str, row: int, rule: str, fix: str) -> DataError:
        """Returns the error for a cell that breaks a rule."""
        return DataError(
            f"{self.path}, line {self.lines[row]}, column {name!r}: a value {rule}, "
            f"got {self.cells[name][row]!r}; {fix}."
        )


@contextlib.contextmanager
def open_csv(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a CSV file; decompresses it if its name ends with `.gz`.

    Raises:
      DataError: if the file cannot be read.
    """
    opens: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opens(path, "rb") as file:
            yield file
    except (UnicodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} could not be read as a CSV file: {error}. Set its encoding with "
            "--set data.encoding=NAME, or write the file again."
        ) from error


def find_encoding(path: pathlib.Path) -> str:
    """Returns a file's encoding: UTF-8, UTF-16 or a kind of Latin-1.

    Reads the whole file, since the first non-ASCII character may be far down.

    Raises:
      DataError: if the file is not text.
    """
    with open_csv(path) as file:
        start = file.read(4096)
        for magic, fix in _MAGIC.items():
            if start.startswith(magic):
                raise DataError(f"{path} must be a text file, got {fix}.")
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        if 0 in start:
            # In UTF-16, half of the bytes of most texts are 0.
            is_little = start[1::2].count(0) >= start[::2].count(0)
            return "utf-16-le" if is_little else "utf-16-be"
        for encoding in ("utf-8", "cp1252"):
            file.seek(0)
            decoder = codecs.getincrementaldecoder(encoding)()
            try:
                while data := file.read(2**20):
                    decoder.decode(data)
                decoder.decode(b"", final=True)
                return encoding
            except UnicodeDecodeError:
                continue
    return "latin-1"


_MAGIC: Final = {
    b"PK\x03\x04": "an Excel file or another ZIP archive; save the sheet as CSV",
    b"\x1f\x8b": "a gzip file; rename it to end with .gz",
    b"PAR1": "a Parquet file; write a config with a ParquetSource",
}


def read_blocks(
    path: pathlib.Path,
    delimiter: str | None,
    names: Sequence[str],
    *,
    encoding: str | None = None,
) -> Iterator[CsvBlock]:
    """Yields the rows of a file in blocks: at least one block, which may be empty.

    Args:
      path: path of the file.
      delimiter: text between the fields of a row. Detected if None. `" "` matches any
        number of spaces and tabs.
      names: names of the columns. If empty, the first line has them.
      encoding: name of the encoding. Detected if None.

    Raises:
      DataError: if the file is empty or damaged, has duplicate column names, or has a
        row with a different number of fields. The message names the line.
    """
    encoding = encoding or find_encoding(path)
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"
    with open_csv(path) as binary:
        file = io.TextIOWrapper(binary, encoding=encoding, newline="")
        if delimiter is None:
            delimiter = _find_delimiter(file.read(_SAMPLE_CHARACTERS))
            file.seek(0)
        rows, owner = _rows(path, file, delimiter), "column names"
        if not names:
            _, first = next(rows, (0, []))
            names = [" ".join(name.split()) for name in first]
            names = [name or f"column {i}" for i, name in enumerate(names, 1)]
            owner = "first line"
        if not names:
            raise DataError(f"{path} must have rows, but is empty.")
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise DataError(
                f"The columns of {path} must have different names, got {twice[0]!r} "
                "twice. Rename one, or set data.column_names if the first line is data."
            )
        is_last = False
        while not is_last:
            lines, columns = [], [[] for _ in names]
            for line, row in itertools.islice(rows, BLOCK_ROWS):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {line}: a row must have {len(names)} fields "
                        f"like the {owner}, got {len(row)}: {str(row):.200}. Quote "
                        f"fields that contain {delimiter!r}, close open quotes, or set "
                        "data.delimiter."
                    )
                lines.append(line)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell.strip())
            is_last = len(lines) < BLOCK_ROWS
            yield CsvBlock(path, lines, dict(zip(names, columns, strict=True)))


_SAMPLE_CHARACTERS: Final = 2**16
_DELIMITERS: Final = ("\t", "::", ";", ",", "|")
"""Delimiters by priority. Numbers in a file with semicolons may contain commas."""

_ONE_CHARACTER: Final = "\x1f"
"""Replaces longer delimiters, because Python's reader needs a single character."""


def _find_delimiter(text: str) -> str:
    """Returns the delimiter that occurs equally often in each of the first lines.

    If there is no such delimiter, for example because a row is damaged, returns the
    most frequent delimiter of the first line.
    """
    is_cut = len(text) == _SAMPLE_CHARACTERS
    unquoted = re.sub(r'"(?:[^"]|"")*"', '""', text)
    lines = list(filter(str.strip, unquoted.splitlines()))[:20]
    lines = lines[:-1] if is_cut and len(lines) in range(2, 20) else lines
    if not lines:
        return ","
    for delimiter in _DELIMITERS:
        if lines[0].count(delimiter) and len({x.count(delimiter) for x in lines}) == 1:
            return delimiter
    found = max((",", *_DELIMITERS), key=lines[0].count)
    num_words = {len(line.split()) for line in lines}
    if not lines[0].count(found) and len(num_words) == 1 and num_words != {1}:
        return " "
    return found


def _rows(
    path: pathlib.Path, file: IO[str], delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yields the start line and the fields of each row that is not blank.

    Warns if every row that spans several lines looks like rows joined by an open quote.
    """
    lines: Iterable[str] = file
    character, replaced = delimiter, None
    if delimiter == " ":
        lines = (re.sub("[ \t]+", " ", line.strip(" \t")) for line in file)
    elif len(delimiter) > 1:
        character, replaced = _ONE_CHARACTER, delimiter
        lines = (line.replace(delimiter, _ONE_CHARACTER) for line in file)
    rows = csv.reader(lines, delimiter=character, skipinitialspace=True, strict=True)
    line, joined, has_long_cells = 1, None, False
    try:
        for row in rows:
            if replaced is not None:  # Quoted cells may contain the delimiter.
                row = [cell.replace(_ONE_CHARACTER, replaced) for cell in row]
            if rows.line_num > line:  # Joined lines keep their delimiters.
                num_delimiters = (rows.line_num - line) * (len(row) - 1)
                if num_delimiters != sum(cell.count(delimiter) for cell in row):
                    has_long_cells = True
                joined = joined or line
            if row and (len(row) > 1 or row[0].strip()):
                yield line, row
            line = rows.line_num + 1
        if joined and not has_long_cells:
            warnings.warn(
                f"{path}, line {joined}: a quoted cell has line breaks and as many "
                f"{delimiter!r} as several rows. If this is wrong, close or remove the "
                "quote that opens it.",
                stacklevel=2,
            )
    except csv.Error as error:
        limit = csv.field_size_limit()
        if rows.line_num == line and "field larger" in str(error):
            raise DataError(
                f"{path}, line {line}: a field must have at most {limit:,} characters. "
                "Shorten it, or set data.delimiter."
            ) from error
        raise DataError(
            f"{path}, line {line}: a field that begins with a quote must end with one "
            f"before the next field, got: {error}. Remove the quote or close it, and "
            "double quotes inside the field, or set data.delimiter."
        ) from error
