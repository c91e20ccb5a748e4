"""Exports a model as a StableHLO program with its weights, and runs it."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from tpu_embedding.argument_checks import ArgumentType, check_type, invalid
from tpu_embedding.export.documents import (
    AGAIN,
    DENSE_FILE,
    DOCUMENT_FILE,
    PROGRAM_FILE,
    ExportDocument,
    check_files,
    check_new_directory,
    files_of,
    new_directory,
    read_document,
    write_document,
)
from tpu_embedding.export.program_inputs import ExportError, Feeder, Signature, by_input
from tpu_embedding.export.serving_program import ServingProgram, make_program
from tpu_embedding.export.table_files import (
    TABLES_DIR,
    RowFormat,
    check_row_format,
    read_tensors,
    tables_of_model,
    write_table_files,
    write_tensors,
)
from tpu_embedding.extras import require_extra
from tpu_embedding.paths import local_path
from tpu_embedding.strings.string_ids import (
    VOCABULARIES_DIR,
    Vocabulary,
    load_vocabularies,
    save_vocabularies,
)
from tpu_embedding.transfers import moves_arrays


@moves_arrays
def save(
    model: nnx.Module,
    directory: str | pathlib.Path,
    *example: Any,
    method: str = "__call__",
    dtype: RowFormat = "float32",
    batch_size: int | None = None,
    vocabularies: Mapping[str, Vocabulary] | None = None,
) -> None:
    """Exports a model for serving, as a StableHLO program with its weights.

    The program runs on a single CPU, NVIDIA GPU or TPU device, with any batch size and
    any number of ragged ids. It reads each table as one array with rows in natural
    order, using plain gathers. You can `load` it without the model's code.

    Args:
      model: a `TPUEmbedding`, or a module that owns embedding layers. It may be trained
        on any number of devices, and is exported in `eval` mode.
      directory: new directory for the export. It appears once all files are written.
      *example: a batch of method arguments, before or after `prepare_features`. Only
        shapes and dtypes matter. If an array's first axis has the batch size, calls may
        change the size of this axis. All other sizes are fixed.
      method: name of the method to export.
      dtype: table type in the files: `"float32"`, `"bfloat16"` or `"int8"`. An int8 row
        has a scale and a bias, in FBGEMM's layout.
      batch_size: fixed batch size. You need it if the model computes with its batch
        size, or if features have an `output_shape`. By default, calls may have any
        batch size.
      vocabularies: vocabularies for inputs that receive strings. A key is the last key
        in an input's path, or the input's name in the signature.

    Raises:
      ExportError: if the directory holds files or cannot be written, or if the extra
        `serving` is not installed. Also raised if the example does not fit, or if the
        model cannot run on one device or needs a fixed `batch_size`. Also raised if a
        vocabulary does not match exactly one input, or has more ids than its table has
        rows. `ExportError` is a ValueError.

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
    line = "te.export.save(model, directory, batch)"
    a_module = ArgumentType(nnx.Module, "an nnx.Module")
    check_type("te.export.save: model", a_module, model, line)
    if not example:
        fix = f"Write {line}."
        raise invalid("te.export.save: example", "be a batch", None, fix, TypeError)
    check_row_format(dtype)
    check_serving_extra()
    # `new_directory` checks this again, but only after the trace.
    check_new_directory(local_path(directory))
    program = make_program(
        model, example, method=method, row_format=dtype, batch_size=batch_size
    )
    of_inputs = by_input(vocabularies or {}, program.signature)
    serialized = program.exported.serialize()
    with new_directory(directory) as path:
        assert path is not None, "make_program rejects jobs of several processes"
        write_table_files(path, program.tables, dtype)
        write_tensors(path / DENSE_FILE, program.dense)
        (path / PROGRAM_FILE).write_bytes(serialized)
        save_vocabularies(path, of_inputs)
        write_document(path, program.signature)


@moves_arrays
def save_tables(
    model: nnx.Module, directory: str | pathlib.Path, *, dtype: RowFormat = "float32"
) -> None:
    """Writes each table in a model to its own safetensors file.

    A file holds one tensor with the table's name, and its rows in natural order. Rows
    pass through the host in blocks, never as a whole table. `export.json` lists the
    files. All processes of a job must call this together, and the first process writes.

    The tensor of a dynamic table `NAME` has 64 rows per bucket, in bucket order. A
    learned default row, if any, comes last. The file also holds the ids as the tensor
    `NAME:ids`, uint32 `[buckets, 128]`. Each of its rows has the upper words of a
    bucket's 64 ids, then their lower words. If a position is empty, both of its words
    have all bits set. Note that the host holds all ids at once.

    Args:
      model: a `TPUEmbedding`, or a module that owns embedding layers.
      directory: new directory for the files.
      dtype: see `save`.

    Raises:
      ExportError: if the directory holds files or cannot be written, or if `dtype` is
        unknown. `ExportError` is a ValueError.

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
        write_table_files(path, tables, dtype)
        if path is not None:
            write_document(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A program from `load`, with its weights on the default device.

    Attributes:
      signature: input names and kinds.
      tables: tables by name, in their stored format, including the ids of dynamic
        tables.
      dense: dense parameters by name.

    Example:
      >>> import tempfile
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     {"watched": te.FeatureConfig(table=table)}, rngs=nnx.Rngs(0)
      ... )
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     te.export.save(layer, folder + "/served", {"watched": np.array([1, 2])})
      ...     print(list(te.export.load(folder + "/served").tables))
      ['movie']
    """

    signature: Signature
    tables: Mapping[str, jax.Array] = dataclasses.field(repr=False)
    dense: Mapping[str, jax.Array] = dataclasses.field(repr=False)
    _call: Any = dataclasses.field(repr=False)
    _feeder: Feeder = dataclasses.field(repr=False)

    @moves_arrays
    def __call__(self, *arguments: Any) -> Any:
        """Runs the model on a batch.

        Ids are checked as in `prepare_features`. Note that each new batch size, and
        each new buffer size for ragged ids, recompiles the program.

        Args:
          *arguments: a batch like the example that you passed to `save`. Ragged
            features may be `RaggedIds`, `SparseIds`, nested lists or objects like
            `tf.RaggedTensor`. Features with a vocabulary take strings instead of ids.

        Returns:
          The outputs by name, or an array if the model returns a single array.

        Raises:
          TypeError, ValueError: if an input is missing or invalid.
        """
        arrays = self._feeder.arrays_of(arguments)
        return self._call(self.tables, self.dense, arrays)


def check_serving_extra() -> None:
    # Without flatbuffers, jax.export would fail, but only after the trace.
    require_extra(
        "serving", "flatbuffers", purpose="Exporting a program", error=ExportError
    )


@moves_arrays
def load(
    directory: str | pathlib.Path,
    *,
    verify: bool = True,
) -> ServedModel:
    """Loads an export written by `save`, without the model's code.

    Args:
      directory: directory written by `save`.
      verify: if True, compares each file with its digest in `export.json`, which takes
        about a second per GB.

    Raises:
      ExportError: if the directory lacks a program, or holds a damaged file or a
        symbolic link. `ExportError` is a ValueError.

    Example:
      >>> import tempfile
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     te.export.save(layer, folder + "/served", np.array([1, 2]))
      ...     served = te.export.load(folder + "/served")
      >>> served(np.array([3, 4, 5])).shape
      (3, 4)
    """
    path = local_path(directory)
    saved = read_export(path, verify=verify)
    try:
        vocabularies = by_input(load_vocabularies(path), saved.signature)
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise ExportError(
            f"{path / VOCABULARIES_DIR} must hold the inputs' vocabularies: "
            f"{str(error)[:300]}. {AGAIN}"
        ) from None
    device = jax.devices()[0]
    tables = {k: jax.device_put(x, _by_rows(device)) for k, x in saved.tables.items()}
    return ServedModel(
        signature=saved.signature,
        tables=tables,
        dense={name: jnp.asarray(x) for name, x in saved.dense.items()},
        _call=jit_program(saved.exported, tables, device),
        _feeder=Feeder(
            saved.signature,
            arrays_of_program(saved.exported),
            vocabularies,
        ),
    )


def read_export(path: pathlib.Path, *, verify: bool = True) -> ServingProgram:
    """Reads a program, with memory-mapped weights; see `load`."""
    document = read_document(path)
    if document.signature is None:
        fix = "Read an export of tables alone with safetensors."
        rule = "have a program of te.export.save"
        raise invalid(str(path), rule, document.signature, fix, ExportError)
    files = files_of(path)
    if verify:
        check_files(path, document.files)
    exported = _read_program(path, document)
    tables: dict[str, np.ndarray] = {}
    for file in files.values():
        if file.parent == path / TABLES_DIR:
            tables |= read_tensors(file)
    dense = read_tensors(path / DENSE_FILE)
    _check_fits(path, exported, document.signature, (tables, dense))
    return ServingProgram(
        exported=exported, signature=document.signature, tables=tables, dense=dense
    )


def _read_program(path: pathlib.Path, document: ExportDocument) -> jax.export.Exported:
    try:
        serialized = (path / PROGRAM_FILE).read_bytes()
        exported = jax.export.deserialize(bytearray(serialized))
        # Raises if a forged program takes other arguments.
        arrays_of_program(exported)
        return exported
    except Exception as error:  # Damaged bytes may raise anything.
        raise ExportError(
            f"{path / PROGRAM_FILE} cannot be read by jax {jax.__version__}: {error}. "
            f"It was written by {document.versions} on {document.written}, and jax can "
            "read programs for 180 days. Export the model again."
        ) from error


def _check_fits(
    path: pathlib.Path,
    exported: jax.export.Exported,
    signature: Signature,
    weights: tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
) -> None:
    """Raises ExportError if weights or signature don't fit the program."""
    arrays = arrays_of_program(exported)
    try:
        jax.eval_shape(exported.call, *weights, arrays)
    except (TypeError, ValueError) as error:
        raise ExportError(
            f"The tensors in {path} do not fit its program: {str(error)[:1000]}"
        ) from None
    # `jit_program` gives all tables a layout for two axes.
    if flat := [name for name, table in weights[0].items() if table.ndim != 2]:
        rule = "have two axes in each table"
        raise invalid(str(path), rule, flat, AGAIN, ExportError)
    names = [name for input_ in signature.inputs for name in input_.array_names(arrays)]
    if sorted(names) != sorted(arrays):
        owner = f"signature in {path / DOCUMENT_FILE}"
        rule = f"list the program's arrays {sorted(arrays)}"
        raise invalid(owner, rule, sorted(names), AGAIN, ExportError)


def arrays_of_program(exported: jax.export.Exported) -> dict[str, Any]:
    """Describes the program's input arrays, by name."""
    (_, _, arrays), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    return arrays


def jit_program(
    exported: jax.export.Exported, table_names: Iterable[str], device: jax.Device
) -> Any:
    """Jits the program. `table_names` includes the names of dynamic tables' ids."""
    # If XLA:TPU could choose the layout, it would store a table with dim below 128
    # column-major, and copy the whole table in every call. A row-major table is padded
    # to 128 lanes only once, when it is loaded.
    tables = dict.fromkeys(table_names, _by_rows(device))
    return jax.jit(exported.call, in_shardings=(tables, None, None))


def _by_rows(device: jax.Device) -> Format:
    return Format(Layout(major_to_minor=(0, 1)), SingleDeviceSharding(device))
