"""Writes the records of a run as TensorBoard scalars, by tensorboardX.

Events are written at once, so that a kill does not lose them. A resumed run tells
TensorBoard to forget the steps that it repeats.
"""

import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any, Final

from tpu_embedding.tools.train.errors import ConfigError

TENSORBOARD_DIR: Final = "tensorboard"


def load_tensorboard() -> tuple[Any, Any, Any]:
    """Returns tensorboardX's modules of event files, of events, and of summaries.

    Raises:
      ConfigError: if tensorboardX is not installed.
    """
    try:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise ConfigError(
            "TensorBoard files need tensorboardX, which is not installed. Install "
            "tpu-embedding with its extra `train`: pip install 'tpu-embedding[train]', "
            "or leave --tensorboard out."
        ) from error
    return event_file_writer, event_pb2, summary


class ScalarWriter:
    """Writes scalars to an event file of its own in a directory.

    Example:
      >>> import tempfile
      >>> directory = pathlib.Path(tempfile.mkdtemp())
      >>> writer = ScalarWriter(directory, first_step=0)
      >>> writer.write(10, "train", {"loss": 0.5, "rounds": 1})
      >>> writer.close()
      >>> [path.name.split(".")[0] for path in directory.iterdir()]
      ['events']
    """

    def __init__(self, directory: pathlib.Path, first_step: int):
        """Creates the directory if needed, and a new event file in it.

        Args:
          directory: directory of the event files.
          first_step: steps done before. TensorBoard drops later ones of earlier files.
        """
        files, self._events, self._summary = load_tensorboard()
        directory.mkdir(parents=True, exist_ok=True)
        # Runs that start within a second would share a name otherwise.
        suffix = f".{time.time_ns()}"
        self._file = files.EventsWriter(str(directory / "events"), suffix)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=first_step + 1, session_log=start)

    def write(self, step: int, group: str, values: Mapping[str, Any]) -> None:
        """Writes the numbers among some values, as scalars named `group/name`.

        Args:
          step: number of steps done.
          group: first part of the scalars' names.
          values: by name. Those that are no finite numbers are left out.
        """
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                summary = self._summary.scalar(f"{group}/{name}", value)
                self._write(step=step, summary=summary)
        self._file.flush()

    def _write(self, **event: Any) -> None:
        self._file.write_event(self._events.Event(wall_time=time.time(), **event))

    def close(self) -> None:
        """Closes the event file."""
        self._file.close()
