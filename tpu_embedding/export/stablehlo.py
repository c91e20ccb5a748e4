"""Exports a model as a StableHLO program with its weights beside it, and runs it."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.directories import new_directory
from tpu_embedding.export.documents import (
    DENSE_FILE,
    DOCUMENT_FILE,
    PROGRAM_FILE,
    ExportDocument,
    check_files,
    file_of_table,
    read_document,
    write_document,
)
from tpu_embedding.export.feeding import Feeder
from tpu_embedding.export.layer_tables import tables_of_model, write_table_files
from tpu_embedding.export.row_formats import RowFormat, check_row_format
from tpu_embedding.export.serving_program import make_program
from tpu_embedding.export.signature import OUTPUT, ExportError, Signature
from tpu_embedding.export.tensor_files import (
    check_tensors,
    read_tensors,
    write_tensors,
)
from tpu_embedding.nn.training import MODEL
from tpu_embedding.paths import local_path


@takes("te.export.", model=MODEL, directory=PATH)
def save(
    model: nnx.Module,
    directory: str | pathlib.Path,
    *example: Any,
    method: str = "__call__",
    dtype: RowFormat = "float32",
    batch_size: int | None = None,
) -> None:
    """Exports a model for serving: a StableHLO program, and its weights beside it.

    The program runs on one device of a CPU, NVIDIA GPU or TPU, with any batch size and
    any number of ragged ids. It reads one array per table, with rows in their natural
    order, by plain gathers. `load` runs it without the code of the model.

    Args:
      model: owns `TPUEmbedding` layers, or is one, trained on any number of devices.
        Its `eval` mode is exported.
      directory: new directory for the files; it appears when all are written.
      *example: arguments of the method: a batch, as it is or prepared. Only shapes and
        dtypes matter. Axes as long as the batch are free, all others are fixed.
      method: name of the method to export.
      dtype: type of the tables in the files: "float32", "bfloat16", or "int8" per row,
        in FBGEMM's layout. `export.json` holds the largest error that it makes.
      batch_size: None: any. A number: only this one, for models whose code computes
        with the batch size or whose features have an `output_shape`.

    Raises:
      ExportError: a ValueError, if the directory holds files, the example does not fit,
        or the model cannot run on one device or with any batch size.

    Example:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     {"watched": te.FeatureConfig(table=table)}, rngs=nnx.Rngs(0)
      ... )
      >>> directory = pathlib.Path(tempfile.mkdtemp(), "served")
      >>> te.export.save(layer, directory, {"watched": np.array([1, 2])})
      >>> served = te.export.load(directory)
      >>> served({"watched": np.array([3, 4, 5])})["watched"].shape
      (3, 4)
    """
    _check_flatbuffers()
    program = make_program(
        model, example, method=method, row_format=dtype, batch_size=batch_size
    )
    with new_directory(directory) as path:
        assert path is not None, "make_program refuses jobs of several processes"
        tables = write_table_files(path, program.tables, dtype)
        write_tensors(path / DENSE_FILE, program.dense)
        (path / PROGRAM_FILE).write_bytes(program.exported.serialize())
        write_document(
            path,
            kind="stablehlo",
            tables=tables,
            signature=program.signature,
            platforms=tuple(program.exported.platforms),
        )


@takes("te.export.", model=MODEL, directory=PATH)
def save_tables(
    model: nnx.Module, directory: str | pathlib.Path, *, dtype: RowFormat = "float32"
) -> None:
    """Writes each table of a model to a safetensors file of its own.

    Rows come in natural order, and pass through the host in blocks, never as a whole
    table. A file holds one tensor, named like the table. `export.json` lists them. All
    processes of a job call it together, and the first one writes.

    A dynamic table `NAME` has 64 rows per bucket, in the order of its buckets; a
    learned default row is the last one. Its ids are a tensor `NAME:ids`, uint32
    `[buckets, 128]`: the upper words of the 64 ids of a bucket, and then the lower
    ones. All ones stand for no id. The host holds all of these ids, but never all rows.

    Args:
      model: owns `TPUEmbedding` layers, or is one.
      directory: new directory for the files.
      dtype: see `save`.

    Raises:
      ExportError: a ValueError, if the directory holds files.

    Example:
      >>> import pathlib, tempfile
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> directory = pathlib.Path(tempfile.mkdtemp(), "tables")
      >>> te.export.save_tables(layer, directory, dtype="int8")
      >>> [path.name for path in (directory / "tables").iterdir()]
      ['movie.safetensors']
    """
    check_row_format(dtype)
    tables = tables_of_model(model)
    with new_directory(directory) as path:
        described = write_table_files(path, tables, dtype)
        if path is not None:
            write_document(path, kind="tables", tables=described)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A program that `load` read, with its weights on the default device.

    Attributes:
      signature: names, kinds, shapes and dtypes of inputs and outputs.
      tables: the tables, and the ids of dynamic ones, as they are stored.
      dense: the dense parameters.
      document: the content of `export.json`.
    """

    signature: Signature
    tables: Mapping[str, jax.Array]
    dense: Mapping[str, jax.Array]
    document: ExportDocument
    _call: Any
    _feeder: Feeder

    def __call__(self, *arguments: Any) -> Any:
        """Runs the model on a batch.

        Ids are checked as `prepare_features` checks them. Each new batch size, and each
        new size of the buffers of ragged ids, costs one compilation.

        Args:
          *arguments: a batch like the example of `save`. Ragged features may be
            `RaggedIds`, `SparseIds`, nested lists or objects like `tf.RaggedTensor`.

        Returns:
          The outputs by name, or the array if the model returns an array.

        Raises:
          TypeError, ValueError: if an input is missing or wrong.
        """
        arrays = self._feeder.arrays_of(arguments)
        outputs = self._call(self.tables, self.dense, arrays)
        return outputs[OUTPUT] if self.signature.returns_array else outputs


@takes("te.export.", directory=PATH)
def load(directory: str | pathlib.Path, *, verify: bool = True) -> ServedModel:
    """Reads a directory of `save`, without the code of the model; see there.

    Args:
      directory: written by `save`.
      verify: False to serve the files as they are. True compares each file with its
        digest in `export.json`, about a second per GB.

    Raises:
      ExportError: a ValueError, if the directory holds no program, or a damaged file.
    """
    path = local_path(directory)
    document = read_document(path)
    signature = document.signature
    if document.kind != "stablehlo" or signature is None:
        raise ExportError(
            f"{path} holds no program of te.export.save, but {document.kind}; read "
            f"tables with safetensors, or call tf.saved_model.load({str(path)!r})."
        )
    _check_flatbuffers()
    if verify:
        check_files(path, document.files)
    exported = _read_program(path, document)
    tables, dense = _read_weights(path, document, exported)
    device = jax.devices()[0]
    on_device = {k: jax.device_put(x, _by_rows(device)) for k, x in tables.items()}
    return ServedModel(
        signature=signature,
        tables=on_device,
        dense={name: jnp.asarray(x) for name, x in dense.items()},
        document=document,
        _call=jit_program(exported, tables, device),
        _feeder=Feeder(signature),
    )


def _read_program(path: pathlib.Path, document: ExportDocument) -> jax.export.Exported:
    try:
        serialized = (path / PROGRAM_FILE).read_bytes()
        return jax.export.deserialize(bytearray(serialized))
    except Exception as error:  # Damaged bytes raise anything.
        raise ExportError(
            f"{path / PROGRAM_FILE} cannot be read by jax {jax.__version__}: {error}. "
            f"It was written by {document.versions} on {document.written}; jax reads "
            "programs for 180 days, so export the model again."
        ) from error


def _read_weights(
    path: pathlib.Path, document: ExportDocument, exported: jax.export.Exported
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tables and dense parameters that a program takes.

    Raises:
      ExportError: if they are others, or the signature is another program's.
    """
    tables, dense = {}, read_tensors(path / DENSE_FILE)
    for name in document.tables:
        tables |= read_tensors(path / file_of_table(name))
    assert document.signature is not None
    (wanted_tables, wanted_dense, inputs), _ = jax.tree.unflatten(
        exported.in_tree, exported.in_avals
    )
    check_tensors(path, tables, wanted_tables)
    check_tensors(path / DENSE_FILE, dense, wanted_dense)
    taken = {name: (x.ndim, str(x.dtype)) for name, x in inputs.items()}
    arrays = document.signature.arrays
    found = {name: (len(x.shape), x.dtype) for name, x in arrays.items()}
    if found != taken:
        raise ExportError(
            f"The signature in {path / DOCUMENT_FILE} must have the arrays that the "
            f"program takes, with their numbers of axes and dtypes, {taken}, got "
            f"{found}; export the model again."
        )
    return tables, dense


def jit_program(
    exported: jax.export.Exported, table_names: Iterable[str], device: jax.Device
) -> Any:
    """Returns the program under `jax.jit`, with tables that lie row by row.

    XLA:TPU lays a table of dim below 128 out by columns if it may choose, and then
    copies the whole table in every call. By rows, it is padded to 128 lanes once.

    Args:
      exported: program from `make_program`.
      table_names: names of the program's tables, and of the ids of dynamic ones.
      device: holds the tables.
    """
    tables = dict.fromkeys(table_names, _by_rows(device))
    return jax.jit(exported.call, in_shardings=(tables, None, None))


def _by_rows(device: jax.Device) -> Format:
    return Format(Layout(major_to_minor=(0, 1)), SingleDeviceSharding(device))


def _check_flatbuffers() -> None:
    """Refuses to start without the package by which JAX writes and reads programs."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ExportError(
            "te.export needs the package flatbuffers, which jax.export writes programs "
            "with; install it by pip install 'tpu-embedding[serving]'."
        )
