"""The backend of a stack: the steps that SparseCores run, and all others.

One operation of XLA looks rows up. Another sends the gradients of samples to the owners
of their rows, sums them by row, and applies the optimizer's rule to table and slot
variables, in place. If the ids of a step are beyond a limit of the operations, the
exchange and the rule's driver run instead, on the same rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec
from tpu_embedding.optimizers.probe import rates_are_finite
from tpu_embedding.plan.backend import Activations, Backend, ReadRows, UpdateRows
from tpu_embedding.plan.capacity import LANES
from tpu_embedding.plan.stack_plan import StackPlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    bank_lanes,
    round_up,
    rows_of_lines,
)
from tpu_embedding.rows.row_gradients import Sealed
from tpu_embedding.sparse_core import operations, samples
from tpu_embedding.sparse_core.limits import SparseCoreIds
from tpu_embedding.sparse_core.row_rule import RowRule, row_rule
from tpu_embedding.update.lazy_update import (
    slots_of,
    values_of,
    with_slots,
    with_values,
)

_ROW_ALIGNMENT: Final = 128
"""The rows of a SparseCore are a multiple of it: whole tiles of a TPU, at any dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCoreBackend(Backend):
    """SparseCores look up the rows of a stack, and may update them.

    Attributes:
      max_ids: the user's limit, see `te.SparseCore`; None: as the batch needs.
      cores: SparseCores per device that own rows.
    """

    lookups: str = "sparse_core"
    max_ids: int | None = None
    cores: int

    def arrange(self, layout: RowLayout) -> RowLayout:
        """Returns the layout of a shard whose rows are dealt to SparseCores."""
        return dataclasses.replace(
            layout,
            num_rows=rows_of_shard(layout.num_rows, self.cores),
            line_lanes=LANES,
            banks=self.cores,
            bank_name="SparseCores",
        )

    def notes(self, hardware: HardwareInfo) -> tuple[str, ...]:
        """Returns the skew that the limits of the operations hold."""
        held = "6 standard deviations above the mean of ids from one to another"
        if self.max_ids is not None:
            held = f"{self.max_ids:,} ids from one SparseCore to another"
        elif hardware.sends_rows_once:
            held += ", and one more row that every sample asks for"
        else:
            held += ", and 4 times as many ids of repeated rows"
        return (f"SparseCores hold {held}",)

    def prepare_ids(
        self,
        keys: Int[Array, " ids"],
        poolings: Sequence[PoolingSpec],
        stack: StackPlan,
    ) -> SparseCoreIds:
        """Returns the ids by SparseCore, and whether they fit; see `Backend`."""
        return samples.ids_by_core(
            keys, poolings, stack, cores=self.cores, max_ids=self.max_ids
        )

    def look_up(
        self,
        table: PackedRows,
        ids: SparseCoreIds,
        poolings: Sequence[PoolingSpec],
        otherwise: ReadRows,
        stack: StackPlan,
    ) -> Activations:
        """Looks rows up by one operation, if the ids fit; see `Backend`."""

        def look_up_rows(table: PackedRows) -> Activations:
            rows = rows_of_lines(table.lines, table.layout)
            sums = operations.lookup(ids.ids, rows, ids.sizes)
            activations = samples.by_feature(sums, self.cores, poolings, stack.dim)
            return activations, jnp.int32(0)

        return jax.lax.cond(ids.fits[0], look_up_rows, otherwise, table)

    def update(
        self,
        table: PackedRows,
        state: Any,
        gradient: Sealed,
        otherwise: UpdateRows,
        stack: TrainedStackPlan,
    ) -> tuple[PackedRows, Any]:
        """Updates rows by one operation, if the ids fit; see `Backend`."""
        if not self.replaces_update:
            return otherwise(table, state)
        opened = gradient.open()
        ids: SparseCoreIds = opened.routing.backend_ids
        rule = row_rule(stack.optimizer, stack.dim, bank_lanes(stack.dim))
        assert isinstance(rule, RowRule), rule
        gradients = samples.by_core(
            opened.cotangents, ids.sizes, opened.routing.poolings, stack.layout
        )

        def update_rows(table: PackedRows, state: Any) -> tuple[PackedRows, Any]:
            arrays = [table, *slots_of(state)]
            hyperparameters, new_values = rule.values(values_of(state))
            new = operations.update(
                ids.ids,
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
        is_finite = rates_are_finite(stack.optimizer, stack.dim, values_of(state))
        if is_finite is not None:
            may_run &= is_finite
        return jax.lax.cond(may_run, update_rows, otherwise, table, state)


def rows_of_shard(num_rows: int, cores: int) -> int:
    """Returns the rows of a shard, those that fill up its SparseCores included."""
    return cores * round_up(-(-num_rows // cores), _ROW_ALIGNMENT)
