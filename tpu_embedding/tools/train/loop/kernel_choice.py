"""Chooses the kernels of a run: the same in all processes.

Each host has verdicts of its own (`kernel_verdicts.py`). Processes that follow
different ones would compile different programs, and wait for each other for ever. So
all follow those of process 0.
"""

from typing import cast

import jax

from tpu_embedding.distributed.job import current_job
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.kernel_verdicts import (
    RUN_DOCTOR,
    KernelVerdicts,
    verdicts_from_json,
)
from tpu_embedding.plan.backend_request import AUTO, KernelChoice, verdicts_for
from tpu_embedding.plan.plan import EmbeddingPlan


def resolve_kernels(
    kernels: str, device: jax.Device, hardware: HardwareInfo
) -> KernelChoice:
    """Returns the choice of kernels for `make_plan`, equal in all processes.

    With `"auto"` and several processes, all of them must call this function.

    Args:
      kernels: `RunConfig.kernels`.
      device: one of the plan's devices.
      hardware: the hardware that rows are laid out for.
    """
    if kernels != AUTO or current_job().num_processes == 1:
        return cast(KernelChoice, kernels)
    verdicts = verdicts_for(device, hardware)
    return AUTO if verdicts is None else of_first_process(verdicts)


def kernel_hint(plan: EmbeddingPlan) -> str | None:
    """Returns the way to verdicts that a plan lacks; None if it lacks none."""
    reasons = [choice.reason for stack in plan.stacks for choice in stack.backends]
    missing = [reason for reason in reasons if reason.endswith(RUN_DOCTOR)]
    if not missing:
        return None
    reason = missing[0].removeprefix("auto: ").removesuffix(f"; {RUN_DOCTOR}")
    return (
        f"XLA runs in place of some kernels: {reason}. Stop the run, {RUN_DOCTOR} on "
        "this host, and --resume follows its verdicts."
    )


def of_first_process(verdicts: KernelVerdicts) -> KernelVerdicts:
    """Returns the verdicts of process 0; every process must call it."""
    sent = current_job().broadcast("verdicts of kernels", verdicts.to_json())
    return verdicts_from_json(sent)
