"""Writes the files of an export in a job of several processes.

All processes read the tables, in turns that need every one of them. The first process
writes.
"""

import pathlib
from collections.abc import Callable
from typing import Final

from tpu_embedding.distributed.job import current_job
from tpu_embedding.export.signature import ExportError
from tpu_embedding.tables.line_exchange import Receivers

_EXCHANGE: Final = "end of an export"


class Writing:
    """The directory that the first process of a job writes, while all read tables.

    An error of writing waits until the turns of reading are over: the other processes
    would wait for this one. Then it ends the export on all of them.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._error: Exception | None = None

    def do(self, write: Callable[[pathlib.Path], object]) -> None:
        """Calls a function with the directory on the first process, unless one failed.

        Args:
          write: takes part in no turn of all processes.
        """
        if not current_job().is_first or self._error is not None:
            return
        try:
            write(self._directory)
        except Exception as error:
            if current_job().num_processes == 1:
                raise
            self._error = error

    def agree(self) -> None:
        """Raises the error of writing, if there was one, on all processes.

        Raises:
          ExportError: on the other processes.
        """
        job, error = current_job(), self._error
        problem = job.broadcast(_EXCHANGE, error and f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if problem is not None:
            raise ExportError(f"{job.name_of(0)} could not write the export: {problem}")


def receivers() -> Receivers:
    """Returns the processes that must receive the rows so that the first one can write.

    One process reads faster if each of its devices receives other rows.
    """
    return "one" if current_job().num_processes == 1 else "all"


def check_one_process() -> None:
    """Refuses to export a program in a job of several processes.

    Raises:
      ExportError: if this process belongs to such a job.
    """
    num_processes = current_job().num_processes
    if num_processes > 1:
        raise ExportError(
            f"A program is exported by one process, got a job of {num_processes}; save "
            "a checkpoint by te.save, and export it in a process of its own. "
            "te.export.save_tables and te.export.save_delta work in a job."
        )
