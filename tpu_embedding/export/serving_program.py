"""Makes the program of a model for serving: no mesh, no gradients, no values of tables.

The program is a pure function of three dicts: tables, dense parameters and inputs. The
values of the tables and the parameters are no part of it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding.export.example import Example, ids_of
from tpu_embedding.export.layer_tables import (
    LayerTable,
    table_prefix,
    tables_of_model,
)
from tpu_embedding.export.row_formats import RowFormat, check_row_format
from tpu_embedding.export.signature import (
    BATCH,
    OUTPUT,
    ROW_SPLITS,
    ArraySpec,
    ExportError,
    Input,
    Signature,
    arrays_of,
    keys_of,
    quoted_path,
    refuse_repeated,
)
from tpu_embedding.functional.serving_lookup import ServedCall, table_of
from tpu_embedding.nn.embedding import (
    DynamicStatsVariable,
    EmbeddingTables,
    GradientGuard,
    LookupStatsVariable,
    RecordedCalls,
)
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.rows.id_directory import directory_name

PLATFORMS: Final = ("cpu", "cuda", "tpu")

_LAYER_VARIABLES: Final = (
    DynamicStatsVariable,
    EmbeddingTables,
    GradientGuard,
    LookupStatsVariable,
    RecordedCalls,
)
"""Variables of embedding layers. A program for serving does without them."""

_FIX_BATCH_SIZE: Final = (
    "pass batch_size=N to export it for one batch size, which its code may compute with"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingProgram:
    """A model as a program for serving, and the values that it takes.

    Attributes:
      exported: the program, `(tables, dense, arrays) -> outputs`, dicts by name.
      signature: names and shapes of inputs and outputs.
      tables: the tables that it reads, by name.
      dense: dense parameters and batch statistics, by name.
      row_format: storage format of the tables.
    """

    exported: jax.export.Exported
    signature: Signature
    tables: dict[str, LayerTable]
    dense: dict[str, np.ndarray]
    row_format: RowFormat


def make_program(
    model: nnx.Module,
    arguments: Sequence[Any],
    *,
    method: str,
    row_format: RowFormat,
    batch_size: int | None,
) -> ServingProgram:
    """Traces a method of a model, and lowers it for all platforms.

    Args:
      model: owns `TPUEmbedding` layers, or is one. Its `eval` mode is exported.
      arguments: example of the method's arguments.
      method: name of the method.
      row_format: storage format of the tables that the program takes.
      batch_size: None: any.

    Raises:
      ExportError: if the model cannot run without its mesh, or not with any batch
        size; if the format is unknown, or the job has several processes.
    """
    check_row_format(row_format)
    if jax.process_count() > 1:
        raise ExportError(
            f"A program is exported by one process, got a job of {jax.process_count()};"
            " save a checkpoint by te.save, and export it in a process of its own. "
            "te.export.save_tables works in a job."
        )
    function = getattr(model, method, None)
    if not callable(function):
        raise ExportError(
            f"method must name a method of {type(model).__name__}, got {method!r}."
        )
    example = Example.of(function, arguments, batch_size)
    all_tables = tables_of_model(model)

    def trace(example: Example) -> tuple[_ServedMethod, tuple[Any, ...], Any]:
        served = _ServedMethod(model, method, example)
        specs = (
            _table_specs(all_tables, row_format),
            {name: _struct(leaf) for name, leaf in served.dense.items()},
            _array_structs(example.inputs, batch_size),
        )
        with _explained_errors():
            return served, specs, jax.eval_shape(served, *specs)

    served, specs, outputs = trace(example)
    if shared := sorted(served.wide & served.narrow):
        raise ExportError(
            f"The ids of the inputs {shared} are looked up in tables with a te.Dynamic "
            "vocabulary and in others; make two inputs of them."
        )
    if served.wide:
        example = example.with_wide(served.wide)
        served, specs, outputs = trace(example)
    tables = {k: table for k, table in all_tables.items() if k in served.used_tables}
    specs = (_table_specs(tables, row_format), *specs[1:])
    with _explained_errors():
        exported = jax.export.export(jax.jit(served), platforms=PLATFORMS)(*specs)
    _check_portable(exported, model)
    inputs = tuple(
        _with_limit(each, served.looked_up.get(each.name)) for each in example.inputs
    )
    signature = Signature(
        arguments=example.arguments,
        inputs=inputs,
        arrays=arrays_of(inputs),
        outputs={name: _array_spec(x) for name, x in outputs.items()},
        returns_array=served.returns_array,
        batch_size=batch_size,
    )
    return ServingProgram(
        exported=exported,
        signature=signature,
        tables=tables,
        dense={name: np.asarray(x) for name, x in served.dense.items()},
        row_format=row_format,
    )


class _ServedMethod:
    """A method of a model as a function `(tables, dense, arrays) -> outputs`.

    Attributes:
      dense: name to value of each dense parameter.
      returns_array: True if the latest call returned an array, not a nest of arrays.
      used_tables: names of the tables that the latest call looked up in.
      looked_up: names of the inputs whose ids the latest call looked up, to the
        number that they must be below; 0: any.
      wide: names of the inputs that the latest call looked up in dynamic tables.
      narrow: names of those that it looked up in others.
    """

    def __init__(self, model: nnx.Module, method: str, example: Example):
        self._method, self._example = method, example
        self._graph, self._of_layers, random, dense = nnx.split(
            model, _LAYER_VARIABLES, nnx.RngState, ...
        )
        # The program of one device cannot hold keys that lie on a mesh.
        self._random = jax.device_put(random, jax.devices()[0])
        leaves, self._dense_tree = jax.tree_util.tree_flatten_with_path(dense)
        self.dense = {_parameter_name(path): leaf for path, leaf in leaves}
        self.returns_array = False
        self.used_tables: set[str] = set()
        self.looked_up: dict[str, int] = {}
        self.wide: set[str] = set()
        self.narrow: set[str] = set()

    def __call__(
        self,
        tables: Mapping[str, jax.Array],
        dense: Mapping[str, jax.Array],
        arrays: Mapping[str, jax.Array],
    ) -> dict[str, jax.Array]:
        """Runs the method with whole tables."""
        state = self._dense_tree.unflatten([dense[name] for name in self.dense])
        # Flax lets a trace change only variables that were made in it.
        others = jax.tree.map(lambda leaf: leaf, (self._of_layers, self._random))
        model = nnx.merge(self._graph, *others, state)
        model.eval()
        layers = embedding_layers(model)
        for path, layer in layers.items():
            prefix = table_prefix(path, layers)
            names = [t.name for stack in layer.plan.stacks for t in stack.tables]
            names += [directory_name(name) for name in names]
            own = {k: tables[prefix + k] for k in names if prefix + k in tables}
            layer.start_recording("serving", own)
        arguments, owners = self._example.rebuild(arrays)
        outputs = getattr(model, self._method)(*arguments)
        self.used_tables, self.looked_up = set(), {}
        self.wide, self.narrow = set(), set()
        for path, layer in layers.items():
            for call in layer.stop_recording():
                self._keep(call, table_prefix(path, layers), owners)
        leaves, _ = jax.tree_util.tree_flatten_with_path(outputs)
        paths = [keys_of(path) for path, _ in leaves]
        self.returns_array = paths == [()]
        names = ["/".join(path) if path else OUTPUT for path in paths]
        refuse_repeated("outputs", names)
        return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}

    def _keep(self, call: ServedCall, prefix: str, owners: Mapping[int, str]) -> None:
        """Remembers the tables of a call, and the inputs that its ids came from."""
        plan = call.plan
        all_ids, parts = iter(call.ids), []
        for feature in plan.features:
            if feature.table_index == 0:
                ids = next(all_ids)
                parts = list(ids.values()) if isinstance(ids, Mapping) else [ids]
            self.used_tables.add(prefix + table_of(feature, plan))
            for part in parts:
                name = owners.get(id(ids_of(part)))
                if name is not None:
                    self._keep_limit(name, feature)

    def _keep_limit(self, name: str, feature: FeaturePlan) -> None:
        """Remembers the smallest number of rows that the ids of an input go to."""
        limit = self.looked_up.setdefault(name, 0)
        is_dynamic = feature.table.dynamic is not None
        (self.wide if is_dynamic else self.narrow).add(name)
        if not is_dynamic and feature.config.out_of_range_ids == "error":
            num_rows = feature.table.max_rows
            self.looked_up[name] = min(limit or num_rows, num_rows)


def _with_limit(each: Input, limit: int | None) -> Input:
    is_ids = each.kind == "array" and (limit is not None or each.is_wide)
    kind = "dense_ids" if is_ids else each.kind
    return dataclasses.replace(each, kind=kind, vocabulary_size=limit or None)


def _table_specs(
    tables: Mapping[str, LayerTable], row_format: RowFormat
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        key: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        for name, table in tables.items()
        for key, spec in table.tensor_specs(name, row_format).items()
    }


def _array_structs(
    inputs: Sequence[Input], batch_size: int | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the program's arrays, with one symbol per free size."""
    scope = jax.export.SymbolicScope()

    def symbol(name: str) -> Any:
        return jax.export.symbolic_shape(name, scope=scope)[0]

    batch: Any = symbol(BATCH) if batch_size is None else batch_size
    structs = {}
    for number, each in enumerate(inputs):
        sizes = {BATCH: batch, ROW_SPLITS: batch + 1}
        if each.spec is None:
            sizes[each.places] = symbol(f"places_{number}")
        for name, spec in each.arrays.items():
            shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
            structs[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype))
    return structs


def _parameter_name(path: Sequence[Any]) -> str:
    keys = path[:-1] if path[-1] == jax.tree_util.GetAttrKey("value") else path
    return quoted_path(keys_of(keys))


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _array_spec(struct: Any) -> ArraySpec:
    shape = tuple(d if isinstance(d, int) else str(d) for d in struct.shape)
    return ArraySpec(shape=shape, dtype=str(struct.dtype))


@contextlib.contextmanager
def _explained_errors() -> Iterator[None]:
    """Says what to do about code that computes with the batch size."""
    try:
        yield
    except jax.errors.InconclusiveDimensionOperation as error:
        raise ExportError(
            "The model compares or computes with its batch size, which the exported "
            f"program leaves open; {_FIX_BATCH_SIZE}. JAX says: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _check_portable(exported: jax.export.Exported, model: nnx.Module) -> None:
    if exported.nr_devices != 1:
        raise ExportError(
            f"{type(model).__name__} must run on one device to be exported, got a "
            f"program for {exported.nr_devices}: its code names shardings of its mesh. "
            "Leave them out when it is called for serving."
        )
