"""Chooses the form in which rows are pooled and gradients applied on some hardware.

Both forms give the same numbers up to rounding. The stack's plan keeps the choice.
"""

from typing import Literal

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, Touched
from tpu_embedding.plan.backend import Backend

Gathers = Literal["whole", "fused"]
"""The gathers that bring rows to samples:

* `"whole"`: one gather for all ids, which writes its result to memory. XLA:TPU compiles
  and starts one large gather faster than many small ones, and writes each of them.
* `"fused"`: one gather per id of a sample. XLA:CPU and XLA:GPU fuse it with the sum.
"""

Updates = Literal["whole", "blocks"]
"""The way in which gradients are summed and applied on the device of their rows:

* `"whole"`: all at once.
* `"blocks"`: in a loop over blocks of ids, whose rows stay in the cache of a CPU.
"""


def choose_gathers(hardware: HardwareInfo) -> Gathers:
    """Returns the form of the gathers that is fastest on the hardware."""
    return "whole" if hardware.is_tpu else "fused"


def choose_updates(
    hardware: HardwareInfo,
    optimizer: RowOptimizer | None,
    *,
    num_devices: int,
    capacity: int | None,
    backend: Backend,
) -> Updates:
    """Returns how gradients are summed and applied.

    A block is a round, so a rule must not pay for each round as for a whole step.

    Args:
      hardware: kind of device.
      optimizer: rule of the tables; None: they are not trained.
      num_devices: devices of the mesh.
      capacity: the user's limit of ids per round, or None.
      backend: what looks the rows up; blocks need gathers and scatters.
    """
    is_one_cpu = hardware.name == "cpu" and num_devices == 1 and capacity is None
    is_one_cpu &= not backend.replaces_lookup
    takes_blocks = (
        optimizer is not None
        and optimizer.driver == Touched()
        and not optimizer.takes_totals
    )
    return "blocks" if is_one_cpu and takes_blocks else "whole"
