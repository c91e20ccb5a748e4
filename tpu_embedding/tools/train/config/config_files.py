"""Finds and runs the Python files that define run configs.

An installed package contains them in `tpu_embedding/configs`. A checkout has them in
`configs`, next to the package.
"""

import contextlib
import pathlib
import sys
import types
import zlib
from collections.abc import Iterator
from typing import Final

import tpu_embedding
from tpu_embedding.paths import local_path
from tpu_embedding.tools.jobs.stop_signals import RunStopped
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.errors import ConfigError, config_error

_PACKAGE: Final = pathlib.Path(tpu_embedding.__file__).parent
CONFIG_DIRS: Final = (_PACKAGE / "configs", _PACKAGE.parent / "configs")


def list_configs() -> dict[str, pathlib.Path]:
    """Returns the configs of the package, name to file."""
    found: dict[str, pathlib.Path] = {}
    for directory in CONFIG_DIRS:
        for path in sorted(directory.glob("*.py")):
            if not path.name.startswith("_"):
                found.setdefault(path.stem, path)
    return found


def load_config(name_or_path: str) -> RunConfig:
    """Returns the run config that a Python file defines as `config`.

    The file may import modules of its own folder, as a script may.

    Args:
      name_or_path: a name from `list_configs`, or the path of a Python file.

    Raises:
      ConfigError: if the file does not exist, raises an exception, calls `exit`, or
        defines no `config`.

    Example:
      >>> load_config("synthetic").batch_size
      2048
    """
    path = _find_config(name_or_path)
    try:
        module = _run_file(path)
    except RunStopped:  # no exit of the file's own
        raise
    except (Exception, SystemExit) as error:
        raise config_error(f"The config {path.name}", error) from error
    config = getattr(module, "config", None)
    if not isinstance(config, RunConfig):
        found = "nothing" if config is None else f"a {type(config).__name__}"
        raise ConfigError(
            f"The config {path} must define `config`, a "
            f"tpu_embedding.tools.train.RunConfig, got {found} of that name."
        )
    return config


def _run_file(path: pathlib.Path) -> types.ModuleType:
    """Runs a file as a module that annotations and pickle can look up by its name."""
    code = compile(path.read_bytes(), str(path), "exec")
    number = zlib.crc32(str(path.resolve()).encode())
    module = types.ModuleType(f"{path.stem}_{number:08x}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        with _on_search_path(path.resolve().parent):
            exec(code, module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


@contextlib.contextmanager
def _on_search_path(directory: pathlib.Path) -> Iterator[None]:
    """Lets modules of a directory be imported."""
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path[:] = before


def _find_config(name_or_path: str) -> pathlib.Path:
    """Returns the file of a known config, or else the path itself if it exists."""
    known = list_configs()
    if name_or_path in known:
        return known[name_or_path]
    path = local_path(name_or_path)
    if path.is_file():
        return path
    raise ConfigError(
        f"There is no config {name_or_path!r}: it must be a Python file or one of the "
        f"known names, {', '.join(sorted(known)) or '(none)'}."
    )
