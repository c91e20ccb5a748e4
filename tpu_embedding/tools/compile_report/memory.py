"""The memory that a compiled program needs on one device, and its fit."""

import dataclasses
from typing import Any

import jax

from tpu_embedding.hardware import HardwareInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a program needs on one device, in bytes.

    Attributes:
      arguments: all inputs, with tile padding: tables, slot variables, dense state and
        the batch. 0 if the compiler refused the program.
      aliased: inputs whose memory the results reuse.
      outputs: results that do not reuse the memory of an input.
      temporaries: see `temporary_bytes`.
      code: code of the program.
      required: total memory; None if the compiler refused the program, whose error
        has the figure.
      capacity: the device's memory; None if unknown.
      fits: True if the compiler accepted the program, and `required` is at most the
        capacity.
    """

    arguments: int = 0
    aliased: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    required: int | None
    capacity: int | None
    fits: bool


def temporary_bytes(sizes: Any) -> int:
    """Returns the bytes of temporaries that a program has at a time, at most.

    What SparseCores write on the way is not in XLA's `temp_size_in_bytes`, but in its
    peak: 0.12 MiB and 8,938 MiB for a gather of 16.7 million rows. The larger one
    counts.

    Args:
      sizes: result of `compiled.memory_analysis()`.
    """
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    peak = sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes - outputs
    return max(sizes.temp_size_in_bytes, peak)


def memory_of(compiled: jax.stages.Compiled, hardware: HardwareInfo) -> Memory:
    """Returns the memory that a compiled program needs, and its fit."""
    sizes = compiled.memory_analysis()
    assert sizes is not None
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    temporaries = temporary_bytes(sizes)
    code = sizes.generated_code_size_in_bytes
    required = sizes.argument_size_in_bytes + outputs + temporaries + code
    capacity = _capacity(hardware)
    return Memory(
        arguments=sizes.argument_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        required=required,
        capacity=capacity,
        fits=capacity is None or required <= capacity,
    )


def refused_memory(refusal: str, hardware: HardwareInfo) -> Memory | None:
    """Returns the memory of a program that the compiler refused for its size.

    Args:
      refusal: first line of the compiler's error.
      hardware: hardware of the devices.

    Returns:
      Memory that does not fit; None if the error is about something else.
    """
    if "RESOURCE_EXHAUSTED" not in refusal or "HBM" not in refusal.upper():
        return None
    return Memory(required=None, capacity=_capacity(hardware), fits=False)


def _capacity(hardware: HardwareInfo) -> int | None:
    capacity = hardware.hbm_capacity_bytes
    return None if capacity is None else capacity // hardware.devices_per_chip
