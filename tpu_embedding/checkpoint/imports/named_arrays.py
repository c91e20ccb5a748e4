"""Opens named arrays: dicts, `.npz` archives, safetensors, TorchRec state dicts.

Files may be untrusted, so a header must not make us allocate far more memory than the
file's size. `.safetensors` files are memory-mapped, so only the rows that are read take
memory.
"""

import json
import pathlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from tpu_embedding.checkpoint.imports.source import (
    MAX_EXPANSION,
    RowArray,
    SourceTable,
    TableSource,
    array_of,
    max_bytes_of_files,
)
from tpu_embedding.checkpoint.records import CheckpointError


def tables_by_name(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Groups arrays by table name: `"movie/accumulators"` is a slot of `"movie"`.

    Example:
      >>> import numpy as np
      >>> arrays = {"movie": np.ones((5, 2)), "movie/accumulators": np.ones((5, 2))}
      >>> arrays = {name: array_of(array) for name, array in arrays.items()}
      >>> print(tables_by_name(arrays, "arrays"))
      arrays
        movie: float64[5, 2], accumulators float64[5, 2]
    """
    slots: dict[str, dict[str, RowArray]] = {name: {} for name in arrays}
    for name in sorted(arrays):
        # Table names may contain slashes, so `movie/x` is a slot only if there is a
        # table `movie` with as many rows.
        table, _, slot = name.rpartition("/")
        if table in slots and arrays[table].shape[:1] == arrays[name].shape[:1]:
            slots.pop(name)
            slots[table][slot] = arrays[name]
    tables = {k: SourceTable(values=arrays[k], slots=x) for k, x in slots.items()}
    return TableSource(origin=origin, tables=tables)


def arrays_of_mapping(source: Mapping[str, Any]) -> dict[str, RowArray]:
    """Reads the arrays in a dict, or in an `.npz` archive that `np.load` opened."""
    if not isinstance(source, np.lib.npyio.NpzFile):
        return {name: array_of(values) for name, values in source.items()}
    archive: Any = source.zip
    path, members = archive.filename or "the .npz archive", archive.infolist()
    # An archive is decompressed in memory, so even a small archive of zeros could fill
    # the memory.
    num_bytes = sum(member.file_size for member in members)
    packed_bytes = sum(member.compress_size for member in members)
    if num_bytes > max_bytes_of_files(packed_bytes):
        raise CheckpointError(
            f"The arrays of {path} may be at most {MAX_EXPANSION} times as large as "
            f"the file, got {num_bytes} bytes from {packed_bytes} compressed bytes. "
            "Write them with np.savez, which doesn't compress."
        )
    try:
        return {name: array_of(values) for name, values in source.items()}
    except (
        EOFError,
        MemoryError,  # An array's header may claim any shape.
        OSError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error)[:300]}. Write or copy it again."
        ) from None


def arrays_of_path(path: pathlib.Path) -> dict[str, RowArray]:
    """Maps a safetensors file into memory, or all such files in a directory."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in inside if file.suffix == ".safetensors")
    arrays: dict[str, RowArray] = {}
    for file in files:
        tensors = map_tensors(file)
        if both := sorted(tensors.keys() & arrays.keys()):
            raise CheckpointError(
                f"{path} has several arrays named {both}. Open one of its files "
                "instead."
            )
        arrays |= {key: array_of(tensor) for key, tensor in tensors.items()}
    if not arrays:
        raise CheckpointError(
            f"The format of {path} is unknown. Pass .safetensors files, a TensorFlow "
            "or Orbax checkpoint, or arrays of np.load; convert torch.save files with "
            "safetensors.torch.save_file, and Keras files with np.savez."
        )
    return arrays


DTYPES: Final = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
"""Types by their names in a file's header."""

LENGTH_BYTES: Final = 8

MAX_HEADER_BYTES: Final = 2**23
"""Maximum header size, enough for 80,000 tensors. Parsing takes 25 times as much
memory."""


class StoredTensor(NamedTuple):
    """A tensor with its byte range in the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    end: int


def read_header(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, StoredTensor]:
    """Reads the header of a safetensors file, or raises `error_type`."""
    try:
        # Opening a pipe would block forever.
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(
                    f"its header must have at most {MAX_HEADER_BYTES} bytes, got "
                    f"{length}"
                )
            # This raises for a header that contradicts itself or the file, so the byte
            # ranges below can be trusted.
            safetensors.safe_open(path, framework="np")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                dtypes = sorted(DTYPES)
                raise ValueError(f"dtype {entry['dtype']} is not one of {dtypes}")
            start, end = (LENGTH_BYTES + length + x for x in entry["data_offsets"])
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            tensors[name] = StoredTensor(shape, dtype, start, end)
        return tensors
    except Exception as error:  # safetensors, JSON and NumPy raise different types.
        raise error_type(
            f"{path} cannot be read as a safetensors file: {str(error)[:300]}. Write "
            "or copy it again."
        ) from None


def map_tensors(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, np.ndarray]:
    """Maps a file into memory. Pages are read when used."""
    stored = read_header(path, error_type)
    try:
        # One map for all tensors, because each map keeps a file open.
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        return {
            name: content[x.start : x.end].view(x.dtype).reshape(x.shape)
            for name, x in stored.items()
        }
    except (OSError, ValueError) as error:
        raise error_type(f"{path} cannot be memory-mapped: {error}.") from None


# In TorchRec 1.8, names in pooled collections contain `embedding_bags`, and names in
# sequence collections contain `embeddings`. Fused optimizers name their slots momentum1
# and momentum2, whatever their rule is.
_WEIGHT: Final = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.(.+)\.weight")
_SLOT: Final = re.compile(r"(.*?)\.(?:weight\.)?momentum_?([12])")


def tables_of_state_dict(
    arrays: Mapping[str, RowArray], origin: str
) -> TableSource | None:
    """Finds the tables in a TorchRec state dict, or returns None for other arrays."""
    matches = {k: match[1] for k in arrays if (match := _WEIGHT.fullmatch(k))}
    if not matches:
        return None
    names = list(matches.values())
    tables = {}
    for key, name in matches.items():
        slots = _slots_of_state_dict(arrays, key, name)
        table = SourceTable(values=arrays[key], slots=slots)
        # Several collections may have a table with this name.
        tables[key if names.count(name) > 1 else name] = table
    return TableSource(origin=f"TorchRec state dict {origin}", tables=tables)


def _slots_of_state_dict(
    arrays: Mapping[str, RowArray], key: str, name: str
) -> dict[str, RowArray]:
    """Finds slot variables. If the table has dim > 1, `[rows, 1]` becomes `[rows]`."""
    collection = key.removesuffix(".weight")
    keys_by_slot: dict[str, list[str]] = {}
    for other in arrays:
        match = _SLOT.fullmatch(other)
        if match and (match[1] == name or match[1].endswith(f".{name}")):
            keys_by_slot.setdefault(f"momentum{match[2]}", []).append(other)
    slots = {}
    for slot, keys in keys_by_slot.items():
        # Prefer slots in the table's own collection. If several remain, choosing one
        # would be a guess.
        own = [other for other in keys if collection in other] or keys
        if len(own) == 1:
            array = arrays[own[0]]
            is_column = array.shape[1:] == (1,) and arrays[key].shape[1:] != (1,)
            slots[slot] = array.squeezed() if is_column else array
    return slots
