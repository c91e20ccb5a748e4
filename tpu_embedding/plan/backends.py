"""Chooses the backend that reads, pools, spreads, updates and writes rows.

This is the only place that decides between XLA and Pallas kernels. `choose_backends`
decides once per stack, when the plan is made. Two directions also depend on the batch:
`choose_for_batch` decides for these when a lookup is traced, and its choice travels
with the lookup to the backward pass. Every choice carries its reason. `print(plan)`
shows those of the stack, and the compile report those of its batch, too.

XLA is the default on every device. Kernels have run on no TPU, so they are chosen by
name only.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import jax

from tpu_embedding.hardware import MEBIBYTE, HardwareInfo
from tpu_embedding.optimizers.analysis.kernel_lowering import (
    Refusal,
    lower_to_kernel,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.plan.backend_request import BackendChoice, BackendRequest
from tpu_embedding.rows.kernels.kernel_access import KernelAccess, RowAccess
from tpu_embedding.rows.kernels.kernel_limits import (
    ID_ALIGNMENT,
    MAX_ARRAYS,
    no_room_reason,
    unreachable_reason,
)
from tpu_embedding.rows.packed_rows import LANE_BYTES, RowLayout, round_up

_BLOCK_BYTES: Final = MEBIBYTE
"""Bytes of the rows of a block, so that a block and its gradients fit into a cache."""

_BLOCK_ALIGNMENT: Final = 128
"""The ids of a block are a multiple of this."""


class StackBackends(NamedTuple):
    """The choices for one stack.

    Attributes:
      read: gathers rows of the table, for the exchange or for the samples directly.
      pool: sums gathered rows into samples. A kernel does where the batch allows it.
      spread: distributes cotangents to rows. A kernel does where the batch allows it.
      update: runs the optimizer's rule on touched rows, and writes them.
      write: adds to rows where no kernel runs the update.
    """

    read: BackendChoice
    pool: BackendChoice
    spread: BackendChoice
    update: BackendChoice
    write: BackendChoice


class StackDevices(NamedTuple):
    """The devices of a stack, as far as they decide on backends.

    Attributes:
      hardware: kind of device; it decides the packing of rows.
      num_shards: devices that its rows are split over.
      num_replicas: devices that hold a copy of each row.
      capacity: the user's limit of ids per round, or None.
    """

    hardware: HardwareInfo
    num_shards: int
    num_replicas: int
    capacity: int | None

    @property
    def is_local(self) -> bool:
        """True if every device has all rows, and no limit asks for rounds."""
        return self.num_shards == 1 and self.capacity is None


class FeatureBatch(NamedTuple):
    """The static facts of one feature of a batch that decide on kernels. Per shard.

    Attributes:
      num_ids: places for ids.
      num_samples: output samples.
      valence: ids per sample; of a ragged feature, anything.
      is_ragged: True if samples have different numbers of ids.
      is_weighted: True if ids have gains.
    """

    num_ids: int
    num_samples: int
    valence: int
    is_ragged: bool
    is_weighted: bool

    @property
    def kernel_valence(self) -> int:
        """Rows of a sample that a kernel sums: all, if no id has a gain."""
        is_plain = not self.is_ragged and not self.is_weighted
        return max(1, self.valence) if is_plain else 1


class BatchBackends(NamedTuple):
    """The choices for one stack and one batch shape. Static.

    Attributes:
      samples_per_feature: samples of each feature, if samples share lines while rows
        are pooled and cotangents are spread; None: one sample per line.
      pool: sums gathered rows into samples.
      spread: distributes cotangents to rows.
      kernels: accesses that kernels make to rows in buffers; None: XLA makes all.
      ids_per_block: ids whose cotangents are summed and applied at a time; None: all.
    """

    samples_per_feature: int | None
    pool: BackendChoice
    spread: BackendChoice
    kernels: KernelAccess | None = None
    ids_per_block: int | None = None


def choose_backends(
    request: BackendRequest,
    layout: RowLayout,
    optimizer: RowOptimizer | None,
    slots: Sequence[jax.ShapeDtypeStruct],
    devices: StackDevices,
) -> StackBackends:
    """Chooses the backends of one stack.

    Args:
      request: from `requested_backend`.
      layout: packing of the table's rows.
      optimizer: rule of the tables; None: they are not trained.
      slots: row shape and dtype of each slot variable.
      devices: devices that hold the stack.
    """
    reason = request.reason if request.backend == "xla" else None
    reason = reason or _unreachable_reason(layout)
    if reason is not None:
        return _by_xla(_all_for(reason), optimizer, devices)
    reason = _no_update_reason(layout.dim, optimizer, slots)
    backends = StackBackends(
        read=request.choice,
        pool=_if_batch_allows(request.choice, layout, pools=True),
        spread=_if_batch_allows(request.choice, layout, pools=False),
        update=request.choice if reason is None else BackendChoice("xla", reason),
        write=request.choice,
    )
    return backends


def kernel_access(backends: StackBackends) -> KernelAccess | None:
    """Returns the accesses that kernels make to the rows of a stack.

    Returns None if no kernel runs in any direction. A kernel that pools, spreads or
    updates needs the packing of kernels, even where XLA makes all accesses.
    """
    for choice in backends:
        if choice.backend != "xla":
            accesses: list[RowAccess] = []
            if backends.read.backend != "xla":
                accesses.append("read")
            if backends.write.backend != "xla":
                accesses.append("add")
            return KernelAccess(backend=choice.backend, accesses=tuple(accesses))
    return None


def choose_for_batch(
    layout: RowLayout, backends: StackBackends, features: Sequence[FeatureBatch]
) -> BatchBackends:
    """Chooses what depends on the batch: how rows are pooled and cotangents spread.

    Args:
      layout: packing of the table's rows.
      backends: choices for the stack.
      features: features of the batch that look up in the stack.
    """
    kernels = kernel_access(backends)
    if backends.pool.backend == backends.spread.backend == "xla":
        block = None
        if backends.spread.form == "blocks":
            block = _ids_per_block(layout, sum(batch.num_ids for batch in features))
        return BatchBackends(None, backends.pool, backends.spread, kernels, block)
    reason = _no_lines_reason(layout, features)
    samples = None
    if layout.rows_per_line > 1 and reason is None:
        samples = features[0].num_samples
    pool = _for_batch(backends.pool, reason)
    spread = _for_batch(backends.spread, _no_spread_reason(features) or reason)
    return BatchBackends(samples, pool, spread, kernels)


def _for_batch(choice: BackendChoice, reason: str | None) -> BackendChoice:
    """Returns the choice for a batch, which may have a reason against a kernel."""
    if choice.backend == "xla":
        return choice
    if reason is not None:
        return BackendChoice("xla", reason)
    return choice._replace(condition=None)


def _all_for(reason: str) -> StackBackends:
    """Returns XLA in all directions, for one reason."""
    choice = BackendChoice("xla", reason)
    return StackBackends(choice, choice, choice, choice, choice)


def _by_xla(
    backends: StackBackends, optimizer: RowOptimizer | None, devices: StackDevices
) -> StackBackends:
    """Returns XLA in all directions, in the forms that suit the devices."""
    read, pool, spread, update, write = backends
    if devices.is_local:
        read = read._replace(form="direct")
    if not devices.hardware.is_tpu:
        # XLA:TPU starts and compiles one large gather faster than many small ones, and
        # writes the result of each. XLA:CPU and XLA:GPU fuse gathers with their sum.
        pool = pool._replace(form="fused")
    if _runs_in_blocks(optimizer, devices):
        spread = spread._replace(form="blocks")
        update = update._replace(form="blocks")
    return StackBackends(read, pool, spread, update, write)


def _runs_in_blocks(optimizer: RowOptimizer | None, devices: StackDevices) -> bool:
    """Returns True if gradients are summed and applied block by block.

    A block is a round, so a rule must not pay for each round as for a whole step.
    """
    is_one_cpu = devices.hardware.name == "cpu" and devices.num_replicas == 1
    return (
        is_one_cpu
        and devices.is_local
        and optimizer is not None
        and optimizer.rows == "touched"
        and optimizer.duplicates == "sum"
        and not (optimizer.keeps_gradient or optimizer.takes_totals)
    )


def _ids_per_block(layout: RowLayout, num_ids: int) -> int:
    in_cache = _BLOCK_BYTES // (LANE_BYTES * layout.dim)
    return round_up(max(1, min(in_cache, num_ids)), _BLOCK_ALIGNMENT)


def _unreachable_reason(layout: RowLayout) -> str | None:
    """Says why no kernel can read the rows; None: kernels can."""
    if layout.narrow_dtype is not None:
        return f"kernels take rows of float32, not of {layout.narrow_dtype}"
    return unreachable_reason(layout.num_rows, layout.dim, layout.line_lanes)


def _no_update_reason(
    dim: int,
    optimizer: RowOptimizer | None,
    slots: Sequence[jax.ShapeDtypeStruct],
) -> str | None:
    """Says why no kernel can apply a rule; None: one can."""
    if optimizer is None:
        return "these tables have no optimizer"
    if optimizer.rows == "every":
        return "the optimizer updates every row, not only the touched ones"
    if optimizer.duplicates != "sum":
        return "the optimizer sees each occurrence of an id, not only their sum"
    lowered = lower_to_kernel(optimizer, dim)
    if isinstance(lowered, Refusal):
        return f"the rule does not run in a kernel: {lowered.reason}"
    num_row_scalars = sum(slot.shape in ((), (1,)) for slot in slots)
    num_arrays = 1 + len(slots) - num_row_scalars
    if num_arrays + num_row_scalars > MAX_ARRAYS:
        return f"the table and its slot variables are more than {MAX_ARRAYS} arrays"
    if num_row_scalars or lowered.kernel_body.num_sums > 0:
        return no_room_reason(dim, num_arrays, num_row_scalars)
    return None


def _if_batch_allows(
    choice: BackendChoice, layout: RowLayout, *, pools: bool
) -> BackendChoice:
    """Adds the condition on the batch to the choice of a kernel."""
    if choice.backend == "xla":
        return choice
    return choice._replace(condition=_batch_condition(layout, pools=pools))


def _batch_condition(layout: RowLayout, *, pools: bool) -> str:
    """Says for which batches a kernel pools or spreads."""
    multiple = layout.rows_per_line * ID_ALIGNMENT
    conditions = [f"samples per device are a multiple of {multiple}"]
    if layout.rows_per_line > 1:
        conditions.append("equal for all features")
        conditions.append("none is ragged" if pools else "none is ragged or weighted")
    elif not pools:
        conditions.append("no feature is ragged or weighted")
    return ", ".join(conditions)


def _no_lines_reason(layout: RowLayout, features: Sequence[FeatureBatch]) -> str | None:
    """Says why rows of a batch cannot be pooled into lines; None: they can."""
    if layout.rows_per_line == 1:
        sizes = [feature.num_ids // feature.kernel_valence for feature in features]
        if any(size == 0 or size % ID_ALIGNMENT for size in sizes):
            return f"sums of a feature are no multiple of {ID_ALIGNMENT}: {sizes}"
        return None
    num_samples = {feature.num_samples for feature in features}
    if any(feature.is_ragged for feature in features):
        return "a feature of the stack is ragged"
    if any(feature.valence == 0 for feature in features):
        return "a feature of the batch has no place for ids"
    if len(num_samples) > 1:
        return f"features have different numbers of samples: {sorted(num_samples)}"
    multiple = layout.rows_per_line * ID_ALIGNMENT
    (size,) = num_samples
    if size % multiple:
        return f"samples per device are no multiple of {multiple}: {size}"
    return None


def _no_spread_reason(features: Sequence[FeatureBatch]) -> str | None:
    """Says why a kernel cannot spread the cotangents of a batch; None: it may."""
    if any(feature.is_ragged for feature in features):
        return "a feature of the stack is ragged"
    if any(feature.is_weighted for feature in features):
        return "a feature of the stack is weighted"
    if any(feature.num_ids == 0 for feature in features):
        return "a feature of the batch has no place for ids"
    sizes = [feature.num_samples for feature in features]
    if any(size % ID_ALIGNMENT for size in sizes):
        return f"samples per device are no multiple of {ID_ALIGNMENT}: {sizes}"
    return None
