"""The seam of backends: what looks rows up and updates them on a device.

A backend changes speed, never results. `make_plan(backend=...)` asks for one, and the
plan has one per stack. `Backend` itself is XLA's gathers and scatters: the exchange of
`lookup/` and the drivers of `update/`. A subclass replaces its methods. They get the
exchange or the driver as a function, `otherwise`, to call in steps that the backend
cannot run, as in `jax.lax.cond(fits, look_up, otherwise, table)`.

The core calls these methods only, and imports no other backend. To
add one, add its name and its options to the table of names.
"""

import abc
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout

if TYPE_CHECKING:
    from tpu_embedding.lookup._forward import PoolingSpec
    from tpu_embedding.plan.make_plan import NamedTable
    from tpu_embedding.plan.plan import StackPlan, TrainedStackPlan
    from tpu_embedding.rows.row_gradients import Sealed

Activations = tuple[list[Float[Array, "_ dim"]], Int[Array, ""], Int[Array, ""] | None]
"""The activations of each feature of a stack, the rounds of the exchange, and the
reads of rows that the device owns and lacks; see `PackedRows.num_missing`."""

ReadRows = Callable[[PackedRows], Activations]
"""Looks up the rows of a batch in a table."""

UpdateRows = Callable[[PackedRows, Any], tuple[PackedRows, Any]]
"""Maps table and state of the rule to new ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """Looks up and updates the rows of a stack; this one by gathers and scatters.

    Backends are part of the plan, so they are hashable and printable. All methods but
    `arrange` and `notes` are traced, per shard.

    Attributes:
      lookups: name of what looks rows up, `"xla"` for the exchange.
      updates: name of what updates rows, `"xla"` for the drivers.
      reason: why the plan chose them.
    """

    lookups: str = "xla"
    updates: str = "xla"
    reason: str = dataclasses.field(default="", compare=False)

    @property
    def replaces_lookup(self) -> bool:
        """True if the exchange only runs in steps that the backend cannot run."""
        return self.lookups != "xla"

    @property
    def replaces_update(self) -> bool:
        """True if the drivers only run in steps that the backend cannot run."""
        return self.updates != "xla"

    @property
    def must_run_all(self) -> bool:
        """True if programs contain nothing else for steps that it cannot run."""
        return False

    def arrange(self, layout: RowLayout) -> RowLayout:
        """Returns the layout of a shard, given the one of gathers and scatters."""
        return layout

    def notes(self, hardware: HardwareInfo) -> tuple[str, ...]:
        """Returns what `print(plan)` says about the stack, a line each."""
        return ()

    def prepare_ids(
        self,
        keys: Int[Array, " ids"],
        poolings: Sequence["PoolingSpec"],
        stack: "StackPlan",
        *,
        are_joined: bool = False,
    ) -> Any:
        """Returns what lookup and update need of the ids: a pytree, without any table.

        Args:
          keys: keys of all features; see `lookup/_forward.py`.
          poolings: the features of the stack.
          stack: plan of the stack.
          are_joined: True for the ids of several lookups, whose gradients are summed.
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
        """Returns activations, rounds, and missing rows; 0 rounds without an exchange.

        Args:
          table: this shard's rows.
          ids: from `prepare_ids`.
          poolings: the features of the stack.
          otherwise: the exchange.
          stack: plan of the stack.
        """
        return otherwise(table)

    def update(
        self,
        table: PackedRows,
        state: Any,
        gradient: "Sealed",
        otherwise: UpdateRows,
        stack: "TrainedStackPlan",
    ) -> tuple[PackedRows, Any]:
        """Returns the new table and state of the rule; in place where donated.

        Args:
          table: this shard's rows.
          state: state of the rule.
          gradient: a `StackGradient`, see `lookup/_backward.py`. If the backend
            replaces the update, its routing has `backend_ids`.
          otherwise: the update by the rule's driver.
          stack: plan of the stack.
        """
        return otherwise(table, state)


class BackendOptions(abc.ABC):
    """What a user passes as `backend=`: it chooses the backend of each stack."""

    @abc.abstractmethod
    def choose(
        self, table: "NamedTable", num_rows: int, mesh: Mesh, hardware: HardwareInfo
    ) -> Backend:
        """Returns the backend of a stack, with its reason.

        Args:
          table: a table of the stack.
          num_rows: rows of the stack.
          mesh: devices of the plan.
          hardware: their kind.
        """


@dataclasses.dataclass(frozen=True)
class Xla(BackendOptions):
    """XLA's gathers and scatters for all stacks."""

    def choose(
        self, table: "NamedTable", num_rows: int, mesh: Mesh, hardware: HardwareInfo
    ) -> Backend:
        """Returns the backend of any stack."""
        return Backend(reason="backend='xla'")


BackendName = Literal["xla", "sparse_core"]
"""XLA's gathers and scatters; or its embedding operations for SparseCores."""

_OPTIONS: Final[Mapping[BackendName, tuple[str, str]]] = {
    "xla": ("tpu_embedding.plan.backend", "Xla"),
    "sparse_core": ("tpu_embedding.sparse_core.backend", "SparseCore"),
}
"""Module and class of the options, imported when a plan asks for them."""


def backend_options(value: Any) -> BackendOptions:
    """Returns the options that `backend=` asks for.

    Raises:
      ValueError: if the value names no backend.
    """
    if isinstance(value, BackendOptions):
        return value
    names = get_args(BackendName)
    if value not in names:
        raise ValueError(
            f"backend must be one of {names} or a te.SparseCore, got "
            f"{describe_value(value)}. Leave it out for 'xla'."
        )
    module, name = _OPTIONS[value]
    return getattr(importlib.import_module(module), name)()
