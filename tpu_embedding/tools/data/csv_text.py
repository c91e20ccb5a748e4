"""Rows of a CSV file as texts, in blocks, with the number of each line."""

import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final

from tpu_embedding.tools.data.batch import DataError

BLOCK_ROWS: Final = 10_000
"""Rows that are read at a time. The first ones tell the kinds of the columns."""


@dataclasses.dataclass(frozen=True)
class CsvBlock:
    """Consecutive rows of a file.

    Attributes:
      path: path of the file.
      lines: number of the line of each row.
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
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} must be a CSV file in UTF-8: {error}.") from error


def read_blocks(
    path: pathlib.Path, delimiter: str | None, names: Sequence[str]
) -> Iterator[CsvBlock]:
    """Yields the rows of a file in blocks; at least one, which may have no rows.

    Args:
      path: path of the file.
      delimiter: character between the fields of a row. By default, it is the one of
        comma, tab and semicolon that the first line has most.
      names: names of the columns. If there are none, the first line has them.

    Raises:
      DataError: if the file is empty or damaged, names a column twice, or has a row of
        another number of fields; the message names the line.
    """
    with open_csv(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
        if delimiter is None:
            first_line = next(filter(str.strip, file), "")
            delimiter = max(",\t;", key=first_line.count)
            file.seek(0)
        rows = _rows(path, file, delimiter)
        if not names:
            _, first = next(rows, (0, []))
            names = [name.strip() or f"column {i}" for i, name in enumerate(first, 1)]
        if not names:
            raise DataError(f"{path} must have rows, got an empty file.")
        if len(set(names)) < len(names):
            raise DataError(f"The columns of {path} must have different names: {names}")
        is_last = False
        while not is_last:
            lines, columns = [], [[] for _ in names]
            for line, row in itertools.islice(rows, BLOCK_ROWS):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {line}: a row must have the {len(names)} fields "
                        f"of the first line, got {row}; quote fields that hold "
                        f"{delimiter!r}, or set data.delimiter."
                    )
                lines.append(line)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell.strip())
            is_last = len(lines) < BLOCK_ROWS
            yield CsvBlock(path, lines, dict(zip(names, columns, strict=True)))


def _rows(
    path: pathlib.Path, file: IO[str], delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line that is not blank, and its fields.

    A quote that nothing closes would make one field of all lines up to the next quote,
    so fields must not have line breaks.
    """
    rows = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
    line = 1
    try:
        for row in rows:
            if rows.line_num > line:
                raise csv.Error("a field of several lines")
            if row:
                yield line, row
            line += 1
    except csv.Error as error:
        limit = csv.field_size_limit()
        if rows.line_num == line and "field larger" in str(error):
            raise DataError(
                f"{path}, line {line}: a field must have at most {limit:,} characters, "
                "got more; shorten it, or set data.delimiter."
            ) from error
        raise DataError(
            f"{path}, line {line}: a field that begins with a quote must end with one "
            f"on the same line, got: {error}; remove the quote or close it, double the "
            "quotes inside, and replace line breaks by blanks; or set data.delimiter."
        ) from error
