"""Resolves the backend that a user asks for by name, `make_plan(kernels=...)`."""

from typing import Final, Literal, NamedTuple, get_args

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.kernels.kernel_access import Backend, KernelBackend

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
"""Backends that `make_plan(kernels=...)` takes by name."""

_DEFAULT: Final = "the default; make_plan(kernels=...) chooses kernels"
_REQUESTED: Final = "requested"

Form = Literal["whole", "direct", "fused", "blocks"]
"""The form in which XLA's operations do their work:

* `"whole"`: one operation for all ids, which writes its result to memory.
* `"direct"`: rows are read from the table itself, not from an exchange buffer.
* `"fused"`: one gather per id of a sample, which XLA fuses with the sum.
* `"blocks"`: a loop over blocks of ids, whose rows stay in a CPU's cache.
"""


FORM_MEANINGS: Final[dict[Form, str]] = {
    "direct": "rows are read from the table itself, without an exchange buffer",
    "fused": "the rows of a sample are added up as they are read",
    "blocks": "gradients are summed and applied in blocks that fit in the cache",
}
"""Explanation of each form that `print(plan)` names."""


class BackendChoice(NamedTuple):
    """A backend, why it was chosen, and the form of its work.

    Attributes:
      backend: the backend.
      reason: why it was chosen.
      form: the form of XLA's work.
      condition: the batches that the backend takes; XLA runs all others. None: it
        takes every batch.
    """

    backend: Backend
    reason: str
    form: Form = "whole"
    condition: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.explanation}"

    @property
    def explanation(self) -> str:
        """The reason, and the condition if there is one."""
        if self.condition is None:
            return self.reason
        return f"{self.reason} if {self.condition}; else xla"

    @property
    def kernel_backend(self) -> KernelBackend:
        """The backend, where a kernel was chosen."""
        assert self.backend != "xla"
        return self.backend

    @property
    def name(self) -> str:
        """The backend, and the form of its work unless it is the usual one."""
        return self.backend if self.form == "whole" else f"{self.backend}, {self.form}"


class BackendRequest(NamedTuple):
    """The backend that a user asked for.

    Attributes:
      backend: the backend to use where it can run.
      reason: why it was chosen.
    """

    backend: Backend
    reason: str

    @property
    def choice(self) -> BackendChoice:
        """The choice for rows that the backend reaches."""
        return BackendChoice(self.backend, self.reason)


def requested_backend(
    kernels: Backend | None, device: jax.Device, hardware: HardwareInfo
) -> BackendRequest:
    """Returns the backend that the user asked for.

    Args:
      kernels: the user's choice; None means `"xla"`.
      device: one of the plan's devices.
      hardware: the hardware that rows are laid out for.

    Raises:
      ValueError: if the choice is unknown, or cannot run on this device or jax.
    """
    if kernels is None or kernels == "xla":
        return BackendRequest("xla", _DEFAULT)
    if kernels not in BACKENDS:
        raise ValueError(f"kernels must be one of {BACKENDS} or None, got {kernels!r}.")
    _check_kernels(kernels, device, hardware)
    return BackendRequest(kernels, _REQUESTED)


def _check_kernels(
    kernels: Backend, device: jax.Device, hardware: HardwareInfo
) -> None:
    """Raises ValueError if kernels cannot run on a device."""
    if jax.__version_info__ < (0, 12):
        raise ValueError(
            f"kernels must be 'xla' or None with jax {jax.__version__}, got "
            f"{kernels!r}: kernels need jax 0.12 or later."
        )
    if kernels == "interpreter" and hardware.line_lanes is None:
        raise ValueError(
            "kernels must be 'xla' or None where rows do not share lines, got "
            f"'interpreter' for {hardware.name!r}: give hardware= of a TPU as well."
        )
    has_sparse_cores = device.platform == "tpu" and hardware.num_sparse_cores > 0
    if kernels == "sparse_core" and not has_sparse_cores:
        raise ValueError(
            "kernels must be 'interpreter', 'xla' or None without SparseCores, got "
            f"'sparse_core' on {device.device_kind!r}."
        )
