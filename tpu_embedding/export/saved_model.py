"""Exports a model as a TensorFlow SavedModel that holds its tables as variables.

The SavedModel contains the same StableHLO program as `stablehlo.save` writes, in one
`XlaCallModule` operation, as those of jax2tf do. TensorFlow lags behind JAX in the
version of StableHLO that it reads, so the program is written in TensorFlow's version.
"""

import importlib
import importlib.util
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import numpy as np
from flax import nnx
from jax.extend.mlir.dialects import stablehlo

from tpu_embedding.export.artifact import (
    describe_table,
    encoded_blocks,
    read_document,
    write_artifact,
    write_document,
)
from tpu_embedding.export.feeding import Feeder
from tpu_embedding.export.program import Program, make_program
from tpu_embedding.export.row_formats import (
    RoundingError,
    RowFormat,
    check_row_format,
)
from tpu_embedding.export.signature import BATCH, OUTPUT, ExportError, Input, Signature
from tpu_embedding.types import PADDING_ROW_ID


def save_saved_model(
    model: nnx.Module,
    directory: str | pathlib.Path,
    *example: Any,
    method: str = "__call__",
    dtype: RowFormat = "float32",
    batch_size: int | None = None,
) -> None:
    """Exports a model as a TensorFlow SavedModel; it needs the extra `tf`.

    `tf.saved_model.load(directory)` returns an object that is called like the model.
    Ids are int64 tensors, or `tf.RaggedTensor` for ragged features. A feature with
    weights is a dict of `ids` and `weights`. Lists and tuples are dicts by position,
    `"0"`, `"1"` and so on. Its signature `serving_default` takes flat tensors, such as
    `watched_values` and `watched_row_splits`. `tables` and `dense` hold the variables.

    The host holds all tables at once, as TensorFlow does.

    Args:
      model: as for `save`.
      directory: as for `save`.
      *example: as for `save`.
      method: as for `save`.
      dtype: as for `save`.
      batch_size: as for `save`.

    Raises:
      ExportError: as for `save`, and if TensorFlow is missing or too old.
    """
    check_row_format(dtype)
    tf = _tensorflow()
    program = make_program(
        model, example, method=method, row_format=dtype, batch_size=batch_size
    )

    def write(path: pathlib.Path) -> None:
        errors = {name: RoundingError() for name in program.tables}
        served = _module(program, errors)
        flat = served.flat.get_concrete_function()
        tf.saved_model.save(served, str(path), signatures={"serving_default": flat})
        tables = {
            name: describe_table(program.tables[name], dtype, errors[name])
            for name in program.tables
        }
        versions = {
            "tensorflow": tf.__version__,
            "platforms": list(program.exported.platforms),
        }
        document = {"saved_model": versions, "tables": tables}
        write_document(path, document | {"signature": program.signature.to_json()})

    write_artifact(directory, write)


def open_saved_model(directory: str | pathlib.Path) -> Callable[..., Any]:
    """Returns a SavedModel of this module as a function that is called like the model.

    It takes NumPy arrays, and checks them, as `tpu_embedding.export.load` does.
    """
    tf = _tensorflow()
    document = read_document(directory)
    signature = Signature.from_json(document["signature"])
    feeder = Feeder(signature)
    flat = tf.saved_model.load(str(directory)).signatures["serving_default"]
    specs = _flat_specs(signature)

    def call(*arguments: Any) -> Any:
        arrays = feeder.arrays_of(arguments)
        tensors = {
            name: tf.constant(array, specs[name].dtype)
            for name, array in ((_flat_name(k), x) for k, x in arrays.items())
        }
        outputs = {name: tensor.numpy() for name, tensor in flat(**tensors).items()}
        return outputs[OUTPUT] if list(outputs) == [OUTPUT] else outputs

    return call


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


def _module(program: Program, errors: Mapping[str, RoundingError]) -> Any:
    """Returns a `tf.Module` that runs the program."""
    tf = _tensorflow()
    signature, call = program.signature, _call_module(program)

    class Served(tf.Module):
        """A model of tpu_embedding, exported."""

        def __init__(self):
            super().__init__()
            self.tables = _table_variables(program, errors)
            self.dense = {
                name: tf.Variable(array, trainable=False, name=name)
                for name, array in program.dense.items()
            }

        @tf.function(input_signature=_argument_specs(signature), autograph=False)
        def __call__(self, *arguments):
            arrays = {}
            for each in signature.inputs:
                leaf = _leaf_of(signature, each, arguments)
                arrays |= _arrays_of_leaf(each, leaf)
            return self._run(arrays)

        @tf.function(input_signature=[_flat_specs(signature)], autograph=False)
        def flat(self, tensors):
            arrays = {}
            for each in signature.inputs:
                arrays |= _arrays_of_flat(each, tensors)
            outputs = self._run(arrays)
            return outputs if isinstance(outputs, dict) else {OUTPUT: outputs}

        def _run(self, arrays):
            outputs = call(dict(self.tables), dict(self.dense), arrays)
            return outputs[OUTPUT] if list(outputs) == [OUTPUT] else outputs

    return Served()


def _call_module(program: Program) -> Any:
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
    program: Program, errors: Mapping[str, RoundingError]
) -> dict[str, Any]:
    """Returns one variable per table, read one after the other."""
    tf = _tensorflow()
    variables = {}
    for name, source in program.tables.items():
        spec = source.stored_spec(program.row_format)
        rows = np.empty(spec.shape, spec.dtype)
        for block in encoded_blocks({name: source}, program.row_format, errors):
            rows[block.start : block.start + len(block.rows)] = block.rows
        variables[name] = tf.Variable(rows, trainable=False, name=name)
    return variables


def _argument_specs(signature: Signature) -> list[Any]:
    """Returns the nest of tensor specs of each argument."""
    nest: dict[str, Any] = {}
    for each in signature.inputs:
        parts = _path(signature, each)
        level = nest
        for part in parts[:-1]:
            level = level.setdefault(part, {})
        level[parts[-1]] = _leaf_spec(each, signature.batch_size)
    return [nest.get(name, {}) for name in signature.arguments]


def _path(signature: Signature, each: Input) -> list[str]:
    """Returns the keys that lead to an input, the name of its argument first."""
    first, *others = signature.arguments
    if others or each.name == first:
        return each.name.split("/")
    return [first, *each.name.split("/")]


def _leaf_of(signature: Signature, each: Input, arguments: tuple[Any, ...]) -> Any:
    leaf: Any = dict(zip(signature.arguments, arguments, strict=True))
    for part in _path(signature, each):
        leaf = leaf[part]
    return leaf


def _leaf_spec(each: Input, batch_size: int | None) -> Any:
    """Returns the spec of an input as the model's caller gives it."""
    tf = _tensorflow()
    if each.spec is None:
        num_samples = batch_size if each.num_samples == BATCH else each.num_samples
        ids: Any = tf.RaggedTensorSpec([num_samples, None], tf.int64)
        weights: Any = tf.RaggedTensorSpec([num_samples, None], tf.float32)
    else:
        shape = [batch_size if size == BATCH else size for size in each.spec.shape]
        dtype = each.spec.dtype if each.kind == "array" else tf.int64
        ids, weights = tf.TensorSpec(shape, dtype), tf.TensorSpec(shape, tf.float32)
    return {"ids": ids, "weights": weights} if each.is_weighted else ids


def _flat_specs(signature: Signature) -> dict[str, Any]:
    """Returns the specs of `serving_default`, whose names TensorFlow restricts."""
    tf = _tensorflow()
    specs = {}
    for each in signature.inputs:
        for name, spec in each.arrays.items():
            shape = [size if isinstance(size, int) else None for size in spec.shape]
            is_ids = each.kind != "array" and spec.dtype == "int32"
            flat = _flat_name(name)
            if flat in specs:
                raise ExportError(
                    f"Names of inputs must differ in letters and digits, got two of "
                    f"{flat!r}; rename a feature."
                )
            specs[flat] = tf.TensorSpec(
                shape, tf.int64 if is_ids else spec.dtype, name=flat
            )
    return specs


def _flat_name(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _arrays_of_leaf(each: Input, leaf: Any) -> dict[str, Any]:
    """Returns the arrays of the program for one input of the model's caller."""
    weights = None
    if each.is_weighted:
        leaf, weights = leaf["ids"], leaf["weights"]
    parts: dict[str, Any] = {"": leaf}
    if each.spec is None:
        parts = {"values": leaf.values, "row_splits": leaf.row_splits}
        weights = None if weights is None else weights.values
    elif weights is not None:
        parts = {"ids": leaf}
    if weights is not None:
        parts["weights"] = weights
    named = {f"{each.name}/{k}" if k else each.name: x for k, x in parts.items()}
    return _converted(each, named)


def _arrays_of_flat(each: Input, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return _converted(each, {name: tensors[_flat_name(name)] for name in each.arrays})


def _converted(each: Input, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Converts ids to int32, and gives ragged ids the place that a program needs."""
    tf = _tensorflow()
    converted = {}
    for name, spec in each.arrays.items():
        array = arrays[name]
        if spec.dtype == "int32" and each.kind != "array":
            array = _to_int32(array)
        if spec.shape == (each.places,):
            padding = PADDING_ROW_ID if spec.dtype == "int32" else 0
            array = tf.concat([array, tf.constant([padding], array.dtype)], axis=0)
        converted[name] = array
    return converted


def _to_int32(ids: Any) -> Any:
    """Keeps ids that no int32 holds out of range, at the same end."""
    tf = _tensorflow()
    fits = (ids >= 0) & (ids <= PADDING_ROW_ID)
    outside = tf.where(ids > 0, PADDING_ROW_ID - 1, -1)
    return tf.where(fits, tf.cast(ids, tf.int32), outside)
