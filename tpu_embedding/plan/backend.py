"""The interface of backends, which look up and update rows on a device.

A backend changes speed, never results. `Backend` itself runs the exchange in `lookup/`
and the drivers in `update/`. Subclasses override its methods. An override receives the
exchange or driver as `otherwise`, and calls it in steps that the subclass cannot run.
The core finds subclasses only through `_OPTIONS`. To add a backend, extend `_OPTIONS`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.argument_checks import invalid
from tpu_embedding.rows.packed_rows import PackedRows

if TYPE_CHECKING:
    from tpu_embedding.lookup._forward import PoolingSpec
    from tpu_embedding.plan.plan import StackPlan
    from tpu_embedding.rows.row_gradients import Sealed

Activations = tuple[list[Float[Array, "_ dim"]], Int[Array, ""], Int[Array, ""] | None]
"""One array per feature in a stack, the number of exchange rounds, and how many reads
asked for rows that the device owns but lacks, from `num_missing`."""

ReadRows = Callable[[PackedRows], Activations]
"""Looks up a batch's rows in a table."""

UpdateRows = Callable[[PackedRows, Any], tuple[PackedRows, Any]]
"""Maps a table and its rule's state to the updated table and state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """A hashable part of the plan that looks up and updates rows, by default with XLA.

    All methods are traced, and see one shard.

    Attributes:
      must_run_all: True if programs have no fallback for steps that the backend cannot
        run. The result of `prepare_ids` then has the field `fits`, bool `[1]`, which is
        False on all devices if the ids of any device don't fit.
      reason: why the plan chose this backend.
    """

    # Names for reports. "xla" means that the exchange or the driver always runs.
    lookups: str = "xla"
    updates: str = "xla"
    must_run_all: bool = False
    # Not compared, so plans that differ only in reasons share compiled programs.
    reason: str = dataclasses.field(default="", compare=False)

    @property
    def replaces_lookup(self) -> bool:
        """True if the exchange runs only in steps that the backend cannot run."""
        return self.lookups != "xla"

    @property
    def replaces_update(self) -> bool:
        """True if the drivers run only in steps that the backend cannot run."""
        return self.updates != "xla"

    def prepare_ids(
        self,
        keys: Int[Array, " ids"],
        poolings: Sequence["PoolingSpec"],
        stack: "StackPlan",
        *,
        are_joined: bool = False,
    ) -> Any:
        """Prepares keys, as defined in `lookup/_forward.py`, for lookup and update.

        If `are_joined`, the keys come from several lookups, whose gradients are summed.
        """
        return None

    def look_up(
        self,
        table: PackedRows,
        ids: Any,
        poolings: Sequence["PoolingSpec"],
        otherwise: ReadRows,
        stack: "StackPlan",
    ) -> Activations:
        """Pools rows into samples. Without an exchange, the number of rounds is 0."""
        return otherwise(table)

    def update(
        self,
        table: PackedRows,
        state: Any,
        gradient: "Sealed",
        otherwise: UpdateRows,
        stack: "StackPlan",
        only_if: Bool[Array, ""] | None = None,
    ) -> tuple[PackedRows, Any]:
        """Applies a `StackGradient`, in place if table and state are donated.

        If `only_if` is False, nothing changes. If this backend replaces the update,
        `backend_ids` in the gradient's routing are from `prepare_ids`.
        """
        return otherwise(table, state)


class BackendOptions:
    """The value of `backend=`. It chooses a backend per stack. This class uses XLA."""

    def choose(self, stack: "StackPlan", mesh: Mesh) -> "StackPlan":
        """Chooses a stack's backend, and the row layout that this backend needs.

        Args:
          stack: the stack's plan, still without backend, storage and vocabulary arrays.
          mesh: devices that hold the tables.
        """
        return dataclasses.replace(stack, backend=Backend(reason="backend='xla'"))


BackendName = Literal["xla", "sparse_core"]
"""XLA's gathers and scatters, or its embedding operations for SparseCores."""

_OPTIONS: Final[Mapping[BackendName, tuple[str, str]]] = {
    "xla": ("tpu_embedding.plan.backend", "BackendOptions"),
    "sparse_core": ("tpu_embedding.sparse_core.backend", "SparseCore"),
}
"""Module and class of each backend's options."""


def backend_options(value: Any) -> BackendOptions:
    if isinstance(value, BackendOptions):
        return value
    names = get_args(BackendName)
    if value not in names:
        rule = f"be one of {names} or a te.SparseCore"
        raise invalid("backend", rule, value, "Leave it out for 'xla'.")
    # Imported on demand, because backends import this module.
    module, name = _OPTIONS[value]
    return getattr(importlib.import_module(module), name)()
