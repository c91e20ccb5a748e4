"""XLA's SparseCore operations, which look up and update embedding rows.

Each operation runs per shard. On a TPU, it is one custom call that exchanges ids and
rows between all SparseCores in the program. Elsewhere, `reference` computes the same
results in plain JAX.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jaxtyping import Array, Float

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.sparse_core import reference
from tpu_embedding.sparse_core.limits import MAX_PARTITIONS, Limits, OperationSizes
from tpu_embedding.sparse_core.partitioned_ids import PartitionedIds
from tpu_embedding.sparse_core.row_rule import RowRule
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import as_variables


def unavailable_reason(
    hardware: HardwareInfo, num_devices: int, num_slices: int = 1
) -> str | None:
    """Explains why the operations can't run on these devices, or returns None.

    Example:
      >>> from tpu_embedding.hardware import hardware_by_name
      >>> unavailable_reason(hardware_by_name("v5e"), 4)
      'v5e has no SparseCores that XLA can use'
      >>> unavailable_reason(hardware_by_name("v5p"), 12)
      'the number of SparseCores must be a power of two, got 48'
      >>> unavailable_reason(hardware_by_name("cpu"), 3)  # in plain JAX
    """
    if hardware.is_tpu and not hardware.cores_per_device:
        return f"{hardware.name} has no SparseCores that XLA can use"
    if hardware.is_tpu and num_slices > 1:
        return f"the operations can't exchange rows between {num_slices} slices"
    num_cores = hardware.cores_per_device * num_devices
    # libtpu rejects 48 SparseCores (v5p:2x2x3) with error E3001, and accepts 8 to
    # 4,096.
    if num_cores & (num_cores - 1):
        return f"the number of SparseCores must be a power of two, got {num_cores}"
    if num_cores > MAX_PARTITIONS:
        return f"libtpu takes up to {MAX_PARTITIONS:,} SparseCores, not {num_cores:,}"
    # `compute_on` for SparseCores, which `sort_words` needs, works from jax 0.12 on.
    if hardware.is_tpu and jax.__version_info__ < (0, 12):
        return f"sorting the ids needs jax 0.12, got {jax.__version__}"
    return None


@jax.named_scope("sparse_core_lookup")
def lookup(
    ids: PartitionedIds,
    table: Float[Array, "rows width"],
    sizes: OperationSizes,
) -> Float[Array, "num_samples width"]:
    """Sums gain-weighted rows from all devices into the samples on this device.

    `ids` must fit on every device. `table` has the rows on this device, core by core.
    Samples without ids are zero.
    """

    def on_tpu(ids: PartitionedIds, table: Array) -> Array:
        # On XLA:TPU, adding a row and a column takes half the cycles of broadcasting a
        # constant, unless XLA sees that both are constants.
        shapes = ((1, table.shape[1]), (sizes.num_samples, 1))
        row, column = as_variables([jnp.zeros(x, jnp.float32) for x in shapes])
        zeros = row + column
        return _lookup_p.bind(*_buffers(ids), table, zeros, sizes=sizes)

    return jax.lax.platform_dependent(
        ids,
        table,
        tpu=on_tpu,
        default=functools.partial(reference.lookup, sizes=sizes),
    )


@jax.named_scope("sparse_core_update")
def update(
    ids: PartitionedIds,
    gradients: Float[Array, "num_samples width"],
    arrays: Sequence[Float[Array, "rows width"]],
    hyperparameters: Sequence[Float[Array, ""]],
    rule: RowRule,
    sizes: OperationSizes,
) -> tuple[Float[Array, "rows width"], ...]:
    """Applies a rule once to each row on this device that was looked up.

    A row's gradient is the gain-weighted sum of `gradients` over the row's samples on
    all devices. Other rows stay bitwise unchanged. `arrays` are the table and its slot
    variables, in state order. `hyperparameters` come from `rule.values`.
    """

    def on_tpu(
        ids: PartitionedIds, gradients: Array, arrays: Any, hyperparameters: Any
    ) -> tuple[Array, ...]:
        static = dict(num_arrays=len(arrays), rule=rule.stablehlo, sizes=sizes)
        operands = (*_buffers(ids), *arrays, gradients, *hyperparameters)
        return tuple(_update_p.bind(*operands, **static))

    return jax.lax.platform_dependent(
        ids,
        gradients,
        tuple(arrays),
        tuple(hyperparameters),
        tpu=on_tpu,
        default=functools.partial(reference.update, rule=rule, sizes=sizes),
    )


def _buffers(ids: PartitionedIds) -> tuple[Array, ...]:
    num_minibatches = ids.num_minibatches[0]
    return ids.pointers, ids.rows, ids.samples, ids.gains, num_minibatches


_lookup_p = Primitive("sparse_core_lookup")
_update_p = Primitive("sparse_core_update")
_update_p.multiple_results = True


@_lookup_p.def_abstract_eval
def _lookup_result(*operands: Any, sizes: OperationSizes) -> ShapedArray:
    return ShapedArray(operands[-1].shape, np.float32)


@_update_p.def_abstract_eval
def _update_results(*operands: Any, num_arrays: int, **_: Any) -> list[ShapedArray]:
    return [ShapedArray(x.shape, x.dtype) for x in operands[5 : 5 + num_arrays]]


def _lower_lookup(context: Any, *operands: Any, sizes: OperationSizes) -> Any:
    # The last operand holds zeros, to which the operation adds the sums.
    (result,) = context.avals_out
    types = [mlir.aval_to_ir_type(context.module_context, result)]
    lower = _custom_call(
        "SparseDenseMatmulWithMinibatchingOp", types, _config(sizes.limits)
    )
    return lower(context, *operands)


def _lower_update(
    context: Any, *operands: Any, num_arrays: int, rule: str, sizes: OperationSizes
) -> Any:
    module = context.module_context
    # Each stack in a program has its own rule. Merging gives the rule a unique name.
    function = mlir.merge_mlir_modules(
        module.module,
        "sparse_core_row_rule",
        ir.Module.parse(rule, context=module.context),
        dst_symtab=module.symbol_table,
    )
    types = [mlir.aval_to_ir_type(module, aval) for aval in context.avals_out]
    config = _config(
        sizes.limits,
        num_slot_variables=num_arrays - 1,
        # Not hyperparameters: five buffers, the arrays and the gradients.
        num_hyperparameters=len(operands) - 6 - num_arrays,
    )
    lower = _custom_call(
        "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp",
        [ir.TupleType.get_tuple(types)],
        config,
        called_computations=[function],
    )
    (result,) = lower(context, *operands)
    return [_sparse_element(result, i) for i in range(num_arrays)]


def _custom_call(name: str, types: Sequence[Any], config: str, **more: Any) -> Any:
    return jax.ffi.ffi_lowering(
        name,
        result_types=types,
        backend_config=config,
        api_version=1,
        skip_ffi_layout_processing=True,
        **more,
    )


def _sparse_element(values: Any, index: int) -> Any:
    """Takes an element from a tuple, and marks it as SparseCore data."""
    element = stablehlo.GetTupleElementOp(values, index)
    element.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"_xla_compute_type": ir.StringAttr.get("sparse")}
    )
    return element.result


def _config(limits: Limits, **more: int) -> str:
    config = {
        "max_ids_per_partition": limits.max_ids,
        "max_unique_ids_per_partition": limits.max_unique,
        "sharding_strategy": 1,  # Row r belongs to partition r % partitions.
        "pad_value": int(PADDING_ROW_ID),
        **more,
    }
    return json.dumps(
        {"sparse_dense_matmul_config": config, "device_type": "DEVICE_TYPE_SPARSECORE"}
    )


mlir.register_lowering(_lookup_p, _lower_lookup, platform="tpu")
mlir.register_lowering(_update_p, _lower_update, platform="tpu")
