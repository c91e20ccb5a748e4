"""The errors of runs, and the conversion of other errors into that of a wrong config.

A run config may bring a data source, a model and optimizers of its own. An error that
they raise reaches the user as one `ConfigError` that names the code and its line.
"""

import contextlib
import pathlib
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Final

import jax

import tpu_embedding
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.jobs.stop_signals import RunStopped

_LIBRARIES: Final = tuple(
    str(pathlib.Path(path).resolve())
    for path in (
        *(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")),
        pathlib.Path(tpu_embedding.__file__).parent,
    )
)
"""Folders whose code is not the user's."""


class ConfigError(ValueError):
    """Raised if a run config is missing or invalid, or if an override does not fit."""


class TrainingDivergedError(RuntimeError):
    """Raised if the loss, a metric or the model is NaN or infinite."""


@contextlib.contextmanager
def as_config_error(name: str) -> Iterator[None]:
    """Turns an error that the code of a config raises in the block into `ConfigError`.

    An error of this package that already says what is wrong keeps its text. Errors of
    the XLA runtime pass, because they are no fault of the config.

    Args:
      name: name of the code for the message, such as `"MyModel.build"`.

    Raises:
      ConfigError: if the block raises an error, or calls `exit`.
      DataError: if the block raises one.

    Example:
      >>> with as_config_error("Own.open"):
      ...     {}["x"]
      Traceback (most recent call last):
      tpu_embedding.tools.train.errors.ConfigError: Own.open fails with KeyError: 'x'
    """
    try:
        yield
    except (ConfigError, DataError, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except RunStopped:  # no exit of the config's own
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and not _place_in_config(error):
            raise ConfigError(str(error)) from error
        raise config_error(name, error) from error


def config_error(name: str, error: BaseException) -> ConfigError:
    """Returns the error that names the code of a config, its line and its own error.

    Args:
      name: name of the code for the message, such as `"MyModel.build"`.
      error: error that the code has raised.
    """
    place = _place_in_config(error)
    return ConfigError(f"{name} fails{place} with {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """Returns an error's type and the first line of its message.

    Example:
      >>> describe_error(ValueError("too large" + chr(10) + "more"))
      'ValueError: too large'
    """
    lines = str(error).splitlines()
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"a call of exit({error.code!r})"
    return f"{name}: {lines[0]}" if lines else name


def _place_in_config(error: BaseException) -> str:
    """Returns " in line N of FILE" for the deepest frame outside libraries, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = pathlib.Path(frame.filename)
        if not frame.filename.startswith("<") and not _is_library(path):
            return f" in line {frame.lineno} of {frame.filename}"
    return ""


def _is_library(path: pathlib.Path) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in _LIBRARIES)
