"""Compiles a step ahead of time; reports if it fits, what it does and what it costs."""

import dataclasses
import time
from typing import Any

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.mesh_options import num_slices_of
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.compile_report.cycles import (
    Cycles,
    count_cycles,
    format_cycles,
)
from tpu_embedding.tools.compile_report.hlo import (
    TableAccesses,
    inspect_program,
    temporary_bytes,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a program needs on one device, in bytes.

    Attributes:
      arguments: tables, slot variables, dense state and the batch, including their
        tile padding. 0 if the compiler rejected the program.
      aliased: inputs whose memory is reused for results.
      outputs: results that need new memory.
      temporaries: peak size of the temporaries, including what SparseCores write.
      code: program code.
      required: total memory. If the compiler rejected the program, this is None, and
        the compiler's error has the figure.
      capacity: device memory, or None if unknown.

    Example:
      >>> Memory(arguments=5, temporaries=4, required=9, capacity=16).fits
      True
    """

    arguments: int = 0
    aliased: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    required: int | None
    capacity: int | None

    @property
    def fits(self) -> bool:
        """True if the compiler accepted the program and the memory suffices."""
        if self.required is None:
            return False
        return self.capacity is None or self.required <= self.capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """Memory, table accesses and cycles for a compiled step, per device.

    Attributes:
      name: step name.
      topology: topology name, as passed by the caller.
      plan: embedding plan.
      memory: memory that the step needs, and whether it fits.
      accesses: table accesses in the step. None if the compiler rejected the step.
      cycles: estimated cycles; see `Cycles`. None if the compiler rejected the step.
      trace_seconds: time to trace and lower the step, in Python.
      compile_seconds: time to compile.
      rejection: error from the compiler if it rejected the step, or "".

    Example:
      You get a report from `compile_report`::

          report = compile_report(step, (state, batch), plan, topology="v5e:2x4")
          if report.memory.fits:
              print(report.cycles.total)
    """

    name: str
    topology: str
    plan: EmbeddingPlan
    memory: Memory
    accesses: TableAccesses | None
    cycles: Cycles | None
    trace_seconds: float
    compile_seconds: float
    rejection: str

    @property
    def title(self) -> str:
        """Step name, topology and device count."""
        num_slices, num_devices = num_slices_of(self.plan.mesh), self.plan.num_shards
        slices = f"{num_slices} slices of " if num_slices > 1 else ""
        devices = "device" if num_devices == 1 else "devices"
        return f"{self.name} on {slices}{self.topology}: {num_devices} {devices}"


def compile_report(
    step: Any,
    arguments: tuple[Any, ...],
    plan: EmbeddingPlan,
    *,
    name: str = "train step",
    topology: str = "",
) -> CompileReport:
    """Compiles a step ahead of time; reports its memory, table accesses and cycles.

    Args:
      step: jitted function that donates the state and uses the plan's
        `compiler_options`.
      arguments: step arguments, such as the state and a batch. They are
        `jax.ShapeDtypeStruct`s with shardings, from `abstract_arrays` and
        `abstract_batch`.
      plan: embedding plan, on a mesh from `topology_mesh`.
      name: step name in the report.
      topology: topology name in the report.

    Returns:
      The report, even if the step does not fit.

    Raises:
      jax.errors.JaxRuntimeError: if the compiler rejects the program for any reason
        other than memory, such as an unknown option.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> from tpu_embedding.tools import compile_report
      >>> table = te.TableConfig(vocabulary_size=1000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> def step(tables, ids):
      ...     return tables, te.functional.lookup(tables, ids, plan).activations
      >>> step = jax.jit(step, donate_argnums=0)
      >>> tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
      >>> ids = {"watched": jax.ShapeDtypeStruct((16,), jnp.int32)}
      >>> tables = compile_report.abstract_arrays(tables, plan)
      >>> batch = compile_report.abstract_batch(ids, plan)
      >>> report = compile_report.compile_report(step, (tables, batch), plan)
      >>> report.memory.fits, report.accesses.table_sized_copies
      (True, ())
    """
    begin = time.perf_counter()
    lowered = step.lower(*arguments)
    lowered_at = time.perf_counter()
    rejection, accesses, cycles = "", None, None
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        rejection = str(error).splitlines()[0]
        memory = refused_memory(rejection, plan.hardware)
        if memory is None:
            raise
    else:
        memory = memory_of(compiled, plan.hardware)
        accesses = inspect_program(compiled, plan)
        cycles = count_cycles(compiled.as_text() or "")
    return CompileReport(
        name=name,
        topology=topology,
        plan=plan,
        memory=memory,
        accesses=accesses,
        cycles=cycles,
        trace_seconds=lowered_at - begin,
        compile_seconds=time.perf_counter() - lowered_at,
        rejection=rejection,
    )


def memory_of(compiled: jax.stages.Compiled, hardware: HardwareInfo) -> Memory:
    sizes = compiled.memory_analysis()
    assert sizes is not None
    used = {
        "arguments": sizes.argument_size_in_bytes,
        # Aliased outputs are already counted as arguments.
        "outputs": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporaries": temporary_bytes(sizes),
        "code": sizes.generated_code_size_in_bytes,
    }
    return Memory(
        **used,
        aliased=sizes.alias_size_in_bytes,
        required=sum(used.values()),
        capacity=hardware.device_memory_bytes,
    )


def refused_memory(rejection: str, hardware: HardwareInfo) -> Memory | None:
    """Makes a `Memory` if the program was rejected for its memory, else None."""
    if "RESOURCE_EXHAUSTED" not in rejection or "HBM" not in rejection.upper():
        return None
    return Memory(required=None, capacity=hardware.device_memory_bytes)


def format_report(report: CompileReport) -> str:
    """Formats a report as text: plan, memory, table accesses and cycles.

    Example:
      >>> print(format_report(report))  # doctest: +SKIP
      synthetic on v5e:2x4: 8 devices
      ...
    """
    memory, plan, accesses = report.memory, report.plan, report.accesses
    if memory.required is None:
        verdict = "DOES NOT FIT"
    else:
        needs = f"needs {format_bytes(memory.required)} per device"
        verdict = f"{needs}; the device's memory is unknown"
        if memory.capacity is not None:
            fits = "FITS" if memory.fits else "DOES NOT FIT"
            verdict = f"{fits}: {needs} of {format_bytes(memory.capacity)}"
    lines = [
        report.title,
        f"traced in {report.trace_seconds:.1f} s, compiled in "
        f"{report.compile_seconds:.1f} s",
        "",
        str(plan),
        "",
        verdict,
    ]
    if report.rejection:
        lines.append(report.rejection)
    if accesses is None or report.cycles is None:
        return "\n".join(lines)
    tables, slots = plan.table_bytes_per_device, plan.slot_bytes_per_device
    # `table_bytes_per_device` includes the maps of cached rows.
    maps = sum(stack.storage.bytes_per_device for stack in plan.stacks)
    sizes = {
        "tables": tables - maps,
        "slot variables": slots,
        **({"maps of cached rows": maps} if maps else {}),
        "other arguments": memory.arguments - tables - slots,
        "results in new memory": memory.outputs,
        "temporaries": memory.temporaries,
        "program code": memory.code,
        "updated in place": memory.aliased,
    }
    counts = {
        "gathers on SparseCore": accesses.sparse_core_gathers,
        "scatters on SparseCore": accesses.sparse_core_scatters,
        "operations of SparseCore": accesses.sparse_core_operations,
        "layout changes on SparseCore": accesses.sparse_core_relayouts,
        "all-to-alls": accesses.all_to_alls,
        "table-sized copies": len(accesses.table_sized_copies),
        "table-sized passes": len(accesses.table_sized_passes),
        "table-sized all-gathers": len(accesses.table_sized_all_gathers),
    }
    lines += [f"  {name:22} {format_bytes(size):>10}" for name, size in sizes.items()]
    lines += ["", *(f"  {name:28} {count:>4}" for name, count in counts.items())]
    lines += [f"    {copy[:120]}" for copy in accesses.table_sized_copies]
    if report.cycles.total:
        lines += ["", format_cycles(report.cycles)]
    return "\n".join(lines)
