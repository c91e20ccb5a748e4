"""Exports a model as a TensorFlow SavedModel that holds its tables as variables.

The SavedModel contains the same StableHLO program as `stablehlo.save` writes, in one
`XlaCallModule` operation, as jax2tf writes. TensorFlow lags behind JAX in the
version of StableHLO that it reads, so the program is written in TensorFlow's version,
which jax2tf does not do.
"""

import importlib
import pathlib
import re
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.export
from flax import nnx
from jax.extend.mlir.dialects import stablehlo

from tpu_embedding.dynamic.ids_64 import NO_ID
from tpu_embedding.export.documents import new_directory
from tpu_embedding.export.program_inputs import (
    WIDE_DTYPE,
    ExportError,
    Input,
    InputKind,
)
from tpu_embedding.export.stablehlo import (
    SavedProgram,
    arrays_of_program,
    read_export,
    save,
)
from tpu_embedding.export.table_files import RowFormat
from tpu_embedding.extras import require_extra
from tpu_embedding.types import PADDING_ROW_ID


def save_tensorflow(
    model: nnx.Module,
    directory: str | pathlib.Path,
    *example: Any,
    method: str = "__call__",
    dtype: RowFormat = "float32",
    batch_size: int | None = None,
) -> None:
    """Exports a model as a TensorFlow SavedModel; it needs the extra `tf`.

    Its signature `serving_default` takes flat tensors by name: `user` for an input
    `user`, `watched_values` and `watched_row_splits` for ragged ids, `watched_weights`
    for weights. Ids and row splits are int64. Of what `tf.saved_model.load(directory)`
    returns, `tables` and `dense` hold the variables. Strings are turned into ids by a
    `tf.Module` around it.

    The tables are written to the directory of temporary files first. Then the host
    holds all of them at once, as TensorFlow does.

    Args:
      model: see `save`.
      directory: see `save`.
      *example: see `save`.
      method: see `save`.
      dtype: see `save`.
      batch_size: see `save`.

    Raises:
      ExportError: see `save`, or if TensorFlow is missing or too old.
    """
    tf = _tensorflow()
    options: Any = {"method": method, "dtype": dtype, "batch_size": batch_size}
    with new_directory(directory) as path, tempfile.TemporaryDirectory() as scratch:
        program = pathlib.Path(scratch) / "program"
        save(model, program, *example, **options)
        served, flat = _module(read_export(program))
        try:
            tf.saved_model.save(served, str(path), signatures={"serving_default": flat})
        except tf.errors.OpError as error:  # such as a full disk
            raise OSError(error.message) from error


def _tensorflow() -> Any:
    """Returns the module, which is imported at the first use only.

    Raises:
      ExportError: if it is not installed.
    """
    purpose = "te.export.save_tensorflow"
    require_extra("tf", "tensorflow", purpose=purpose, error=ExportError)
    return importlib.import_module("tensorflow")


def _module(saved: SavedProgram) -> tuple[Any, Any]:
    """Returns a `tf.Module` that runs a program, and its function of flat tensors."""
    tf = _tensorflow()
    call = _call_module(saved.exported)
    arrays = arrays_of_program(saved.exported)
    names = _flat_names(arrays)

    def variables(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tf.Variable(array, trainable=False) for k, array in values.items()}

    class Served(tf.Module):
        """A model of tpu_embedding, exported."""

        def __init__(self):
            super().__init__()
            self.tables = variables(saved.tables)
            self.dense = variables(saved.dense)

        @tf.function(autograph=False)
        def serve(self, tensors):
            given = {name: tensors[flat] for name, flat in names.items()}
            for input_ in saved.signature.inputs:
                given |= _converted_ids(input_, given, arrays)
            return call(dict(self.tables), dict(self.dense), given)

    specs = {}
    for input_ in saved.signature.inputs:
        for name in input_.array_names(arrays):
            shape, dtype = _tf_shape(arrays[name].shape), arrays[name].dtype
            if input_.kind != "array" and name != input_.weights_name:
                # Ids and row splits. The last axis of wide ids has their words.
                shape = shape[:-1] if dtype == WIDE_DTYPE else shape
                dtype = "int64"
            specs[names[name]] = tf.TensorSpec(shape, dtype, name=names[name])
    served = Served()
    return served, served.serve.get_concrete_function(specs)


def _call_module(exported: jax.export.Exported) -> Any:
    """Returns the program as a function of tensors, `(tables, dense, arrays)`."""
    tf = _tensorflow()
    # The operation that jax2tf emits, and TensorFlow's own version of StableHLO.
    of_tensorflow = importlib.import_module(
        "tensorflow.compiler.mlir.stablehlo.stablehlo"
    )
    tf_xla = importlib.import_module("tensorflow.compiler.tf2xla.python.xla")
    if exported.calling_convention_version > (
        tf_xla.call_module_maximum_supported_version()
    ):
        raise ExportError(
            f"TensorFlow {tf.__version__} cannot call programs of jax "
            f"{jax.__version__}; install a newer TensorFlow."
        )
    version = stablehlo.get_smaller_version(
        of_tensorflow.get_current_version(), stablehlo.get_current_version()
    )
    module = stablehlo.serialize_portable_artifact_str(exported.mlir_module(), version)

    def call(*arguments: Any) -> Any:
        flat = jax.tree.leaves(arguments)
        outputs = tf_xla.call_module(
            [flat[i] for i in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module,
            Tout=[tf.as_dtype(output.dtype) for output in exported.out_avals],
            Sout=[_tf_shape(output.shape) for output in exported.out_avals],
            platforms=[name.upper() for name in exported.platforms],
        )
        outputs = jax.tree.unflatten(exported.out_tree, outputs)
        return outputs if isinstance(outputs, dict) else {"output": outputs}

    return call


def _tf_shape(shape: Iterable[Any]) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in shape]


def _flat_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the name in the signature of TensorFlow of each array of the program.

    Raises:
      ExportError: if two arrays have the same one.
    """
    flat = {name: _tf_name(name) for name in names}
    if len(set(flat.values())) < len(flat):
        raise ExportError(
            "Names of inputs must differ in letters and digits for a SavedModel, got "
            f"{sorted(flat)}; rename a feature."
        )
    return flat


def _tf_name(name: str) -> str:
    """Returns a name of letters, digits and underscores, which TensorFlow takes."""
    ascii_name = name.encode("ascii", "backslashreplace").decode()
    flat = re.sub(r"\W", "_", ascii_name)
    # TensorFlow rejects names that start with an underscore, and the argument `self`.
    return f"x_{flat}" if flat[:1] in ("", "_") or flat == "self" else flat


def _converted_ids(
    input_: Input, given: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the tensors of an input whose ids must be converted for the program.

    Ids of TensorFlow are int64. The program takes them as int32, or as two words of 32
    bits. Ragged ids get one more value, padding, because the number of values in the
    program is at least 1.

    Args:
      input_: the input; other arrays than ids stay as they are.
      given: tensors by the names of the program's arrays.
      arrays: shape and dtype of the program's arrays.
    """
    tf = _tensorflow()
    if input_.kind == "array":
        return {}
    ids, padding = given[input_.ids_name], [PADDING_ROW_ID]
    if arrays[input_.ids_name].dtype == WIDE_DTYPE:
        ids, padding = tf.bitcast(ids, tf.uint32), [[NO_ID, NO_ID]]
    else:
        ids = _to_int32(ids, input_.kind)
    if input_.kind != "ragged_ids":
        return {input_.ids_name: ids}
    converted = {
        input_.ids_name: tf.concat([ids, tf.constant(padding, ids.dtype)], axis=0),
        input_.row_splits_name: tf.cast(given[input_.row_splits_name], tf.int32),
    }
    if input_.weights_name in arrays:
        weights = given[input_.weights_name]
        converted[input_.weights_name] = tf.pad(weights, [[0, 1]])
    return converted


def _to_int32(ids: Any, kind: InputKind) -> Any:
    """Keeps ids that don't fit in int32 out of range, at the same end.

    Dense ids may hold padding. Ragged ones need none, so for them the same number is an
    id, as `prepare_features` takes int64 ids.
    """
    tf = _tensorflow()
    largest = PADDING_ROW_ID if kind == "dense_ids" else PADDING_ROW_ID - 1
    outside = tf.where(ids > 0, PADDING_ROW_ID - 1, -1)
    return tf.where((ids >= 0) & (ids <= largest), tf.cast(ids, tf.int32), outside)
