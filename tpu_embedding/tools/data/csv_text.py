"""Rows of a CSV file as texts, in blocks, with the number of each line."""

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
"""Rows that are read at a time. The first ones tell the kinds of the columns."""


@dataclasses.dataclass(frozen=True)
class CsvBlock:
    """Consecutive rows of a file.

    Attributes:
      path: path of the file.
      lines: number of each row's first line.
      cells: texts of each column, without white space around them.
    """

    path: pathlib.Path
    lines: Sequence[int]
    cells: dict[str, list[str]]

    def error(self, name: str, row: int, rule: str, fix: str) -> DataError:
        """Returns the error of a cell that breaks a rule."""
        return DataError(
            f"{self.path}, line {self.lines[row]}, column {name!r}: a value {rule}, "
            f"got {self.cells[name][row]!r}; {fix}."
        )


@contextlib.contextmanager
def open_csv(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a CSV file, compressed if its name ends with `.gz`.

    Raises:
      DataError: if the file cannot be read.
    """
    opens: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opens(path, "rb") as file:
            yield file
    except (UnicodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} must be a CSV file in its encoding, got: {error}; name the "
            "encoding by --set data.encoding=NAME, or write the file again."
        ) from error


def find_encoding(path: pathlib.Path) -> str:
    """Returns the encoding of a file: UTF-8, UTF-16 or a kind of Latin-1.

    All of the file is read, since the first letter outside of ASCII may be far down.

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
            # Half of the bytes of most texts are 0 in UTF-16.
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
    b"\x1f\x8b": "one compressed by gzip; let its name end with .gz",
    b"PAR1": "a Parquet file; write a config with a ParquetSource",
}


def read_blocks(
    path: pathlib.Path,
    delimiter: str | None,
    names: Sequence[str],
    *,
    encoding: str | None = None,
) -> Iterator[CsvBlock]:
    """Yields the rows of a file in blocks; at least one, which may be empty.

    Args:
      path: path of the file.
      delimiter: text between the fields of a row, or None to find it. A blank stands
        for any number of blanks and tabs.
      names: names of the columns. If there are none, the first line has them.
      encoding: name of the encoding, or None to find it.

    Raises:
      DataError: if the file is empty or damaged, names a column twice, or has a row of
        another number of fields; the message names the line.
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
            raise DataError(f"{path} must have rows, got an empty file.")
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise DataError(
                f"The columns of {path} must have different names, got {twice[0]!r} "
                "twice; rename one, or set data.column_names if the first line is data."
            )
        is_last = False
        while not is_last:
            lines, columns = [], [[] for _ in names]
            for line, row in itertools.islice(rows, BLOCK_ROWS):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {line}: a row must have the {len(names)} fields "
                        f"of the {owner}, got {len(row)}: {str(row):.200}; quote "
                        f"fields that hold {delimiter!r}, close open quotes, or set "
                        "data.delimiter."
                    )
                lines.append(line)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell.strip())
            is_last = len(lines) < BLOCK_ROWS
            yield CsvBlock(path, lines, dict(zip(names, columns, strict=True)))


_SAMPLE_CHARACTERS: Final = 2**16
_DELIMITERS: Final = ("\t", "::", ";", ",", "|")
"""Delimiters by rank. A comma may also be in the numbers of a file with semicolons."""

_ONE_CHARACTER: Final = "\x1f"
"""Takes the role of longer delimiters, since Python's reader needs one character."""


def _find_delimiter(text: str) -> str:
    """Returns the delimiter that occurs equally often in each of the first lines.

    If none does, because a row is damaged, it is the most frequent of the first line.
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
    """Yields the first line's number of each row that is not blank, and its fields.

    Warns if all rows of several lines look like rows that an open quote joined.
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
            if replaced is not None:  # Quotes may hold the delimiter.
                row = [cell.replace(_ONE_CHARACTER, replaced) for cell in row]
            if rows.line_num > line:  # Joined lines keep the delimiters of each one.
                num_delimiters = (rows.line_num - line) * (len(row) - 1)
                if num_delimiters != sum(cell.count(delimiter) for cell in row):
                    has_long_cells = True
                joined = joined or line
            if row and (len(row) > 1 or row[0].strip()):
                yield line, row
            line = rows.line_num + 1
        if joined and not has_long_cells:
            warnings.warn(
                f"{path}, line {joined}: a quoted cell holds line breaks and as many "
                f"{delimiter!r} as the lines of several rows; if it should not, close "
                "or remove the quote that opens it.",
                stacklevel=2,
            )
    except csv.Error as error:
        limit = csv.field_size_limit()
        if rows.line_num == line and "field larger" in str(error):
            raise DataError(
                f"{path}, line {line}: a field must have at most {limit:,} characters, "
                "got more; shorten it, or set data.delimiter."
            ) from error
        raise DataError(
            f"{path}, line {line}: a field that begins with a quote must end with one "
            f"before the next, got: {error}; remove the quote or close it, and double "
            "the quotes inside; or set data.delimiter."
        ) from error
