"""Reads and locks run directories, which may be untrusted downloads.

Links in a directory are not followed, and a damaged record raises an error that names
the file.
"""

import contextlib
import fcntl
import json
import math
import os
import pathlib
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import orbax.checkpoint as ocp

from tpu_embedding import distributed
from tpu_embedding.argument_checks import type_name
from tpu_embedding.strings.string_ids import (
    VOCABULARIES_DIR,
    Vocabulary,
    load_vocabularies,
)
from tpu_embedding.tools.data.batch import DataError, Dataset

RECORDS_FILE: Final = "metrics.jsonl"
PLOT_FILE: Final = "curves.png"
LOCK_FILE: Final = "run.lock"
CHECKPOINTS_DIR: Final = "checkpoints"
TENSORBOARD_DIR: Final = "tensorboard"
PROFILE_DIR: Final = "profile"
_FILES: Final = (
    *(RECORDS_FILE, PLOT_FILE, LOCK_FILE, CHECKPOINTS_DIR),
    *(TENSORBOARD_DIR, PROFILE_DIR, VOCABULARIES_DIR),
)

_MAX_LINE_BYTES: Final = 2**22
"""Maximum length of a record. Parsed JSON needs up to 25 times its text's memory."""

_RECORD_FIELDS: Final = {
    "run": dict,
    "train": dict,
    "evaluation": dict,
    "result": dict,
    "origin": dict | None,
}


class RunDirectoryError(ValueError):
    """Raised if a run cannot use its directory, or a file there is damaged.

    Example:
      By default, a run does not continue an earlier run::

        try:
            train(config, "runs/clicks")
        except RunDirectoryError:
            train(config, "runs/clicks", existing_run="resume")
    """


@contextlib.contextmanager
def claimed(directory: pathlib.Path) -> Iterator[None]:
    """Creates and locks a directory. A new directory that stays empty is removed."""
    # Files are checked first, because opening a pipe could hang, and opening a link
    # could write elsewhere.
    check_files(directory)
    if not distributed.is_first():
        yield
        return
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    with _locked(path):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if is_new and not (directory / RECORDS_FILE).exists():
                for empty in (directory / CHECKPOINTS_DIR, directory):
                    with contextlib.suppress(OSError):  # It is not empty.
                        empty.rmdir()


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    # The lock is a `flock`, not the existence of the file, because the operating system
    # releases the `flock` of a killed process.
    with contextlib.ExitStack() as stack:
        is_current = False
        while not is_current:
            file = stack.enter_context(path.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunDirectoryError(
                    f"{path.parent} is in use by another process. Wait until it ends, "
                    "or choose another --output-dir."
                ) from error
            except OSError:
                break  # Some network file systems do not support locks.
            # Another process may have removed the file after this process opened it.
            with contextlib.suppress(FileNotFoundError):
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
        yield


def check_files(directory: pathlib.Path, names: Iterable[str] = _FILES) -> None:
    """Rejects links, pipes and devices in a directory, which may itself be a link."""
    unchecked = [directory / name for name in names]
    while unchecked:
        path = unchecked.pop()
        try:
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                unchecked += path.iterdir()
        except FileNotFoundError:
            continue  # A run in progress may delete old checkpoints.
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise RunDirectoryError(
                f"{path} must be a file or directory, got a link, pipe or device. Copy "
                "its target, or make the whole run directory a link."
            )


def newest_checkpoint(directory: pathlib.Path) -> pathlib.Path | None:
    """Finds the checkpoint with the largest step."""
    if not directory.is_dir():
        return None
    saved = ocp.utils.checkpoint_steps_paths(directory)
    # Orbax also lists names that are not numbers.
    steps = [path.name for path in saved if path.name.isdecimal()]
    return directory / max(steps, key=int) if steps else None


def result_checkpoint(directory: pathlib.Path) -> pathlib.Path | None:
    """Finds the best checkpoint if the run's config keeps it, else the newest one."""
    _, run = latest_start(directory)
    newest = newest_checkpoint(directory / CHECKPOINTS_DIR)
    if newest is None or run.get("keep_best") is not True:
        return newest
    evaluations = values_by_step(directory, "evaluation")
    saved = [step for step in evaluations if newest.with_name(str(step)).exists()]
    return newest.with_name(str(best_step(evaluations, saved) or newest.name))


def latest_start(
    directory: pathlib.Path,
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Reads the latest recorded origin, if any, and the latest config."""
    # A script that resumes a run records a config without an origin.
    origin, run = None, {}
    for record in read_records(directory / RECORDS_FILE):
        origin, run = record.get("origin") or origin, record.get("run") or run
    return origin, run


def values_by_step(
    directory: pathlib.Path, group: Literal["train", "evaluation"]
) -> dict[int, dict[str, float]]:
    """Maps each step to its last record with finite numbers."""
    steps = {}
    for record in read_records(directory / RECORDS_FILE):
        values = list(record.get(group, {}).values())
        # JSON can have integers and strings here, and Python's parser accepts NaN.
        if values and all(type(x) is float and math.isfinite(x) for x in values):
            steps[record.get("step", 0)] = record[group]
    # Sorted, because `evaluate` appends records of earlier steps.
    return dict(sorted(steps.items()))


def best_step(
    evaluations: Mapping[int, Mapping[str, float]], saved: Collection[int]
) -> int | None:
    """Finds the saved step with the lowest main metric; the first one wins a tie."""
    # The main metric comes first, see `losses.Loss.metrics`.
    steps = {step: next(iter(x.values())) for step, x in evaluations.items()}
    return min((x for x in steps if x in saved), key=steps.__getitem__, default=None)


def read_records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the records. Raises `RunDirectoryError` if a record is damaged."""
    if not path.exists():
        return
    # Reads bytes, so that a line that is not UTF-8 fails below, where its number is
    # known.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if len(line) > _MAX_LINE_BYTES:
                    raise ValueError(f"a line of {len(line):,} bytes")
                record = json.loads(line.decode())
                if not isinstance(record, dict):
                    raise ValueError(type_name(record))
                for name, kind in _RECORD_FIELDS.items():
                    value = record.get(name)
                    if name in record and not isinstance(value, kind):
                        raise ValueError(f"{type_name(value)} as {name!r}")
                for owner in (record, record.get("result", {})):
                    step = owner.get("step", 0)
                    if type(step) is not int or not 0 <= step < 2**63:
                        raise ValueError(f"the step {step!r:.80}")
            except json.JSONDecodeError:
                continue  # A killed run may have left half a line.
            # Deeply nested JSON exceeds the recursion limit of Python's parser.
            except (ValueError, RecursionError) as error:
                raise RunDirectoryError(
                    f"{path}, line {number}: a record must be a JSON object in UTF-8, "
                    f"got {error}. Remove the line."
                ) from error
            yield record


def vocabularies_of(directory: pathlib.Path) -> dict[str, Vocabulary]:
    """Loads vocabularies by feature name, or raises `RunDirectoryError`."""
    try:
        return load_vocabularies(directory)
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"The vocabularies of {directory} are missing or damaged: {error}"
        ) from error


def check_vocabularies(data: Dataset, directory: pathlib.Path) -> None:
    """Checks that strings have the same ids as when the run started."""
    # Other ids would silently train and serve the wrong rows.
    now = getattr(data, "vocabularies", {})
    for name, vocabulary in vocabularies_of(directory).items() if now else ():
        if name in now and now[name].tokens != vocabulary.tokens:
            raise DataError(
                f"The strings of {name!r} differ from the ones that the run in "
                f"{directory} started with, because the data have changed. Restore the "
                "data, or start a new run."
            )
