"""Exports a TensorFlow SavedModel, which holds the tables as variables.

The SavedModel runs the program from `stablehlo.save` in one `XlaCallModule` operation,
like jax2tf. JAX usually writes a newer StableHLO version than TensorFlow can read.
Unlike jax2tf, this module therefore writes the program in TensorFlow's version.
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

from tpu_embedding.argument_checks import invalid
from tpu_embedding.dynamic.ids_64 import NO_ID
from tpu_embedding.export.documents import new_directory
from tpu_embedding.export.program_inputs import (
    WIDE_DTYPE,
    ExportError,
    Input,
    InputKind,
)
from tpu_embedding.export.serving_program import ServingProgram
from tpu_embedding.export.stablehlo import arrays_of_program, read_export, save
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
    """Exports a model as a TensorFlow SavedModel.

    This requires the extra `tf`. The `serving_default` signature takes flat tensors by
    name. For example, a dense input `user` is the tensor `user`, and ragged ids
    `watched` are the tensors `watched_values` and `watched_row_splits`, with weights
    `watched_weights`. Ids and row splits are int64. The loaded object has the variables
    in its attributes `tables` and `dense`. To serve strings, wrap the object in a
    `tf.Module` that turns strings into ids.

    Note that the host holds all tables at once, because TensorFlow saves them from
    memory. The tables are first written to a temporary directory.

    Args:
      model: see `save`.
      directory: see `save`.
      *example: see `save`.
      method: see `save`.
      dtype: see `save`.
      batch_size: see `save`.

    Raises:
      ExportError: see `save`. Also raised if TensorFlow is missing or too old.

    Example:
      Where TensorFlow is installed::

          te.export.save_tensorflow(model, "served", {"user": np.array([3, 7])})
          served = tf.saved_model.load("served").signatures["serving_default"]
          outputs = served(user=tf.constant([7], tf.int64))
    """
    tf = _tensorflow()
    options: Any = {"method": method, "dtype": dtype, "batch_size": batch_size}
    with new_directory(directory) as path, tempfile.TemporaryDirectory() as scratch:
        program = pathlib.Path(scratch) / "program"
        save(model, program, *example, **options)
        served, flat = _module(read_export(program))
        try:
            tf.saved_model.save(served, str(path), signatures={"serving_default": flat})
        except tf.errors.OpError as error:
            # The disk may be full, for example. `new_directory` turns an OSError into
            # an ExportError.
            raise OSError(error.message) from error


def _tensorflow() -> Any:
    """Imports TensorFlow, or raises ExportError if it is not installed."""
    purpose = "te.export.save_tensorflow"
    require_extra("tf", "tensorflow", purpose=purpose, error=ExportError)
    return importlib.import_module("tensorflow")


def _module(saved: ServingProgram) -> tuple[Any, Any]:
    """Builds a `tf.Module` for a program, and its function that takes flat tensors."""
    tf = _tensorflow()
    call = _call_module(saved.exported)
    arrays = arrays_of_program(saved.exported)
    names = _flat_names(arrays)

    def variables(values: Mapping[str, Any]) -> dict[str, Any]:
        return {k: tf.Variable(array, trainable=False) for k, array in values.items()}

    class Served(tf.Module):
        """An exported tpu_embedding model."""

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
                # Clients pass ids and row splits as int64. `serve` splits a wide id
                # into two words, which are on the last axis of the program's array.
                shape = shape[:-1] if dtype == WIDE_DTYPE else shape
                dtype = "int64"
            specs[names[name]] = tf.TensorSpec(shape, dtype, name=names[name])
    served = Served()
    return served, served.serve.get_concrete_function(specs)


def _call_module(exported: jax.export.Exported) -> Any:
    """Wraps the program as a function of tensors, `(tables, dense, arrays)`."""
    tf = _tensorflow()
    # These modules have TensorFlow's own version of StableHLO, and the operation that
    # jax2tf emits.
    of_tensorflow = importlib.import_module(
        "tensorflow.compiler.mlir.stablehlo.stablehlo"
    )
    tf_xla = importlib.import_module("tensorflow.compiler.tf2xla.python.xla")
    newest = tf_xla.call_module_maximum_supported_version()
    if exported.calling_convention_version > newest:
        rule = f"be newer to call programs from jax {jax.__version__}"
        raise invalid("TensorFlow", rule, tf.__version__, kind=ExportError)
    version = stablehlo.get_smaller_version(
        of_tensorflow.get_current_version(), stablehlo.get_current_version()
    )
    module = stablehlo.serialize_portable_artifact_str(exported.mlir_module(), version)

    def call(*arguments: Any) -> Any:
        flat = jax.tree.leaves(arguments)
        outputs = tf_xla.call_module(
            # `jit` drops unused arguments from the module.
            [flat[i] for i in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module,
            Tout=[tf.as_dtype(output.dtype) for output in exported.out_avals],
            Sout=[_tf_shape(output.shape) for output in exported.out_avals],
            platforms=[name.upper() for name in exported.platforms],
        )
        outputs = jax.tree.unflatten(exported.out_tree, outputs)
        # A signature returns tensors by name, so a single output needs a name.
        return outputs if isinstance(outputs, dict) else {"output": outputs}

    return call


def _tf_shape(shape: Iterable[Any]) -> list[int | None]:
    return [size if isinstance(size, int) else None for size in shape]


def _flat_names(names: Iterable[str]) -> dict[str, str]:
    flat = {name: _tf_name(name) for name in names}
    if len(set(flat.values())) < len(flat):
        rule = "differ in letters or digits in a SavedModel"
        fix = "Rename a feature."
        raise invalid("Names of inputs", rule, sorted(flat), fix, ExportError)
    return flat


def _tf_name(name: str) -> str:
    """Keeps letters, digits and underscores, as TensorFlow requires."""
    ascii_name = name.encode("ascii", "backslashreplace").decode()
    flat = re.sub(r"\W", "_", ascii_name)
    # TensorFlow rejects names that start with an underscore, and the argument `self`.
    return f"x_{flat}" if flat[:1] in ("", "_") or flat == "self" else flat


def _converted_ids(
    input_: Input, given: Mapping[str, Any], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """Converts ids, row splits and weights to the program's types."""
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
    # Ragged ids get one additional padding value, because jax.export assumes that a
    # symbolic size is at least 1.
    converted = {
        input_.ids_name: tf.concat([ids, tf.constant(padding, ids.dtype)], axis=0),
        input_.row_splits_name: tf.cast(given[input_.row_splits_name], tf.int32),
    }
    if input_.weights_name in arrays:
        weights = given[input_.weights_name]
        converted[input_.weights_name] = tf.pad(weights, [[0, 1]])
    return converted


def _to_int32(ids: Any, kind: InputKind) -> Any:
    """Narrows ids to int32. Ids that don't fit become -1 or `PADDING_ROW_ID - 1`."""
    tf = _tensorflow()
    # In ragged ids, the padding value counts as an id that is too large, as in
    # `prepare_features`.
    largest = PADDING_ROW_ID if kind == "dense_ids" else PADDING_ROW_ID - 1
    outside = tf.where(ids > 0, PADDING_ROW_ID - 1, -1)
    return tf.where((ids >= 0) & (ids <= largest), tf.cast(ids, tf.int32), outside)
