"""The directory of a run: its lock, and the files that an earlier run left there.

Nothing is ever deleted here. A run that is to be replaced moves to a directory of its
own. Files that no run is known to have written make a new run fail.
"""

import contextlib
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Final, Literal

from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.paths import local_path
from tpu_embedding.tools.jobs.run_lock import (
    RunDirectoryError,
    check_unlocked,
    run_lock,
)
from tpu_embedding.tools.train.loop.profiling import PROFILE_DIR
from tpu_embedding.tools.train.loop.reporting import PLOT_FILE, RECORDS_FILE
from tpu_embedding.tools.train.loop.tensorboard import TENSORBOARD_DIR

CHECKPOINTS_DIR: Final = "checkpoints"
LOCK_FILE: Final = "run.lock"

ExistingRun = Literal["refuse", "resume", "move_aside"]
"""Treatment of an earlier run in the output directory; see `train`."""


class RunDirectory:
    """The output directory of a run.

    Attributes:
      path: path of the directory, which need not exist yet.
      checkpoints: path of the directory of checkpoints within it.

    Example:
      >>> import tempfile
      >>> directory = RunDirectory(pathlib.Path(tempfile.mkdtemp()) / "run")
      >>> directory.check("refuse")
      >>> with directory.claim("refuse"):
      ...     sorted(path.name for path in directory.path.iterdir())
      ['run.lock']
      >>> directory.check("resume")  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      tpu_embedding.tools.jobs.run_lock.RunDirectoryError: There is no run in ...
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = local_path(path)
        self.checkpoints = self.path / CHECKPOINTS_DIR

    def check(self, existing_run: ExistingRun) -> None:
        """Checks that a run may start here, and writes nothing.

        Args:
          existing_run: treatment of an earlier run; see `train`.

        Raises:
          RunDirectoryError: if a run may not start; the message says why, and lists the
            ways out.
        """
        self._check_access()
        check_unlocked(self.path / LOCK_FILE)
        self._check_contents(existing_run)

    def _check_contents(self, existing_run: ExistingRun) -> None:
        """Raises `RunDirectoryError` if what is there forbids the run to start."""
        has_records = (self.path / RECORDS_FILE).exists()
        steps = saved_steps(self.checkpoints)
        if existing_run == "resume" and not (has_records or steps):
            raise RunDirectoryError(
                f"There is no run in {self.path} to resume: it has neither "
                f"{RECORDS_FILE} nor a complete checkpoint. Leave --resume out to "
                "start a run, or choose the --output-dir of another one."
            )
        if existing_run != "refuse":
            return
        if has_records:
            saved = "that saved no checkpoint; start it again with"
            if steps:
                saved = f"whose latest checkpoint is step {steps[-1]}; continue it with"
            raise RunDirectoryError(
                f"{self.path} holds an earlier run {saved} --resume, move it aside "
                "with --overwrite, or choose another --output-dir."
            )
        for path in self._entries():
            raise RunDirectoryError(
                f"{path} exists, but no {RECORDS_FILE} beside it says that a run wrote "
                "it. Choose another --output-dir, or move it aside with --overwrite."
            )

    @contextlib.contextmanager
    def claim(self, existing_run: ExistingRun) -> Iterator[pathlib.Path | None]:
        """Creates and locks the directory; makes room in it if asked to.

        Args:
          existing_run: treatment of an earlier run; see `train`.

        Yields:
          The directory that the earlier run was moved to, or None.

        Raises:
          RunDirectoryError: if `check` would raise it; the directory may have changed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with run_lock(self.path / LOCK_FILE):
            self._check_contents(existing_run)
            yield self._move_aside() if existing_run == "move_aside" else None

    def unlock(self) -> None:
        """Deletes the lock file that this process holds, before it ends at once."""
        (self.path / LOCK_FILE).unlink(missing_ok=True)

    def _check_access(self) -> None:
        """Refuses a path at which no directory can be made or written."""
        for path in (self.path.absolute(), *self.path.absolute().parents):
            if path.exists():
                if not path.is_dir():
                    raise RunDirectoryError(
                        f"--output-dir {self.path}: {path} is no directory."
                    )
                if not os.access(path, os.W_OK | os.X_OK):
                    raise RunDirectoryError(
                        f"--output-dir {self.path}: {path} is not writable."
                    )
                return

    def _entries(self) -> list[pathlib.Path]:
        """Returns the files of a run, and its directories that are not empty."""
        paths = [self.path / name for name in (RECORDS_FILE, PLOT_FILE)]
        found = [path for path in paths if path.exists()]
        folders = (CHECKPOINTS_DIR, TENSORBOARD_DIR, PROFILE_DIR)
        for path in (self.path / name for name in folders):
            if path.exists() and not (path.is_dir() and not any(path.iterdir())):
                found.append(path)
        return found

    def _move_aside(self) -> pathlib.Path | None:
        """Moves the files of a run to a new directory beside this one."""
        entries = self._entries()
        if not entries:
            return None
        target = _new_sibling(self.path.resolve())
        for path in entries:
            path.rename(target / path.name)
        return target


def _new_sibling(path: pathlib.Path) -> pathlib.Path:
    """Creates the first of `path.old-1`, `path.old-2`, ... that does not exist."""
    for number in itertools.count(1):
        sibling = path.with_name(f"{path.name}.old-{number}")
        with contextlib.suppress(FileExistsError):
            sibling.mkdir()
            return sibling
    raise AssertionError("unreachable")
