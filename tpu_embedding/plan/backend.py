"""The interface of backends, which look up and update rows on a device.

A backend changes speed, never results. The argument of `make_plan(backend=...)` chooses
a backend for each stack of the plan. `Backend` itself uses XLA's gathers and scatters:
the exchange of `lookup/` and the drivers of `update/`. Subclasses override its methods.
The methods `look_up` and `update` receive the exchange or the driver as a function,
`otherwise`. They call this function in steps that the backend can't run, as in
`jax.lax.cond(fits, look_up, otherwise, table)`.

The core calls only the methods of `Backend`, and imports no other backend. To add a
backend, add its name and options class to `_OPTIONS`.
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
"""The activations of each feature of a stack, the number of exchange rounds, and the
number of reads of rows that the device owns but lacks (`PackedRows.num_missing`)."""

ReadRows = Callable[[PackedRows], Activations]
"""Looks up the rows of a batch in a table."""

UpdateRows = Callable[[PackedRows, Any], tuple[PackedRows, Any]]
"""Maps a table and the rule's state to the updated table and state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """A stack's lookup and update. This class uses gathers and scatters.

    Backends are part of the plan, so they are hashable and printable. All methods are
    traced, and see one shard.

    Attributes:
      lookups: name of the lookup's implementation, `"xla"` for the exchange.
      updates: name of the update's implementation, `"xla"` for the drivers.
      must_run_all: whether programs have no fallback for steps that the backend can't
        run. The result of `prepare_ids` then has `fits`, bool `[1]`, False if a step's
        ids don't fit on any device.
      reason: why the plan chose these implementations.
    """

    lookups: str = "xla"
    updates: str = "xla"
    must_run_all: bool = False
    reason: str = dataclasses.field(default="", compare=False)

    @property
    def replaces_lookup(self) -> bool:
        """True if the exchange only runs in steps that the backend cannot run."""
        return self.lookups != "xla"

    @property
    def replaces_update(self) -> bool:
        """True if the drivers only run in steps that the backend cannot run."""
        return self.updates != "xla"

    def prepare_ids(
        self,
        keys: Int[Array, " ids"],
        poolings: Sequence["PoolingSpec"],
        stack: "StackPlan",
        *,
        are_joined: bool = False,
    ) -> Any:
        """Returns what lookup and update need from the ids, as a pytree.

        `keys` are the keys of all features; see `lookup/_forward.py`. With
        `are_joined`, they come from several lookups, whose gradients are summed.
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
        """Returns activations, rounds (0 without an exchange) and missing rows.

        `ids` are from `prepare_ids`, and `otherwise` runs the exchange.
        """
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
        """Returns the updated table and rule state, in place if they are donated.

        They don't change if `only_if` is False.

        `gradient` is a `StackGradient` of `lookup/_backward.py`. If this backend
        replaces the update, the `backend_ids` of the gradient's routing are from
        `prepare_ids`. `otherwise` runs the rule's driver.
        """
        return otherwise(table, state)


class BackendOptions:
    """The value of `backend=`, which chooses the backend of each stack.

    This class chooses XLA's gathers and scatters for all stacks.
    """

    def choose(self, stack: "StackPlan", mesh: Mesh) -> "StackPlan":
        """Returns the plan of a stack with its backend, and with the backend's layout.

        Args:
          stack: a plan that is complete except for its backend.
          mesh: devices of the tables.
        """
        return dataclasses.replace(stack, backend=Backend(reason="backend='xla'"))


BackendName = Literal["xla", "sparse_core"]
"""XLA's gathers and scatters, or its embedding operations for SparseCores."""

_OPTIONS: Final[Mapping[BackendName, tuple[str, str]]] = {
    "xla": ("tpu_embedding.plan.backend", "BackendOptions"),
    "sparse_core": ("tpu_embedding.sparse_core.backend", "SparseCore"),
}
"""Module and class of each backend's options, imported on demand."""


def backend_options(value: Any) -> BackendOptions:
    """Returns the options for the user's `backend=`.

    Raises:
      ValueError: if the value is not a known name.
    """
    if isinstance(value, BackendOptions):
        return value
    names = get_args(BackendName)
    if value not in names:
        rule = f"be one of {names} or a te.SparseCore"
        raise invalid("backend", rule, value, "Leave it out for 'xla'.")
    module, name = _OPTIONS[value]
    return getattr(importlib.import_module(module), name)()
