"""Opens arrays by name: dicts, what `np.load` returns, and files of other libraries.

Files of `.safetensors` are mapped to memory, so only the rows that are read take
memory. Their library checks the header.

TorchRec names a table `...embedding_bags.NAME.weight`, or `...embeddings.NAME.weight`
for sequences. A fused optimizer names its slot variables `...NAME.momentum1` and
`...NAME.momentum2`, or `...NAME.weight.momentum_1`, whatever the rule.

dynamicemb dumps keys and values of dynamic tables. Each rank of a job writes binary
files of its own, without headers: keys (int64), values (float32) and perhaps slot
variables (float32), all in one order. A file of JSON names the optimizer. Scores are
not read: all ids count as just used. The host holds such rows as a whole. Source:
github.com/NVIDIA/recsys-examples at 43465ae,
`corelib/dynamicemb/dynamicemb/batched_dynamicemb_tables.py`, `key_value_table.py` and
`optimizer.py`. Older versions, such as 0c45b80, name the slot variables `_opt_values`.
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
    by_shortest_names,
    max_bytes_of_files,
)
from tpu_embedding.checkpoint.records import CheckpointError


def tables_by_name(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns a source of arrays that have the names of tables.

    If there is a table `"movie"`, an array `"movie/accumulators"` of as many rows is
    its slot variable `accumulators`.

    Args:
      arrays: by name.
      origin: format and path, for messages.

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
        table, _, slot = name.rpartition("/")
        if table in slots and arrays[table].shape[:1] == arrays[name].shape[:1]:
            slots.pop(name)
            slots[table][slot] = arrays[name]
    tables = {k: SourceTable(values=arrays[k], slots=x) for k, x in slots.items()}
    return TableSource(origin=origin, tables=tables)


def arrays_of_mapping(source: Mapping[str, Any]) -> dict[str, RowArray]:
    """Returns the arrays of a dict, or of an `.npz` archive that `np.load` opened.

    Raises:
      CheckpointError: if an archive is damaged, or would need far more memory than it
        has bytes, as a small file of compressed zeros does.
    """
    if not isinstance(source, np.lib.npyio.NpzFile):
        return {name: array_of(values) for name, values in source.items()}
    archive: Any = source.zip
    path, members = archive.filename or "the .npz archive", archive.infolist()
    num_bytes = sum(member.file_size for member in members)
    packed_bytes = sum(member.compress_size for member in members)
    if num_bytes > max_bytes_of_files(packed_bytes):
        raise CheckpointError(
            f"The arrays of {path} must need at most {MAX_EXPANSION} times the bytes "
            f"of the file, got {num_bytes} for {packed_bytes}; write them with "
            "np.savez, which doesn't compress."
        )
    try:
        return {name: array_of(values) for name, values in source.items()}
    except (
        EOFError,
        MemoryError,
        OSError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error)[:300]}; write or copy it again."
        ) from None


def arrays_of_path(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the tensors of a safetensors file, or of all such files in a directory.

    Raises:
      CheckpointError: if there is none, or it is damaged.
    """
    if not path.exists():
        raise CheckpointError(f"There is no file or directory {path}.")
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in inside if file.suffix == ".safetensors")
    arrays: dict[str, RowArray] = {}
    for file in files:
        tensors = map_tensors(file)
        if both := sorted(tensors.keys() & arrays.keys()):
            raise CheckpointError(
                f"{path} has several arrays of the names {both}; open one of its files "
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
"""Name of a type in the header of a file to the type."""

LENGTH_BYTES: Final = 8

MAX_HEADER_BYTES: Final = 2**23
"""Largest header, enough for 80,000 tensors. Parsing needs some 25 times its size."""


class StoredTensor(NamedTuple):
    """A tensor in a file: the range of its bytes, from the start of the file on."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    end: int


def read_header(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Args:
      path: the file.
      error_type: raised if the file is missing, or its header contradicts it.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(
                    f"its header must have at most {MAX_HEADER_BYTES} bytes, got "
                    f"{length}"
                )
            # It raises an error for a header that contradicts itself or the file.
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
    except Exception as error:  # The library, JSON and NumPy have errors of their own.
        raise error_type(
            f"{path} cannot be read as a safetensors file: {str(error)[:300]}; write "
            "or copy it again."
        ) from None


def map_tensors(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Args:
      path: see `read_header`.
      error_type: see `read_header`.
    """
    stored = read_header(path, error_type)
    try:
        # One map for all tensors, since each needs an open file.
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        return {
            name: content[x.start : x.end].view(x.dtype).reshape(x.shape)
            for name, x in stored.items()
        }
    except (OSError, ValueError) as error:
        raise error_type(f"{path} cannot be mapped to memory: {error}.") from None


_WEIGHT: Final = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.(.+)\.weight")
_SLOT: Final = re.compile(r"(.*?)\.(?:weight\.)?momentum_?([12])")


def is_state_dict(arrays: Mapping[str, RowArray]) -> bool:
    """Returns True if TorchRec's collections of tables have such names."""
    return any(_WEIGHT.fullmatch(name) for name in arrays)


def tables_of_state_dict(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns the tables of a state dict.

    Tables of one name in two collections get the whole name of their tensor. Other
    tensors, such as dense weights, are left out.

    Args:
      arrays: by the names of the state dict.
      origin: format and path, for messages.
    """
    matches = {k: match[1] for k in arrays if (match := _WEIGHT.fullmatch(k))}
    names = list(matches.values())
    tables = {}
    for key, name in matches.items():
        slots = _slots_of_state_dict(arrays, key, name)
        table = SourceTable(values=arrays[key], slots=slots)
        tables[key if names.count(name) > 1 else name] = table
    return TableSource(origin=origin, tables=tables)


def _slots_of_state_dict(
    arrays: Mapping[str, RowArray], key: str, name: str
) -> dict[str, RowArray]:
    """Returns the slot variables of a table, `[rows]` instead of `[rows, 1]`."""
    collection = key.removesuffix(".weight")
    keys_by_slot: dict[str, list[str]] = {}
    for other in arrays:
        match = _SLOT.fullmatch(other)
        if match and (match[1] == name or match[1].endswith(f".{name}")):
            keys_by_slot.setdefault(f"momentum{match[2]}", []).append(other)
    slots = {}
    for slot, keys in keys_by_slot.items():
        # Two collections may have a table of this name.
        own = [other for other in keys if collection in other] or keys
        if len(own) == 1:
            array = arrays[own[0]]
            is_column = array.shape[1:] == (1,) and arrays[key].shape[1:] != (1,)
            slots[slot] = array.squeezed() if is_column else array
    return slots


_FIRST_KEYS: Final = re.compile(r"(.+)_emb_keys\.rank_0\.world_size_(\d+)")


def tables_of_dump(directory: pathlib.Path) -> TableSource | None:
    """Opens the tables of a dump. Returns None if the directory holds none.

    Tables of one name in two collections get the paths of their files.

    Args:
      directory: directory that was dumped, or a part of it.

    Raises:
      CheckpointError: if sizes of files contradict the keys.
      OSError: if a rank's file is missing.
    """
    tables: dict[tuple[str, ...], SourceTable] = {}
    for file in sorted(directory.rglob("*_emb_keys.rank_0.*")):
        if match := _FIRST_KEYS.fullmatch(file.name):
            path = file.with_name(match[1])
            table = _table_of_dump(path, int(match[2]))
            tables[path.relative_to(directory).parts] = table
    if not tables:
        return None
    return TableSource(
        origin=f"dynamicemb dump {directory}", tables=by_shortest_names(tables)
    )


def _table_of_dump(path: pathlib.Path, num_ranks: int) -> SourceTable:
    """Returns a table, whose files have names that begin with a path.

    Raises:
      CheckpointError: if a file does not have equally many numbers for each key, or the
        file that names the optimizer is not JSON.
    """

    def read(item: str, dtype: Any) -> np.ndarray:
        # Not lists: the number of ranks comes from a file's name, and may be any.
        names = (f"_{item}.rank_{i}.world_size_{num_ranks}" for i in range(num_ranks))
        files = (path.with_name(path.name + name) for name in names)
        return np.concatenate([np.fromfile(file, dtype) for file in files])

    keys = read("emb_keys", np.int64)

    def read_rows(item: str) -> np.ndarray:
        numbers = read(item, np.float32)
        if numbers.size % max(1, len(keys)):
            raise CheckpointError(
                f"{path}_{item} must have equally many numbers for each of {len(keys)} "
                f"keys, got {numbers.size} numbers; copy all files of the dump again."
            )
        return numbers.reshape(len(keys), numbers.size // max(1, len(keys)))

    values, slots = read_rows("emb_values"), {}
    items = [
        item
        for item in ("emb_opt_values", "opt_values")
        if path.with_name(f"{path.name}_{item}.rank_0.world_size_{num_ranks}").exists()
    ]
    if items:
        rows = read_rows(items[0])
        file = path.with_name(f"{path.name}_opt_args.json")
        try:
            rule = json.loads(file.read_text())["opt_type"]
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
        match rule:
            case "adam":
                first, second = np.split(rows, 2, axis=1)
                slots = {"m": first, "v": second}
            case "exact_adagrad":
                slots = {"accumulator": rows}
            case "exact_row_wise_adagrad":
                # Older versions also write the columns that fill up a line.
                slots = {"accumulator": rows[:, 0]}
            case _:
                slots = {"opt_values": rows}
    slots = {name: array_of(slot) for name, slot in slots.items()}
    return SourceTable(values=array_of(values), slots=slots, ids=keys)
