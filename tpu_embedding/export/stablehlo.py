"""Exports a model as a StableHLO program with its weights beside it, and runs it."""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.artifact import (
    DENSE_FILE,
    PROGRAM_FILE,
    SAVED_MODEL_FILE,
    TABLES_DIR,
    describe_program,
    read_document,
    write_artifact,
    write_document,
    write_table_files,
)
from tpu_embedding.export.delta_chain import DeltaChain
from tpu_embedding.export.digests import (
    DOCUMENT_FILE,
    check_files,
    digests_of_files,
)
from tpu_embedding.export.dynamic_tables import rising_ids
from tpu_embedding.export.feeding import Feeder
from tpu_embedding.export.layer_tables import tables_of_model
from tpu_embedding.export.row_formats import RowFormat, check_row_format
from tpu_embedding.export.serving_program import make_program
from tpu_embedding.export.signature import OUTPUT, ExportError, Signature
from tpu_embedding.export.tensor_files import (
    TensorSpec,
    check_tensors,
    read_tensors,
    write_tensors,
)
from tpu_embedding.export.writing import Writing
from tpu_embedding.nn.training import MODEL, Optimizer
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
        in FBGEMM's layout. `export.json` holds the error that it makes.
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

    def write(writing: Writing) -> None:
        document = {
            "program": describe_program(program.exported),
            "signature": program.signature.to_json(),
            "dense": {"file": DENSE_FILE},
            "tables": write_table_files(writing, program.tables, dtype),
        }

        def write_others(path: pathlib.Path) -> None:
            (path / PROGRAM_FILE).write_bytes(program.exported.serialize())
            write_tensors(path / DENSE_FILE, program.dense)
            write_document(path, document)

        writing.do(write_others)

    write_artifact(directory, write)


@takes("te.export.", model=MODEL, directory=PATH)
def save_tables(
    model: nnx.Module,
    directory: str | pathlib.Path,
    *,
    dtype: RowFormat = "float32",
    optimizer: Optimizer | None = None,
) -> None:
    """Writes each table of a model to a safetensors file of its own.

    Rows come in natural order, and pass through the host in blocks, never as a whole
    table. A file holds one tensor, named like the table. `export.json` lists them. All
    processes of a job call it together, and the first one writes.

    The file of a dynamic table `NAME` has the ids, rising, in a tensor `NAME:ids`, and
    their rows in that order in `NAME`. A learned default row is the last one. The host
    holds all of these ids, but never all rows.

    Args:
      model: owns `TPUEmbedding` layers, or is one.
      directory: new directory for the files.
      dtype: see `save`.
      optimizer: the model's, to start a chain of deltas, see `save_delta`. It changes:
        the next delta follows this export.

    Raises:
      ExportError: a ValueError, if the directory holds files, or the optimizer does not
        track the touched rows of all tables.

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
    tables = tables_of_model(model, rising_ids)
    chain = None if optimizer is None else DeltaChain(model, optimizer)
    document: dict[str, Any] = {}

    def write(writing: Writing) -> None:
        document["tables"] = write_table_files(writing, tables, dtype)
        writing.do(write_others)

    def write_others(path: pathlib.Path) -> None:
        document["files"] = digests_of_files(path)
        if chain is not None:
            document["deltas"] = chain.first_record(document["files"])
        write_document(path, document)

    write_artifact(directory, write)
    if chain is not None:
        chain.follow(document.get("deltas"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A program that `load` read, with its weights on the default device.

    Attributes:
      signature: names, kinds, shapes and dtypes of inputs and outputs.
      tables: the tables, and the ids of dynamic ones, as they are stored.
      dense: the dense parameters.
      document: the whole of `export.json`.
    """

    signature: Signature
    tables: Mapping[str, jax.Array]
    dense: Mapping[str, jax.Array]
    document: Mapping[str, Any]
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
    if (path / SAVED_MODEL_FILE).exists():
        raise ExportError(
            f"{path} holds a TensorFlow SavedModel, which te.export.load does not "
            f"read; call tf.saved_model.load({str(path)!r})."
        )
    document = read_document(path)
    _check_flatbuffers()
    if "program" not in document:
        raise ExportError(
            f"{path} holds tables without a program; read them with safetensors, "
            "or export the model with te.export.save."
        )
    if verify:
        check_files(path, document)
    signature = Signature.from_json(document["signature"])
    try:
        serialized = bytearray((path / PROGRAM_FILE).read_bytes())
        exported = jax.export.deserialize(serialized)
        specs = _argument_specs(exported)
    except Exception as error:  # Damaged bytes raise anything.
        raise ExportError(
            f"{path / PROGRAM_FILE} cannot be read by jax {jax.__version__}: "
            f"{error}. It was written by jax {document['versions']['jax']} on "
            f"{document['program']['written']}; export the model again."
        ) from error
    stored = {
        name: tensor
        for entry in document["tables"].values()
        for name, tensor in read_tensors(path / entry["file"]).items()
    }
    check_tensors(path / TABLES_DIR, stored, specs.tables)
    parameters = read_tensors(path / DENSE_FILE, specs.dense)
    _check_arrays(path, signature, specs.arrays)
    device = jax.devices()[0]
    tables = {k: jax.device_put(x, _by_rows(device)) for k, x in stored.items()}
    call = jit_program(exported, tables, device)
    dense = {name: jnp.asarray(x) for name, x in parameters.items()}
    return ServedModel(
        signature=signature,
        tables=tables,
        dense=dense,
        document=document,
        _call=call,
        _feeder=Feeder(signature),
    )


class _ArgumentSpecs(NamedTuple):
    """The arrays that a program takes, by name."""

    tables: dict[str, TensorSpec]
    dense: dict[str, TensorSpec]
    arrays: dict[str, TensorSpec]


def _argument_specs(exported: jax.export.Exported) -> _ArgumentSpecs:
    """Returns what a program takes; sizes that may change are -1."""
    specs = [
        TensorSpec(
            tuple(x if isinstance(x, int) else -1 for x in aval.shape), aval.dtype
        )
        for aval in exported.in_avals
    ]
    arguments, _ = jax.tree.unflatten(exported.in_tree, specs)
    return _ArgumentSpecs(*arguments)


def _check_arrays(
    path: pathlib.Path, signature: Signature, wanted: Mapping[str, TensorSpec]
) -> None:
    """Refuses a signature that is another program's."""
    found = {
        name: (len(spec.shape), spec.dtype) for name, spec in signature.arrays.items()
    }
    taken = {name: (len(spec.shape), str(spec.dtype)) for name, spec in wanted.items()}
    if found != taken:
        raise ExportError(
            f"The signature in {path / DOCUMENT_FILE} must have the arrays that the "
            f"program takes, with their numbers of axes and dtypes, {taken}, got "
            f"{found}; export the model again."
        )


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
