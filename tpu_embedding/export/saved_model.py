"""Exports a model as a TensorFlow SavedModel that holds its tables as variables.

The SavedModel contains the same StableHLO program as `stablehlo.save` writes, in one
`XlaCallModule` operation, as those of jax2tf do. TensorFlow lags behind JAX in the
version of StableHLO that it reads, so the program is written in TensorFlow's version.
"""

import importlib
import importlib.util
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.export
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.extend.mlir.dialects import stablehlo

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.artifact import (
    describe_table,
    encoded_blocks,
    read_document,
    write_artifact,
    write_document,
)
from tpu_embedding.export.digests import check_files
from tpu_embedding.export.feeding import Feeder
from tpu_embedding.export.row_formats import RoundingError, RowFormat
from tpu_embedding.export.saved_strings import (
    StringIds,
    check_strings,
    converter_of,
)
from tpu_embedding.export.serving_program import ServingProgram, make_program
from tpu_embedding.export.signature import BATCH, OUTPUT, ExportError, Input, Signature
from tpu_embedding.nn.training import MODEL
from tpu_embedding.paths import local_path
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
    strings: Mapping[str, StringIds] | None = None,
) -> None:
    """Exports a model as a TensorFlow SavedModel; it needs the extra `tf`.

    `tf.saved_model.load(directory)` returns an object that is called like the model.
    Ids are int64 tensors, or `tf.RaggedTensor` for ragged features. Row splits are all
    int64, or all int32. A feature with weights is a dict of `ids` and `weights`. Lists
    and tuples are dicts by position, `"0"`, `"1"` and so on. The signature
    `serving_default` takes flat tensors, such as `watched_values` and
    `watched_row_splits`. The signature `int32_row_splits` takes int32 row splits.
    `tables` and `dense` hold the variables.

    The host holds all tables at once, as TensorFlow does.

    Args:
      model: see `save`.
      directory: see `save`.
      *example: see `save`.
      method: see `save`.
      dtype: see `save`.
      batch_size: see `save`.
      strings: names of inputs that take tensors of strings in place of ids. The value
        is the `te.inputs.Vocabulary`, or
        `functools.partial(te.inputs.hash_ids, num_buckets=N)`, that turns their strings
        into ids; `"fingerprint"` for dynamic tables. The example has ids.

    Raises:
      ExportError: see `save`, and if TensorFlow is missing or too old, or `strings`
        names no input of ids.
    """
    tf = _tensorflow()
    program = make_program(
        model, example, method=method, row_format=dtype, batch_size=batch_size
    )
    strings = dict(strings or {})
    check_strings(strings, program.signature)

    def write_files(path: pathlib.Path) -> None:
        errors = {name: RoundingError() for name in program.tables}
        served = _module(program, errors, strings)
        signatures = _signatures(served, program.signature, strings)
        tf.saved_model.save(served, str(path), signatures=signatures)
        tables = {
            name: describe_table(program.tables[name], dtype, errors[name])
            for name in program.tables
        }
        versions = {
            "tensorflow": tf.__version__,
            "platforms": list(program.exported.platforms),
            "strings": sorted(strings),
        }
        document = {"saved_model": versions, "tables": tables}
        write_document(path, document | {"signature": program.signature.to_json()})

    write_artifact(directory, lambda writing: writing.do(write_files))


@takes("te.export.", directory=PATH)
def open_saved_model(
    directory: str | pathlib.Path, *, verify: bool = True
) -> Callable[..., Any]:
    """Returns a SavedModel of this module as a function that is called like the model.

    It takes NumPy arrays, and checks them, as `tpu_embedding.export.load` does.

    Args:
      directory: written by `save_saved_model`.
      verify: see `load`.
    """
    tf = _tensorflow()
    path, document = local_path(directory), read_document(directory)
    if verify:
        check_files(path, document)
    if "saved_model" not in document:
        raise ExportError(f"{path} holds no SavedModel; read it by te.export.load.")
    if named := document["saved_model"].get("strings"):
        raise ExportError(
            f"{path} takes strings for the inputs {named}; call what "
            "tf.saved_model.load returns."
        )
    signature = Signature.from_json(document["signature"])
    feeder, names = Feeder(signature), _flat_names(signature)
    flat = tf.saved_model.load(str(path)).signatures["serving_default"]
    specs = _flat_specs(signature, {}, tf.int64)

    def call(*arguments: Any) -> Any:
        arrays = feeder.arrays_of(arguments)
        tensors = {}
        for name, array in arrays.items():
            spec = specs[names[name]]
            if array.ndim > spec.shape.rank:  # ids of 64 bits, as words
                array = np.ascontiguousarray(array).view(np.int64)[..., 0]
            tensors[names[name]] = tf.constant(array, spec.dtype)
        outputs = {name: tensor.numpy() for name, tensor in flat(**tensors).items()}
        return outputs[OUTPUT] if signature.returns_array else outputs

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


def _module(
    program: ServingProgram,
    errors: Mapping[str, RoundingError],
    strings: Mapping[str, StringIds],
) -> Any:
    """Returns a `tf.Module` that runs the program."""
    tf = _tensorflow()
    signature, call = program.signature, _call_module(program)
    names = _flat_names(signature)
    to_ids = {name: converter_of(tf, ids) for name, ids in strings.items()}

    class Served(tf.Module):
        """A model of tpu_embedding, exported."""

        def __init__(self):
            super().__init__()
            self.tables = _table_variables(program, errors)
            self.dense = {
                name: tf.Variable(array, trainable=False, name=_tf_name(name))
                for name, array in program.dense.items()
            }
            self.vocabularies = {name: kept for name, (_, kept) in to_ids.items()}

        @tf.function(autograph=False)
        def __call__(self, *arguments):
            arrays = {}
            for each in signature.inputs:
                leaf = _leaf_of(signature, each, arguments)
                arrays |= self._converted(each, _parts_of_leaf(each, leaf))
            outputs = self._run(arrays)
            return outputs[OUTPUT] if signature.returns_array else outputs

        @tf.function(autograph=False)
        def flat(self, tensors):
            arrays = {}
            for each in signature.inputs:
                named = zip(each.parts, each.arrays, strict=True)
                parts = {part: tensors[names[name]] for part, name in named}
                arrays |= self._converted(each, parts)
            return self._run(arrays)

        def _converted(self, each, parts):
            convert, _ = to_ids.get(each.name, (None, None))
            return each.named(_converted(each, parts, convert))

        @tf.function(autograph=False)
        def _run(self, arrays):
            return call(dict(self.tables), dict(self.dense), arrays)

    return Served()


def _signatures(
    served: Any, signature: Signature, strings: Collection[str]
) -> dict[str, Any]:
    """Traces a module for all types of arguments; returns its signatures by name."""
    tf = _tensorflow()
    is_ragged = any(each.spec is None for each in signature.inputs)
    names = {"serving_default": tf.int64}
    # What `tf.io.RaggedFeature` reads.
    names |= {"int32_row_splits": tf.int32} if is_ragged else {}
    signatures = {}
    for name, splits in names.items():
        specs = _flat_specs(signature, strings, splits)
        signatures[name] = served.flat.get_concrete_function(specs)
        arguments = _argument_specs(signature, strings, splits)
        served.__call__.get_concrete_function(*arguments)
    return signatures


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
    program: ServingProgram, errors: Mapping[str, RoundingError]
) -> dict[str, Any]:
    """Returns one variable per table, read one after the other, and its ids."""
    tf = _tensorflow()
    variables = {}
    for name, source in program.tables.items():
        spec = source.stored_spec(program.row_format)
        rows = np.empty(spec.shape, spec.dtype)
        for block in encoded_blocks({name: source}, program.row_format, errors):
            rows[block.places] = block.rows
        variables[name] = tf.Variable(rows, trainable=False, name=_tf_name(name))
        if source.ids is not None:
            key = directory_name(name)
            variables[key] = tf.Variable(source.ids.tensor, trainable=False)
    return variables


def _argument_specs(
    signature: Signature, strings: Collection[str], splits: Any
) -> list[Any]:
    """Returns the nest of tensor specs of each argument."""
    tf, specs = _tensorflow(), {}
    for each in signature.inputs:
        ids = tf.string if each.name in strings else tf.int64
        spec = _leaf_spec(each, signature.batch_size, ids, splits)
        specs[_path(signature, each)] = spec
    nest = unflatten_dict(specs)
    return [nest.get(name, {}) for name in signature.arguments]


def _path(signature: Signature, each: Input) -> tuple[str, ...]:
    """Returns the keys that lead to an input, the name of its argument first."""
    first, *others = signature.arguments
    return each.path if others else (first, *each.path)


def _leaf_of(signature: Signature, each: Input, arguments: tuple[Any, ...]) -> Any:
    leaf: Any = dict(zip(signature.arguments, arguments, strict=True))
    for part in _path(signature, each):
        leaf = leaf[part]
    return leaf


def _leaf_spec(each: Input, batch_size: int | None, id_dtype: Any, splits: Any) -> Any:
    """Returns the spec of an input as the model's caller gives it."""
    tf = _tensorflow()
    if each.spec is None:
        num_samples = batch_size if each.num_samples == BATCH else each.num_samples
        shape = [num_samples, None]
        ids: Any = tf.RaggedTensorSpec(shape, id_dtype, 1, splits)
        weights: Any = tf.RaggedTensorSpec(shape, tf.float32, 1, splits)
    else:
        shape = [batch_size if size == BATCH else size for size in each.spec.shape]
        dtype = each.spec.dtype if each.kind == "array" else id_dtype
        ids, weights = tf.TensorSpec(shape, dtype), tf.TensorSpec(shape, tf.float32)
    return {"ids": ids, "weights": weights} if each.is_weighted else ids


def _flat_specs(
    signature: Signature, strings: Collection[str], splits: Any
) -> dict[str, Any]:
    """Returns the specs of a signature, by `_flat_names`."""
    tf, names = _tensorflow(), iter(_flat_names(signature).values())
    specs = {}
    for each in signature.inputs:
        for part, spec in each.parts.items():
            shape = [size if isinstance(size, int) else None for size in spec.shape]
            dtype = spec.dtype
            if each.kind != "array" and part == each.ids_part:
                dtype = tf.string if each.name in strings else tf.int64
                shape = shape[:-1] if each.is_wide else shape
            elif part == "row_splits":
                dtype = splits
            flat = next(names)
            specs[flat] = tf.TensorSpec(shape, dtype, name=flat)
    return specs


def _flat_names(signature: Signature) -> dict[str, str]:
    """Returns the name in a signature of TensorFlow of each array of the program.

    Raises:
      ExportError: if two arrays have the same one.
    """
    names, owners = {}, {}
    for each in signature.inputs:
        for part, name in zip(each.parts, each.arrays, strict=True):
            flat = _tf_name(f"{each.name}/{part}" if part else each.name)
            if flat in owners:
                raise ExportError(
                    "Names of inputs must differ in letters and digits, but the "
                    f"inputs {owners[flat]!r} and {each.name!r} both have a tensor "
                    f"{flat!r} in the signatures of a SavedModel; rename a feature."
                )
            names[name], owners[flat] = flat, each.name
    return names


def _tf_name(name: str) -> str:
    """Returns a name of letters, digits and underscores, which TensorFlow takes."""
    ascii_name = name.encode("ascii", "backslashreplace").decode()
    flat = re.sub(r"\W", "_", ascii_name)
    # TensorFlow refuses names that start with an underscore, and the argument `self`.
    return f"x_{flat}" if flat[:1] in ("", "_") or flat == "self" else flat


def _parts_of_leaf(each: Input, leaf: Any) -> dict[str, Any]:
    """Returns the tensors of one input, by the keys of `Input.parts`."""
    weights = None
    if each.is_weighted:
        leaf, weights = leaf["ids"], leaf["weights"]
    parts: dict[str, Any] = {each.ids_part: leaf}
    if each.spec is None:
        parts = {"values": leaf.values, "row_splits": leaf.row_splits}
        weights = None if weights is None else weights.values
    if weights is not None:
        parts["weights"] = weights
    return parts


def _converted(
    each: Input, parts: Mapping[str, Any], to_ids: Callable[[Any], Any] | None
) -> dict[str, Any]:
    """Converts ids to 32 bits, and gives ragged ids the place that a program needs."""
    tf = _tensorflow()
    converted = {}
    for part, spec in each.parts.items():
        array = parts[part]
        padding: Any = 0
        if part == each.ids_part and each.kind != "array":
            if to_ids is not None and array.dtype == tf.string:
                array = to_ids(array)
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
