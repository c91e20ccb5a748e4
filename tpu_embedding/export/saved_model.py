"""Exports a model as a TensorFlow SavedModel that holds its tables as variables.

The SavedModel contains the same StableHLO program as `stablehlo.save` writes, in one
`XlaCallModule` operation, as those of jax2tf do. TensorFlow lags behind JAX in the
version of StableHLO that it reads, so the program is written in TensorFlow's version,
which jax2tf does not do.
"""

import importlib
import importlib.util
import pathlib
import re
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.mlir.dialects import stablehlo

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.directories import new_directory
from tpu_embedding.export.documents import write_document
from tpu_embedding.export.layer_tables import describe_table, stored_blocks
from tpu_embedding.export.row_formats import RowFormat
from tpu_embedding.export.serving_program import ServingProgram, make_program
from tpu_embedding.export.signature import ExportError, Input, Signature
from tpu_embedding.nn.training import MODEL
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.id_mixing import NO_ID
from tpu_embedding.types import PADDING_ROW_ID


@takes("te.export.", model=MODEL, directory=PATH)
def save_saved_model(
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

    The host holds all tables at once, as TensorFlow does.

    Args:
      model: see `save`.
      directory: see `save`.
      *example: see `save`.
      method: see `save`.
      dtype: see `save`.
      batch_size: see `save`.

    Raises:
      ExportError: see `save`, and if TensorFlow is missing or too old.
    """
    tf = _tensorflow()
    program = make_program(
        model, example, method=method, row_format=dtype, batch_size=batch_size
    )
    names = _flat_names(program.signature)
    served, errors = _module(program, names)
    flat = served.serve.get_concrete_function(_flat_specs(program.signature, names))
    with new_directory(directory) as path:
        assert path is not None, "make_program refuses jobs of several processes"
        tf.saved_model.save(served, str(path), signatures={"serving_default": flat})
        write_document(
            path,
            kind="savedmodel",
            tables={
                name: describe_table(table, dtype, errors[name])
                for name, table in program.tables.items()
            },
            signature=program.signature,
            platforms=tuple(program.exported.platforms),
        )


def _tensorflow() -> Any:
    """Returns the module, which is imported at the first use only.

    Raises:
      ExportError: if it is not installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ExportError(
            "te.export.save_saved_model needs tensorflow 2.18 or later; install it by "
            "pip install 'tpu-embedding[tf]'."
        )
    return importlib.import_module("tensorflow")


def _module(
    program: ServingProgram, names: dict[str, str]
) -> tuple[Any, dict[str, float]]:
    """Returns a `tf.Module` that runs the program, and the error of each table.

    Args:
      program: the program.
      names: from `_flat_names`.
    """
    tf = _tensorflow()
    call = _call_module(program)
    variables, errors = _table_variables(program)

    class Served(tf.Module):
        """A model of tpu_embedding, exported."""

        def __init__(self):
            super().__init__()
            self.tables = variables
            self.dense = {
                name: tf.Variable(array, trainable=False, name=_tf_name(name))
                for name, array in program.dense.items()
            }

        @tf.function(autograph=False)
        def serve(self, tensors):
            arrays = {}
            for each in program.signature.inputs:
                parts = {k: tensors[names[x]] for k, x in each.named_parts.items()}
                arrays |= each.named(_converted(each, parts))
            return call(dict(self.tables), dict(self.dense), arrays)

    return Served(), errors


def _call_module(program: ServingProgram) -> Any:
    """Returns the program as a function of tensors, `(tables, dense, arrays)`."""
    tf = _tensorflow()
    # The operation that jax2tf emits, and TensorFlow's own version of StableHLO.
    of_tensorflow = importlib.import_module(
        "tensorflow.compiler.mlir.stablehlo.stablehlo"
    )
    tf_xla = importlib.import_module("tensorflow.compiler.tf2xla.python.xla")
    exported = program.exported
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
    types = [tf.as_dtype(output.dtype) for output in exported.out_avals]
    shapes = [
        [size if isinstance(size, int) else None for size in output.shape]
        for output in exported.out_avals
    ]

    def call(tables: Any, dense: Any, arrays: Any) -> Any:
        flat = jax.tree.leaves((tables, dense, arrays))
        outputs = tf_xla.call_module(
            [flat[i] for i in exported.module_kept_var_idx],
            version=exported.calling_convention_version,
            module=module,
            Tout=types,
            Sout=shapes,
            platforms=[name.upper() for name in exported.platforms],
        )
        return jax.tree.unflatten(exported.out_tree, outputs)

    return call


def _table_variables(
    program: ServingProgram,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns one variable per table, its ids, and the largest error of each table."""
    tf = _tensorflow()
    variables, errors = {}, dict.fromkeys(program.tables, 0.0)
    for name, source in program.tables.items():
        spec = source.stored_spec(program.row_format)
        rows = np.zeros(spec.shape, spec.dtype)
        for block in stored_blocks({name: source}, program.row_format):
            rows[block.places] = block.rows
            errors[name] = float(np.maximum(errors[name], block.error))
        variables[name] = tf.Variable(rows, trainable=False, name=_tf_name(name))
        if source.ids is not None:
            key = directory_name(name)
            variables[key] = tf.Variable(source.ids.lines, trainable=False)
    return variables, errors


def _flat_names(signature: Signature) -> dict[str, str]:
    """Returns the name in the signature of TensorFlow of each array of the program.

    Raises:
      ExportError: if two arrays have the same one.
    """
    names: dict[str, str] = {}
    for name in signature.arrays:
        flat = _tf_name(name)
        if flat in names.values():
            raise ExportError(
                "Names of inputs must differ in letters and digits, but several have a "
                f"tensor {flat!r} in the signature of a SavedModel, one of them "
                f"{name!r}; rename a feature."
            )
        names[name] = flat
    return names


def _flat_specs(signature: Signature, names: dict[str, str]) -> dict[str, Any]:
    """Returns the specs of the tensors of a signature, by `_flat_names`."""
    tf, specs = _tensorflow(), {}
    for each in signature.inputs:
        for part, spec in each.parts.items():
            shape = [size if isinstance(size, int) else None for size in spec.shape]
            dtype = spec.dtype
            if each.kind != "array" and part in (each.ids_part, "row_splits"):
                dtype = tf.int64
                is_words = each.is_wide and part == each.ids_part
                shape = shape[:-1] if is_words else shape
            flat = names[each.named_parts[part]]
            specs[flat] = tf.TensorSpec(shape, dtype, name=flat)
    return specs


def _tf_name(name: str) -> str:
    """Returns a name of letters, digits and underscores, which TensorFlow takes."""
    ascii_name = name.encode("ascii", "backslashreplace").decode()
    flat = re.sub(r"\W", "_", ascii_name)
    # TensorFlow refuses names that start with an underscore, and the argument `self`.
    return f"x_{flat}" if flat[:1] in ("", "_") or flat == "self" else flat


def _converted(each: Input, parts: dict[str, Any]) -> dict[str, Any]:
    """Converts ids to 32 bits, and gives ragged ids the place that a program needs."""
    tf = _tensorflow()
    converted = {}
    for part, spec in each.parts.items():
        array = parts[part]
        padding: Any = 0
        if part == each.ids_part and each.kind != "array":
            if each.is_wide:
                array, padding = tf.bitcast(array, tf.uint32), [NO_ID, NO_ID]
            else:
                array, padding = _to_int32(array), PADDING_ROW_ID
        elif part == "row_splits":
            array = _to_int32(array)
        if spec.shape[:1] == (each.places,):
            array = tf.concat([array, tf.constant([padding], array.dtype)], axis=0)
        converted[part] = array
    return converted


def _to_int32(ids: Any) -> Any:
    """Keeps ids that no int32 holds out of range, at the same end."""
    tf = _tensorflow()
    fits = (ids >= 0) & (ids <= PADDING_ROW_ID)
    outside = tf.where(ids > 0, PADDING_ROW_ID - 1, -1)
    return tf.where(fits, tf.cast(ids, tf.int32), outside)
