"""Whether kernels run, and on what."""

from typing import Final, Literal, get_args

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.kernels.backend import KernelBackend

KernelChoice = Literal["sparse_core", "interpreter", "none"]
KERNEL_CHOICES: Final[tuple[KernelChoice, ...]] = get_args(KernelChoice)
"""What `make_plan(kernels=...)` takes."""


def choose_backend(
    kernels: KernelChoice | None, device: jax.Device, hardware: HardwareInfo
) -> KernelBackend | None:
    """Returns what runs the kernels of a plan; None: there are none.

    Args:
      kernels: the user's choice; None: SparseCores, where there are any.
      device: one of the plan's.
      hardware: that rows are laid out for.

    Raises:
      ValueError: if the choice is not known, or cannot be met.
    """
    if kernels is not None and kernels not in KERNEL_CHOICES:
        raise ValueError(
            f"kernels must be one of {KERNEL_CHOICES} or None, got {kernels!r}."
        )
    is_tpu = device.platform == "tpu"
    has_sparse_cores = is_tpu and hardware.num_sparse_cores > 0
    is_known = jax.__version_info__ >= (0, 12)
    if kernels is None:
        kernels = "sparse_core" if has_sparse_cores and is_known else "none"
    if kernels != "none" and not is_known:
        raise ValueError(
            f"kernels must be 'none' or None with jax {jax.__version__}, got "
            f"{kernels!r}: they need jax 0.12 or later."
        )
    if kernels == "interpreter" and hardware.line_lanes is None:
        raise ValueError(
            "kernels must be 'none' or None where rows do not share lines, got "
            f"'interpreter' for {hardware.name!r}: give hardware= of a TPU as well."
        )
    if kernels == "sparse_core" and not has_sparse_cores:
        raise ValueError(
            "kernels must be 'interpreter', 'none' or None without SparseCores, got "
            f"'sparse_core' on {device.device_kind!r}."
        )
    return None if kernels == "none" else kernels
