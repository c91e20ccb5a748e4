"""Reads arrays and strings of a TensorFlow checkpoint by TensorFlow itself."""

import functools
import importlib
import importlib.util
import pathlib
from typing import Any

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray


class TensorFlowReader:
    """The arrays and strings of one checkpoint.

    TensorFlow reads an array as a whole and verifies its checksum. The array that was
    read last stays in memory until another one is read, because its rows are asked for
    block by block.
    """

    def __init__(self, prefix: pathlib.Path):
        """Reads names, shapes and types.

        Args:
          prefix: path of the index, without `.index`.

        Raises:
          CheckpointError: if TensorFlow is missing, or the index is damaged.
        """
        self._prefix = prefix
        self._tf = _tensorflow(prefix)
        self._reader = self._call(self._tf.train.load_checkpoint, str(prefix))
        self._last_array = functools.lru_cache(maxsize=1)(self.read)

    def keys(self) -> list[str]:
        """Returns the names of all arrays and strings."""
        return list(self._reader.get_variable_to_shape_map())

    def arrays(self) -> dict[str, RowArray]:
        """Returns all arrays of numbers that have rows, by key."""
        dtypes = self._reader.get_variable_to_dtype_map()
        return {
            key: RowArray.whole(
                tuple(shape),
                np.dtype(dtypes[key].as_numpy_dtype),
                functools.partial(self._last_array, key),
            )
            for key, shape in self._reader.get_variable_to_shape_map().items()
            if shape and _is_number(dtypes[key])
        }

    def read(self, key: str) -> Any:
        """Returns a whole array, or a scalar string.

        Raises:
          CheckpointError: if it is damaged.
        """
        return self._call(self._reader.get_tensor, key)

    def _call(self, function: Any, argument: str) -> Any:
        """Calls a function of TensorFlow; its errors become `CheckpointError`."""
        try:
            return function(argument)
        # TensorFlow passes some statuses on as errors of Python.
        except (self._tf.errors.OpError, IndexError, ValueError) as error:
            raise CheckpointError(
                f"TensorFlow cannot read the checkpoint {self._prefix}: {error}. Copy "
                "its files again, or take another checkpoint."
            ) from None


def _is_number(dtype: Any) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


def _tensorflow(prefix: pathlib.Path) -> Any:
    """Returns the module, which is imported at the first use only.

    Raises:
      CheckpointError: if it is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise CheckpointError(
            f"{prefix} is a TensorFlow checkpoint, which needs tensorflow 2.18 or "
            "later to be read. Install it by pip install 'tpu-embedding[tf]', or "
            "convert the checkpoint once on a machine that has it: call "
            "te.checkpoint.import_tables and te.save there, and te.restore here."
        )
    return importlib.import_module("tensorflow")
