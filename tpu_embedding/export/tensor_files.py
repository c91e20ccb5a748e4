"""Reads and writes files in the format of safetensors, a block of rows at a time.

A file holds a header, in JSON, and the bytes of its tensors. The package `safetensors`
reads and writes whole tensors, but a table may be larger than the memory of the host.
See https://github.com/huggingface/safetensors for the format.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.safetensors import DTYPES, map_tensors
from tpu_embedding.export.signature import ExportError

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8
_LENGTH_BYTES: Final = 8


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def fits(self, other: "TensorSpec") -> bool:
        """Returns True if the other one is the same, up to sizes of -1 in this one."""
        if self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return False
        pairs = zip(self.shape, other.shape, strict=True)
        return all(wanted in (-1, size) for wanted, size in pairs)


class TensorFile:
    """A file whose tensors are written in blocks of rows, in any order.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "table.safetensors")
      >>> spec = TensorSpec((3, 2), np.dtype(np.float32))
      >>> file = TensorFile(path, {"movie": spec})
      >>> file.write("movie", 1, np.ones((2, 2), np.float32))
      >>> file.write("movie", 0, np.zeros((1, 2), np.float32))
      >>> read_tensors(path)["movie"].tolist()
      [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        path: pathlib.Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str] | None = None,
    ):
        """Creates the file with its header.

        Args:
          path: the new file, which must not exist.
          specs: name to shape and dtype of each tensor.
          metadata: further strings for its readers.

        Raises:
          ExportError: if a tensor has the name that the format reserves.
        """
        if _METADATA in specs:
            raise ExportError(
                f"A safetensors file cannot hold a tensor of the name {_METADATA!r}, "
                "which the format reserves; rename the table or attribute."
            )
        header: dict[str, object] = {}
        if metadata:
            header[_METADATA] = dict(metadata)
        offsets, end = {}, 0
        # Readers expect aligned tensors, so the widest elements come first.
        for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
            spec = specs[name]
            offsets[name] = end
            header[name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.num_bytes],
            }
            end += spec.num_bytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % _ALIGNMENT)
        start = _LENGTH_BYTES + len(encoded)
        self._specs = dict(specs)
        self._offsets = {name: start + offset for name, offset in offsets.items()}
        self._path = path
        with path.open("xb") as file:
            file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
            file.truncate(start + end)

    def write(self, name: str, start: int, rows: np.ndarray) -> None:
        """Writes the rows `start` and on of a tensor, in the dtype of its spec."""
        spec = self._specs[name]
        assert rows.dtype == spec.dtype and rows.shape[1:] == spec.shape[1:]
        row_bytes = math.prod(spec.shape[1:]) * spec.dtype.itemsize
        # Not kept open: a model may have more tables than a process may open files.
        with self._path.open("r+b") as file:
            file.seek(self._offsets[name] + start * row_bytes)
            file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)

    def write_places(
        self, name: str, places: slice | np.ndarray, rows: np.ndarray
    ) -> None:
        """Writes rows of a tensor to places in any order."""
        if isinstance(places, slice):
            self.write(name, places.start, rows)
        elif len(places):
            tensor = writable_tensor(self._path, name)
            tensor[places] = rows
            tensor.flush()


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes whole tensors to a new file."""
    specs = {name: TensorSpec(x.shape, x.dtype) for name, x in tensors.items()}
    file = TensorFile(path, specs)
    for name, array in tensors.items():
        file.write(name, 0, array)


def read_tensors(
    path: pathlib.Path, specs: Mapping[str, TensorSpec] | None = None
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped into memory; pages are read on use.

    Args:
      path: the file.
      specs: the tensors that the file must hold, and no others. A size of -1 fits any.

    Raises:
      ExportError: if the file is missing or damaged, or holds other tensors.
    """
    if not path.is_file():
        raise ExportError(
            f"{path} is missing; export the model again, or copy the whole directory."
        )
    try:
        tensors = map_tensors(path)
    except CheckpointError as error:
        raise ExportError(f"{error} Export it again.") from None
    if specs is not None:
        check_tensors(path, tensors, specs)
    return tensors


def check_tensors(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    specs: Mapping[str, TensorSpec],
) -> None:
    """Refuses tensors of other names, shapes or dtypes than `specs`.

    Raises:
      ExportError: if they differ; `path` holds them.
    """
    found = {name: TensorSpec(x.shape, x.dtype) for name, x in tensors.items()}
    for name in sorted(found.keys() | specs.keys()):
        here, wanted = found.get(name), specs.get(name)
        if here is None or wanted is None or not wanted.fits(here):
            raise ExportError(
                f"{path} must hold {_text(wanted)} as tensor {name!r}, got "
                f"{_text(here)}; export it again."
            )


def _text(spec: TensorSpec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{spec.dtype} {list(spec.shape)}".replace("-1", "any")


def writable_tensor(path: pathlib.Path, name: str) -> np.memmap:
    """Returns a tensor of a file, mapped into memory; what is set is written.

    Raises:
      ExportError: if the file is damaged.
    """
    tensor = read_tensors(path)[name]
    assert isinstance(tensor, np.memmap)
    return np.memmap(path, tensor.dtype, "r+", tensor.offset, tensor.shape)
