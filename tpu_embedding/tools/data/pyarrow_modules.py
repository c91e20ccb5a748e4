"""Imports pyarrow, which the readers of text and Parquet files need."""

import importlib
from typing import Any, Final

CRITEO_LOGS: Final = "Criteo's logs"
PARQUET_FILES: Final = "Parquet files"
"""Names of files in errors."""


class MissingPyarrowError(ImportError):
    """Raised if files are to be read by pyarrow, but it is not installed."""


def load_pyarrow(module: str, files: str) -> Any:
    """Returns a module of pyarrow.

    Args:
      module: name of the module, such as `"pyarrow.csv"`.
      files: name of the files that need it, for the error.

    Raises:
      MissingPyarrowError: if pyarrow is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPyarrowError(
            f"{files} need pyarrow, which is not installed. Install tpu-embedding with "
            "its extra `parquet`: pip install 'tpu-embedding[parquet]'"
        ) from error
