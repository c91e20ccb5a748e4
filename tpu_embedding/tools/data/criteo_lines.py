"""Reads the lines of Criteo's click logs: one file, or one per day.

`criteo.py` turns the samples into batches.
"""

import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_order import (
    block_bounds,
    bounded_block_size,
    by_part,
    runs_of,
)
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.data.criteo_parser import parse_lines
from tpu_embedding.tools.data.digests import join_digests
from tpu_embedding.tools.data.line_blocks import LineBlocks

SOURCE: Final = (
    "Criteo's logs do not come with this package: get train.txt of the Criteo Display "
    "Advertising Challenge (Kaggle), or a day_N of the Criteo 1TB Click Logs (Criteo "
    "AI Lab); SyntheticCriteo needs no file."
)

KAGGLE_FILES: Final = ("train.txt", "train.txt.gz")
"""Names of the training file of Criteo's Kaggle challenge."""

BLOCK_SIZE: Final = 64
"""Consecutive lines that stay together when the order is shuffled.

A block of about 15 kB costs little more to read than to seek. A batch of 2048 samples
mixes 32 places of the file. Blocks of more than 67 million lines are larger.
"""

PARSED_LINES: Final = 8192
"""Lines that are parsed at a time, so that their arrays stay in the processor's cache.

Per sample, pyarrow.csv took 0.7 microseconds with 4,096 or 8,192 lines at a time, 1.0
with 1,024, and 1.4 with 32,768.
"""

GZIP_MAGIC: Final = b"\x1f\x8b"  # RFC 1952, section 2.3.1

_INDEXED_LINES: Final = 64
"""Lines per entry of the index, of 8 bytes: 0.55 GB for the 4.4 billion of the 1TB log.

Fewer entries would take less memory. But then a batch that mixes runs of 64 lines would
read more lines than it uses.
"""


class CriteoLines:
    """A `SampleReader` of log files, whose samples are the lines of all files.

    Attributes:
      files: the files, in order.
      block_bounds: first line of each block, and the number of lines.
      digest: digest of the text of all files.
    """

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        *,
        vocabulary_sizes: Sequence[int],
        block_size: int | None,
    ):
        """Indexes the lines, in one pass over each file.

        Args:
          paths: paths of the files, at least one.
          vocabulary_sizes: rows of each of the 26 features.
          block_size: lines of a block; None chooses `BLOCK_SIZE`, and more for many
            lines.

        Raises:
          DataError: if a file is missing, empty, packed by gzip or damaged.
        """
        _refuse_packed(paths)
        self.files = [
            LineBlocks(path, block_size=_INDEXED_LINES, source=SOURCE) for path in paths
        ]
        self.digest = join_digests(file.digest for file in self.files)
        self._vocabulary_sizes = np.array(vocabulary_sizes)
        for file in self.files:
            _check_first_line(file, self._vocabulary_sizes)
        num_lines = [file.num_lines for file in self.files]
        if block_size is None:
            block_size = bounded_block_size(sum(num_lines), BLOCK_SIZE)
        self._block_size = block_size
        self.block_bounds = block_bounds(num_lines, block_size)
        self._starts = np.cumsum([0, *num_lines[:-1]])

    def num_streams(self, batch_size: int) -> int:
        """Returns the number of streams of a batch; see `BlockOrder`.

        Streams take 64 lines of a larger block at a time, so that a batch mixes about
        as many places as with blocks of 64.
        """
        return max(1, min(self._block_size, batch_size) // BLOCK_SIZE)

    def read(self, samples: np.ndarray) -> Batch:
        """Returns the given samples; the labels, dense inputs and ids of their lines.

        Raises:
          DataError: if a line is damaged; the message names file, line and field.
        """
        groups = []
        for number, _, lines in by_part(samples, self._starts):
            file = self.files[number]
            for start in range(0, len(lines), PARSED_LINES):
                group = lines[start : start + PARSED_LINES]
                text = b"".join(
                    file.read(run.start, run.stop) for run in runs_of(group)
                )
                groups.append(
                    parse_lines(text, group + 1, file.path, self._vocabulary_sizes)
                )
        row_ids = np.concatenate([each.row_ids for each in groups], axis=1)
        return Batch(
            features=dict(zip(CATEGORY_NAMES, row_ids, strict=True)),
            dense=np.concatenate([each.dense for each in groups]),
            labels=np.concatenate([each.labels for each in groups]),
            weights=np.ones(len(samples), np.float32),
            origin=lambda sample: self._place(int(samples[sample])),
        )

    def _place(self, sample: int) -> str:
        number = int(np.searchsorted(self._starts, sample, side="right")) - 1
        line = sample - self._starts[number] + 1
        return f"{self.files[number].path}, line {line}"

    def __str__(self) -> str:
        if len(self.files) == 1:
            return str(self.files[0].path)
        return f"{self.files[0].path} to {self.files[-1].path.name}"


def _refuse_packed(paths: Sequence[pathlib.Path]) -> None:
    """Raises DataError if gzip packed a file, with the command that unpacks all."""
    packed = [path for path in paths if path.is_file() and _is_gzip(path)]
    if not packed:
        return
    command, names = "", []
    for path in packed:
        name = shlex.quote(str(path))
        if path.suffix != ".gz":  # gunzip takes no other name
            command += f"mv {name} {name}.gz && "
            name += ".gz"
        names.append(name)
    raise DataError(
        f"{packed[0]} must be plain text, got a file packed by gzip; unpack it, and "
        f"read what it unpacks to: {command}gunzip {' '.join(names)}"
    )


def _is_gzip(path: pathlib.Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GZIP_MAGIC)) == GZIP_MAGIC


def _check_first_line(file: LineBlocks, sizes: np.ndarray) -> None:
    """Raises DataError if a file is no log, before its number of lines is an error."""
    try:
        parse_lines(file.read(0, 1), np.array([1]), file.path, sizes)
    except DataError as error:
        raise DataError(f"{error} {SOURCE}") from None


def find_logs(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the log files of a path, in order.

    Args:
      path: a log file; or a directory that holds `train.txt`, or `day_0`, `day_1` and
        so on. A name with the suffix `.gz` counts, too, and opening it says how to
        unpack it.

    Raises:
      DataError: if the directory holds no log, lacks a day in between, or has a day
        twice.
    """
    if not path.is_dir():
        return [path]
    for name in KAGGLE_FILES:
        if (path / name).is_file():
            return [path / name]
    days = find_days(path, r"day_(\d+)(\.gz)?")
    if not days:
        raise DataError(f"{path} holds no train.txt and no day_0. {SOURCE}")
    return days


def find_days(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Returns the files of consecutive days in a directory, by day.

    Args:
      directory: an existing directory.
      pattern: regular expression of the whole name, whose first group is the day.

    Raises:
      DataError: if a day between the first and the last is missing, or there twice.
    """
    days: dict[int, pathlib.Path] = {}
    for path in sorted(directory.iterdir()):
        match = re.fullmatch(pattern, path.name)
        if match is None:
            continue
        day = int(match.group(1))
        if day in days:
            raise DataError(
                f"{directory} must hold each day once, got {days[day].name} and "
                f"{path.name}; remove one."
            )
        days[day] = path
    missing = sorted(set(range(min(days, default=0), max(days, default=0))) - set(days))
    if missing:
        raise DataError(
            f"{directory} must hold consecutive days, got days {min(days)} to "
            f"{max(days)} without {', '.join(map(str, missing))}."
        )
    return [days[day] for day in sorted(days)]
