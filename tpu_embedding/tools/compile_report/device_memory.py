"""The memory that a compiled program needs on one device, and its fit.

The compiler refuses a program that does not fit. It counts all arguments, so what lies
on the device beside the program has to be an argument of it.
"""

import dataclasses
import math
import re
import time
from typing import Any, Final

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.rows.packed_rows import PackedRows

_OUT_OF_MEMORY: Final = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a program needs on one device, in bytes.

    `tables`, `slots` and `dense` count what lies on the device during the program, also
    if the program does not use it. If the program does not fit, the compiler reports
    only the total. `padding`, `outputs`, `temporaries` and `code` are None then.

    Attributes:
      tables: tables of the layer.
      slots: slot variables of the tables.
      dense: all other parameters and their optimizer state.
      inputs: the batch.
      padding: tile padding of `dense` and `inputs`.
      outputs: results that do not reuse the memory of an argument.
      temporaries: temporary memory of the running program.
      code: code of the program.
      required: total memory. If the compiler refuses the program, its figure.
      available: memory available to a program. The compiler reserves some capacity for
        the system, and reports the rest if it refuses a program. Otherwise the
        capacity.
      capacity: the device's memory; None if unknown.
      fits: True if the compiler accepted the program, and `required` is at most the
        capacity.
    """

    tables: int
    slots: int
    dense: int
    inputs: int
    padding: int | None
    outputs: int | None
    temporaries: int | None
    code: int | None
    required: int
    available: int | None
    capacity: int | None
    fits: bool

    @property
    def parts(self) -> dict[str, int]:
        """The name and bytes of each part that is known, then of the rest, if any."""
        sizes = {
            "tables": self.tables,
            "slot variables": self.slots,
            "dense parameters and optimizer state": self.dense,
            "inputs": self.inputs,
            "tile padding of dense and inputs": self.padding,
            "outputs": self.outputs,
            "temporaries": self.temporaries,
            "program code": self.code,
        }
        known = {name: size for name, size in sizes.items() if size is not None}
        rest = self.required - sum(known.values())
        return known | ({"not itemised by the compiler": rest} if rest > 0 else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """A program after the compiler.

    Attributes:
      compiled: the compiled program; None if it does not fit.
      refusal: first line of the compiler's error if the program does not fit, or "".
      trace_seconds: time to trace and lower the program, in Python.
      compile_seconds: time of the compiler.
    """

    compiled: jax.stages.Compiled | None
    refusal: str
    trace_seconds: float
    compile_seconds: float


def compile_program(jitted: Any, *arguments: Any) -> Compilation:
    """Compiles a jitted function for arguments that need not be there.

    Args:
      jitted: function under `jax.jit`.
      *arguments: pytrees of `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler rejects the program for any reason
        other than memory.
    """
    begin = time.perf_counter()
    lowered = jitted.lower(*arguments)
    lowered_at = time.perf_counter()
    compiled, refusal = None, ""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refusal = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in refusal or "HBM" not in refusal.upper():
            raise
    return Compilation(
        compiled=compiled,
        refusal=refusal,
        trace_seconds=lowered_at - begin,
        compile_seconds=time.perf_counter() - lowered_at,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownBytes:
    """The bytes on one device that are known without a compiler.

    Attributes:
      tables: tables of the layer.
      slots: slot variables of the tables.
      dense: all other parameters and their optimizer state.
      inputs: the batch, or other arguments of the program.
    """

    tables: int
    slots: int
    dense: int
    inputs: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.tables + self.slots + self.dense + self.inputs


def memory_of(
    compilation: Compilation | None, known: KnownBytes, hardware: HardwareInfo
) -> Memory:
    """Returns the memory that a program needs, and its fit.

    Args:
      compilation: from `compile_program`; None if nothing runs on the devices.
      known: bytes of the program's arguments.
      hardware: hardware of the devices.
    """
    capacity = hardware.hbm_capacity_bytes
    if capacity is not None:
        capacity //= hardware.devices_per_chip
    padding, outputs, temporaries, code = None, None, None, None
    required, available, is_refused = known.total, capacity, False
    if compilation is not None:
        is_refused = compilation.compiled is None
        figures = _parse_out_of_memory(compilation.refusal)
        required, available = figures or (required, available)
        if compilation.compiled is not None:
            sizes = compilation.compiled.memory_analysis()
            assert sizes is not None
            padding = max(0, sizes.argument_size_in_bytes - known.total)
            outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
            temporaries = sizes.temp_size_in_bytes
            code = sizes.generated_code_size_in_bytes
            required += padding + outputs + temporaries + code
    return Memory(
        **dataclasses.asdict(known),
        padding=padding,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        required=required,
        available=available,
        capacity=capacity,
        fits=not is_refused and (capacity is None or required <= capacity),
    )


def device_bytes(tree: Any) -> int:
    """Returns the bytes of a pytree's arrays on one device, without padding."""
    return sum(map(_device_bytes, jax.tree.leaves(tree)))


def dense_bytes(tree: Any) -> int:
    """Returns the bytes on one device of the arrays that are not rows of tables."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PackedRows))
    return device_bytes([x for x in leaves if not isinstance(x, PackedRows)])


def _device_bytes(leaf: Any) -> int:
    shape = leaf.shape
    if leaf.sharding is not None:
        shape = leaf.sharding.shard_shape(shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _parse_out_of_memory(refusal: str) -> tuple[int, int] | None:
    """Parses required and available bytes from an out-of-memory error, or None."""
    match = _OUT_OF_MEMORY.search(refusal)
    if match is None:
        return None
    required, required_unit, available, available_unit = match.groups()
    return (
        round(float(required) * _UNITS[required_unit]),
        round(float(available) * _UNITS[available_unit]),
    )
