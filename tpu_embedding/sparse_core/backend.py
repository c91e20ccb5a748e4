"""The SparseCore backend, with its options, lookup and update.

One XLA operation looks up rows. Another sums gradients on the SparseCores that own the
rows, and applies the optimizer in place. If ids exceed the limits, the XLA backend runs
the step on the same rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from tpu_embedding.argument_checks import (
    broken_rules,
    convert_ints,
    int_rule,
    invalid,
    optional,
    raise_all,
)
from tpu_embedding.hardware import MAX_SPARSE_CORE_BYTES, HardwareInfo
from tpu_embedding.lookup._forward import PoolingSpec
from tpu_embedding.optimizers.probe import rates_are_finite
from tpu_embedding.plan.backend import (
    Activations,
    Backend,
    BackendOptions,
    ReadRows,
    UpdateRows,
)
from tpu_embedding.plan.capacity import LANES
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.mesh_options import num_slices_of
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.packed_rows import (
    LANE_BYTES,
    PackedRows,
    bank_lanes,
    round_up,
    rows_of_lines,
)
from tpu_embedding.rows.row_gradients import Sealed
from tpu_embedding.sparse_core import operations, samples
from tpu_embedding.sparse_core.limits import MAX_MINIBATCHES
from tpu_embedding.sparse_core.operations import unavailable_reason
from tpu_embedding.sparse_core.partitioned_ids import (
    PartitionedIds,
    SparseCoreIds,
)
from tpu_embedding.sparse_core.row_rule import RowRule, row_rule
from tpu_embedding.update.state import (
    slots_of,
    values_of,
    with_slots,
    with_values,
    with_values_if,
)
from tpu_embedding.xla import run_if

_EMULATED_CORES: Final = 2
"""Number of SparseCores that each device without SparseCores emulates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCore(BackendOptions):
    """Options for XLA's embedding operations on a TPU's SparseCores.

    The operations look up, pool and exchange rows, and apply the optimizer. They are
    also used by TensorFlow's TPUEmbedding and jax-tpu-embedding. Here they read your
    raw ids inside the step. Ids that don't fit in one operation are split into up to 64
    minibatches. If 64 aren't enough, the step runs XLA's gathers and scatters on the
    same rows, so ids are never dropped.

    Attributes:
      max_ids: maximum number of ids in a minibatch that one SparseCore may request from
        a single SparseCore, possibly itself. Use a multiple of 8. Also limits the
        number of distinct rows. A smaller limit is used if memory requires it. The
        limit changes speed, never results. Defaults to the mean number of ids plus a
        few standard deviations, with room for hot rows.
      cores: SparseCores per device. Defaults to the actual number. CPUs and GPUs
        emulate the operations in plain JAX, for tests. They default to 2, and only they
        accept a different number.
      exchange: whether to compile XLA's gathers and scatters into the program, for
        steps that 64 minibatches can't hold. This exchange takes most of the program's
        code and compile time. Without it, a step that doesn't fit returns NaN
        activations, so the loss is NaN, and `stats.rounds` is 1, not 0. `te.Optimizer`
        then skips the whole step: tables, slot variables, dense parameters and counts
        don't change. In your own loop, `te.gradients.is_whole(gradients)` is False. The
        training command stops at a NaN loss. A step with a NaN or infinite weight fails
        in the same way. However, the exchange is always compiled for stacks that
        SparseCores can't update, and for updates from summed gradients.

    Raises:
      ValueError: if an option is out of range.

    Example:
      >>> SparseCore(max_ids=1024).max_ids
      1024
    """

    max_ids: int | None = None
    cores: int | None = None
    exchange: bool = True

    def __post_init__(self):
        convert_ints(self, "max_ids", "cores")
        if not isinstance(self.exchange, bool):
            raise invalid("SparseCore.exchange", "be True or False", self.exchange)
        rules = {
            "max_ids": optional(int_rule(8)),
            "cores": optional(int_rule(2)),
        }
        raise_all(broken_rules(self, rules))
        if self.max_ids is not None and self.max_ids % 8:
            raise invalid("SparseCore.max_ids", "be a multiple of 8", self.max_ids)

    def choose(self, stack: StackPlan, mesh: Mesh) -> StackPlan:
        """Chooses the backend and row layout for a stack; see `BackendOptions`."""
        hardware = stack.hardware
        # A TPU's actual core count takes precedence. If the user's count differs, the
        # stack keeps the XLA backend.
        cores = hardware.cores_per_device or self.cores or _EMULATED_CORES
        problem = unavailable_reason(hardware, mesh.size, num_slices_of(mesh))
        has_other_cores = self.cores not in (None, hardware.cores_per_device)
        if not problem and hardware.is_tpu and has_other_cores:
            problem = (
                f"te.SparseCore(cores={self.cores}), but a {hardware.name} device has "
                f"{hardware.cores_per_device}"
            )
        problem = problem or _lookup_problem(stack, cores)
        if problem:
            return dataclasses.replace(stack, backend=Backend(reason=problem))
        reason, dim = "backend='sparse_core'", stack.dim
        rule: RowRule | str = "no optimizer"
        if stack.is_trained:
            rule = row_rule(stack.optimizer, dim, bank_lanes(dim))
        updates = isinstance(rule, RowRule)
        must_run_all = updates and not self.exchange
        backend = SparseCoreBackend(
            updates="sparse_core" if updates else "xla",
            must_run_all=must_run_all,
            max_ids=self.max_ids,
            cores=cores,
            reason=reason if updates else f"{reason}; update: {rule}",
        )
        layout = dataclasses.replace(
            stack.layout,
            num_rows=_rows_of_shard(stack.rows_per_shard, cores),
            tile_lanes=LANES,
            banks=cores,
            bank_name="SparseCores",
        )
        return dataclasses.replace(
            stack,
            backend=backend,
            layout=layout,
            rows_per_shard=layout.num_rows,
            notes=_notes(self.max_ids, must_run_all, hardware),
        )


def _lookup_problem(stack: StackPlan, cores: int) -> str:
    """Explains why SparseCores can't look up a stack. The text is empty if they can."""
    dtype_name = stack.tables[0].config.dtype_name
    if dtype_name != "float32":
        return f"SparseCores look up float32 rows, not {dtype_name}"
    if stack.replica_axes:
        return "the rows are not split over all devices"
    if stack.quantization is not None:
        return "SparseCores do not quantize rows"
    rows = _rows_of_shard(stack.rows_per_shard, cores)
    num_bytes = LANE_BYTES * rows * bank_lanes(stack.dim)
    if stack.hardware.is_tpu and num_bytes > MAX_SPARSE_CORE_BYTES:
        return (
            f"the table takes {format_bytes(num_bytes)} per device, and an operation "
            f"can use at most {format_bytes(MAX_SPARSE_CORE_BYTES)}"
        )
    return ""


def _notes(
    max_ids: int | None, must_run_all: bool, hardware: HardwareInfo
) -> tuple[str, ...]:
    """Describes the limits in `limits.py` for `print(plan)`."""
    held = "6 standard deviations above the mean ids between two SparseCores"
    if max_ids is not None:
        held = f"{max_ids:,} ids from one SparseCore to another"
    elif hardware.sends_rows_once:
        held += ", plus one row that every sample looks up"
    else:
        held += ", and 4 times as many ids if rows repeat"
    beyond = "fails" if must_run_all else "runs the exchange"
    return (
        f"a minibatch holds {held}",
        f"a step has up to {MAX_MINIBATCHES} minibatches, if its buffers have room; "
        f"a larger step {beyond}",
    )


_ROW_ALIGNMENT: Final = 128
"""A SparseCore's rows are padded to a multiple of this number.

At any dim, this many rows fill whole TPU tiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCoreBackend(Backend):
    """Looks up rows on SparseCores, and updates them if the rule is elementwise.

    See `te.SparseCore` for `max_ids` and `cores`.
    """

    lookups: str = "sparse_core"
    max_ids: int | None = None
    cores: int

    def prepare_ids(
        self,
        keys: Int[Array, " ids"],
        poolings: Sequence[PoolingSpec],
        stack: StackPlan,
        *,
        are_joined: bool = False,
    ) -> SparseCoreIds:
        return samples.ids_by_core(
            keys,
            poolings,
            stack,
            cores=self.cores,
            max_ids=self.max_ids,
            are_joined=are_joined,
        )

    def look_up(
        self,
        table: PackedRows,
        ids: SparseCoreIds,
        poolings: Sequence[PoolingSpec],
        otherwise: ReadRows,
        stack: StackPlan,
    ) -> Activations:
        def look_up_rows(table: PackedRows) -> Activations:
            rows = rows_of_lines(table.lines, table.layout)
            sums = operations.lookup(ids.ids, rows, ids.sizes)
            activations = samples.by_feature(sums, self.cores, poolings, stack.dim)
            return activations, jnp.int32(0), None

        (fits,) = ids.fits
        if not self.must_run_all:
            # Both branches have collectives, so `fits` must be equal on all devices.
            return jax.lax.cond(fits, look_up_rows, otherwise, table)
        activations, *_ = look_up_rows(table)
        activations = [jnp.where(fits, x, jnp.nan) for x in activations]
        return activations, 1 - fits.astype(jnp.int32), None

    @jax.named_scope("update")
    def update(
        self,
        table: PackedRows,
        state: Any,
        gradient: Sealed,
        otherwise: UpdateRows,
        stack: StackPlan,
        only_if: Bool[Array, ""] | None = None,
    ) -> tuple[PackedRows, Any]:
        if not self.replaces_update:
            return otherwise(table, state)
        opened = gradient.open()
        ids: SparseCoreIds = opened.routing.backend_ids
        rule = row_rule(stack.optimizer, stack.dim, bank_lanes(stack.dim))
        assert isinstance(rule, RowRule), rule
        gradients = samples.by_core(
            opened.cotangents, ids.sizes, opened.routing.poolings, stack.layout
        )

        def update_rows(
            table: PackedRows, state: Any, buffers: PartitionedIds = ids.ids
        ) -> tuple[PackedRows, Any]:
            arrays = [table, *slots_of(state)]
            hyperparameters, new_values = rule.values(values_of(state))
            new = operations.update(
                buffers,
                gradients,
                tuple(rows_of_lines(x.lines, x.layout) for x in arrays),
                hyperparameters,
                rule,
                ids.sizes,
            )
            table, *slots = (
                dataclasses.replace(x, lines=rows.reshape(x.lines.shape))
                for x, rows in zip(arrays, new, strict=True)
            )
            return table, with_values(with_slots(state, slots), new_values)

        (may_run,) = ids.fits
        # A rate that isn't finite must not change any row, as in `update/drivers.py`.
        is_finite = rates_are_finite(stack.optimizer, stack.dim, values_of(state))
        if is_finite is not None:
            may_run &= is_finite
        # No lookup has reported whether joined ids fit, so their update keeps the
        # exchange.
        if ids.are_joined or not self.must_run_all:

            def update_all(arrays: tuple[PackedRows, Any]) -> tuple[PackedRows, Any]:
                # Both branches write to the donated arrays, so XLA doesn't copy them.
                return jax.lax.cond(may_run, update_rows, otherwise, *arrays)

            if only_if is None:
                return update_all((table, state))
            # `run_if`, because a `cond` branch that only returned the arrays would copy
            # them.
            return run_if(only_if, update_all, (table, state))
        # With empty buffers, the operation changes no row.
        if only_if is not None:
            may_run &= only_if
        table, new = update_rows(table, state, ids.ids.where(may_run))
        return table, with_values_if(only_if, new, state)


def _rows_of_shard(num_rows: int, cores: int) -> int:
    return cores * round_up(-(-num_rows // cores), _ROW_ALIGNMENT)
