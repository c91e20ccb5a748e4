"""Traces a model as a program for serving, without mesh, gradients or weights.

The program is a pure function of three dicts: tables, dense parameters and inputs.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
import jax.export
import numpy as np
from flax import nnx
from jax._src import config as jax_config  # not public

from tpu_embedding.argument_checks import invalid
from tpu_embedding.dynamic.directory import directory_name
from tpu_embedding.export.program_inputs import (
    Example,
    ExportError,
    Input,
    Signature,
    check_distinct,
    ids_of,
    keys_of,
    quoted_path,
)
from tpu_embedding.export.table_files import (
    LayerTable,
    RowFormat,
    table_prefix,
    tables_of_model,
)
from tpu_embedding.functional.serving_lookup import table_of
from tpu_embedding.nn.embedding import LAYER_VARIABLES
from tpu_embedding.nn.recording import open_recorder
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.features import FeaturePlan

PLATFORMS: Final = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingProgram:
    """A program for serving, with its weights."""

    # A function `(tables, dense, arrays) -> outputs`. All are dicts by name, but a
    # single output array is returned without a dict.
    exported: jax.export.Exported
    signature: Signature
    # `LayerTable`s if a model was traced, or arrays if an export was read.
    tables: dict[str, Any]
    dense: dict[str, np.ndarray]


def make_program(
    model: nnx.Module,
    arguments: Sequence[Any],
    *,
    method: str,
    row_format: RowFormat,
    batch_size: int | None,
) -> ServingProgram:
    """Traces a method, and lowers it for all platforms; see `stablehlo.save`."""
    if jax.process_count() > 1:
        raise ExportError(
            "A program must be exported by a single process, got a job of "
            f"{jax.process_count()}. Save a checkpoint with te.save, and export it in "
            "a separate process. te.export.save_tables works in a job."
        )
    tables = tables_of_model(model)
    example = Example.of(getattr(model, method), arguments)
    served = _ServedMethod(model, method, example)
    dense = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in served.dense.items()}
    arrays = example.structs(batch_size)
    try:
        # This first trace finds the tables that the method reads, and the ids that need
        # 64 bits.
        jax.eval_shape(served, _table_specs(tables, row_format), dense, arrays)
        tables = {k: table for k, table in tables.items() if k in served.used_tables}
        arrays = example.structs(batch_size, _wide_inputs(served.lookups))
        specs = _table_specs(tables, row_format), dense, arrays
        # Keeps the paths of this machine's source files out of the program.
        with jax_config.traceback_in_locations_limit(0):
            exported = jax.export.export(jax.jit(served), platforms=PLATFORMS)(*specs)
    except jax.errors.InconclusiveDimensionOperation as error:
        raise ExportError(
            "The model compares or computes with its batch size, which the exported "
            "program leaves open. Pass batch_size=N to export it for one batch size. "
            f"JAX says: {str(error).splitlines()[0]}"
        ) from error
    if exported.nr_devices != 1:
        rule = f"run on one device to be exported, and not on {exported.nr_devices}"
        fix = "Leave out shardings on its mesh when it is called for serving."
        raise invalid("te.export.save: model", rule, model, fix, ExportError)
    inputs = (
        _with_lookups(input_, served.lookups[input_.name]) for input_ in example.inputs
    )
    return ServingProgram(
        exported=exported,
        signature=Signature(arguments=example.arguments, inputs=tuple(inputs)),
        tables=tables,
        dense={name: np.asarray(x) for name, x in served.dense.items()},
    )


class _ServedMethod:
    """A model's method, as a function `(tables, dense, arrays) -> outputs`."""

    def __init__(self, model: nnx.Module, method: str, example: Example):
        self._method, self._example = method, example
        self._graph, self._of_layers, random, dense = nnx.split(
            model, LAYER_VARIABLES, nnx.RngState, ...
        )
        # A program for one device cannot hold keys that are on a mesh.
        self._random = jax.device_put(random, jax.devices()[0])
        leaves, self._dense_tree = jax.tree_util.tree_flatten_with_path(dense)
        self.dense = {_parameter_name(path): leaf for path, leaf in leaves}
        # Each call sets `used_tables` to the tables that it read, and `lookups` to the
        # features that looked up each input, by input name.
        self.used_tables: set[str] = set()
        self.lookups: dict[str, list[FeaturePlan]] = collections.defaultdict(list)

    def __call__(
        self,
        tables: Mapping[str, jax.Array],
        dense: Mapping[str, jax.Array],
        arrays: Mapping[str, jax.Array],
    ) -> Any:
        state = self._dense_tree.unflatten([dense[name] for name in self.dense])
        # Flax lets a trace change only variables that this trace has created.
        others = jax.tree.map(lambda leaf: leaf, (self._of_layers, self._random))
        model = nnx.merge(self._graph, *others, state)
        model.eval()
        layers = embedding_layers(model)
        with open_recorder(layers, None) as recorder:
            for path, layer in layers.items():
                prefix = table_prefix(path, layers)
                names = [t.name for stack in layer.plan.stacks for t in stack.tables]
                names += [directory_name(name) for name in names]
                own = {k: tables[prefix + k] for k in names if prefix + k in tables}
                layer.start_recording("serving", path, recorder, own)
            arguments, owners = self._example.rebuild(arrays)
            outputs = getattr(model, self._method)(*arguments)
        self.used_tables.clear()
        self.lookups.clear()
        for path, layer in layers.items():
            layer.stop_recording(recorder)
            for call in recorder.all_calls(path):
                for feature, ids in zip(call.plan.features, call.ids, strict=True):
                    table = table_prefix(path, layers) + table_of(feature, call.plan)
                    self.used_tables.add(table)
                    # Ids that the model itself has computed don't have an owner.
                    if (name := owners.get(id(ids_of(ids)))) is not None:
                        self.lookups[name].append(feature)
        return _named_outputs(outputs)


def _named_outputs(outputs: Any) -> Any:
    """Names outputs by path. A single array stays as it is."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(outputs)
    names = ["/".join(keys_of(path)) for path, _ in leaves]
    check_distinct("outputs", names)
    if names == [""]:
        return leaves[0][1]
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _wide_inputs(lookups: Mapping[str, Sequence[FeaturePlan]]) -> set[str]:
    """Finds the inputs that were looked up in dynamic tables."""
    wide = {
        name
        for name, features in lookups.items()
        if not all(feature.table.vocabulary.ids_are_rows for feature in features)
    }
    for name in sorted(wide):
        if any(feature.table.vocabulary.ids_are_rows for feature in lookups[name]):
            rule = "be looked up either in te.Dynamic tables or in others"
            found = [feature.table.name for feature in lookups[name]]
            fix = "Use two inputs."
            raise invalid(f"Ids of input {name!r}", rule, found, fix, ExportError)
    return wide


def _with_lookups(input_: Input, features: Sequence[FeaturePlan]) -> Input:
    """Sets an input's kind and limit, given the features that look it up."""
    limits = [
        feature.table.max_rows
        for feature in features
        if feature.table.vocabulary.ids_are_rows
        and feature.config.out_of_range_ids == "error"
    ]
    kind = "dense_ids" if features and input_.kind == "array" else input_.kind
    limit = min(limits, default=None)
    return dataclasses.replace(input_, kind=kind, vocabulary_size=limit)


def _table_specs(
    tables: Mapping[str, LayerTable], row_format: RowFormat
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        key: spec
        for name, table in tables.items()
        for key, spec in table.tensor_specs(name, row_format).items()
    }


def _parameter_name(path: Sequence[Any]) -> str:
    keys = path[:-1] if path[-1] == jax.tree_util.GetAttrKey("value") else path
    return quoted_path(keys_of(keys))
