"""The memory of a run's programs beside the train step.

A run also makes the initial values, evaluates, saves and serves. Each of these may need
more memory than the train step. `compile_report` compiles them for its topology.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.tools.compile_report.device_memory import (
    KnownBytes,
    Memory,
    compile_program,
    device_bytes,
    memory_of,
)

ResidentPart = Literal["tables", "slots", "dense"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncompiledProgram:
    """A program of a run, to compile ahead of time.

    Attributes:
      name: name of the program, for the report.
      resident: arrays that lie on the devices during the program, used or not, as
        pytrees of `jax.ShapeDtypeStruct` with shardings: tables, slot variables, and
        dense parameters with their optimizer state. Parts may be missing.
      inputs: further arguments, such as a batch.
      function: `(resident, *inputs) -> outputs`; None if nothing runs on the devices.
      note: remark for the report.
    """

    name: str
    resident: Mapping[ResidentPart, Any]
    inputs: tuple[Any, ...] = ()
    function: Callable[..., Any] | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """The memory of one program of a run.

    Attributes:
      name: name of the program.
      memory: memory that the program needs on one device.
      trace_seconds: time to trace and lower the program, in Python.
      compile_seconds: time of the compiler.
      refusal: the compiler's error if the program does not fit, or "".
      note: remark, such as the reason that nothing runs on the devices.
    """

    name: str
    memory: Memory
    trace_seconds: float
    compile_seconds: float
    refusal: str
    note: str


def program_memory(program: UncompiledProgram, hardware: HardwareInfo) -> ProgramMemory:
    """Compiles a program and returns its memory.

    Args:
      program: the program.
      hardware: hardware of the devices.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler rejects the program for any reason
        other than memory.

    Example:
      >>> import jax.numpy as jnp
      >>> from tpu_embedding.hardware import hardware_by_name
      >>> batch = jax.ShapeDtypeStruct((8,), jnp.float32)
      >>> program = UncompiledProgram(
      ...     name="double", resident={}, inputs=(batch,), function=lambda _, x: 2 * x
      ... )
      >>> memory = program_memory(program, hardware_by_name("cpu")).memory
      >>> memory.inputs, memory.outputs
      (32, 32)
    """
    parts = {part: device_bytes(tree) for part, tree in program.resident.items()}
    known = KnownBytes(
        tables=parts.get("tables", 0),
        slots=parts.get("slots", 0),
        dense=parts.get("dense", 0),
        inputs=device_bytes(program.inputs),
    )
    compilation = None
    if program.function is not None:
        # The compiler counts what the program does not use, too.
        jitted = jax.jit(program.function, keep_unused=True)
        compilation = compile_program(jitted, dict(program.resident), *program.inputs)
    return ProgramMemory(
        name=program.name,
        memory=memory_of(compilation, known, hardware),
        trace_seconds=compilation.trace_seconds if compilation else 0.0,
        compile_seconds=compilation.compile_seconds if compilation else 0.0,
        refusal=compilation.refusal if compilation else "",
        note=program.note,
    )
