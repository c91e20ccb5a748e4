"""The command `tpu-embedding compile`."""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import jax
import tyro
from jax.sharding import Mesh

from tpu_embedding.plan.backend_request import AUTO
from tpu_embedding.plan.device_mesh import SHARD_AXIS, SLICE_AXIS
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.cli.arguments import (
    UsageError,
    compiler_options,
    read_config,
    use_cpu_only,
)
from tpu_embedding.tools.compile_report.step_report import TRAIN_STEP
from tpu_embedding.tools.plotting import PLOT_TYPES, check_plot_library
from tpu_embedding.tools.train.ahead_of_time import (
    PROGRAM_NAMES,
    ProgramName,
    other_programs,
)
from tpu_embedding.tools.train.config import RunConfig
from tpu_embedding.tools.train.steps import abstract_step, make_run_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compile:
    """Compiles the programs of a config for TPUs, which this machine need not have.

    Prints if each fits into memory, the memory traffic of the train step, and its
    operations on SparseCore. Nothing is allocated, and no data are read. Times are
    modelled, not measured. Exit status: 1 if a program does not fit a topology.
    """

    config: Annotated[str, tyro.conf.Positional]
    """Name of a config, or path of a Python file that defines `config`."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change of the config as KEY=VALUE; may be repeated."""

    topology: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A TPU slice, as GENERATION:CHIPS, such as v5p:2x2x1; may be repeated."""

    slices: int = 1
    """Number of such slices, connected by the data center network."""

    kernels: tyro.conf.UseAppendAction[
        tuple[Literal["auto", "xla", "sparse_core"], ...]
    ] = ()
    """Backend that reads and updates rows, in place of the config's; repeat it to
    compare some."""

    compiler_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """XLA option of the train step as NAME=VALUE; may be repeated."""

    programs: str = "all"
    """Programs to compile beside the train step: all, some of
    init,evaluation,serving,checkpoint, or train_step for that alone."""

    json: pathlib.Path | None = None
    """Also writes the reports to a JSON file."""

    plot: pathlib.Path | None = None
    """Also draws the memory of every program, as PNG, SVG or PDF."""

    def run(self) -> int:
        """Prints the reports; returns the exit status."""
        return _compile(self)


def _compile(parsed: Compile) -> int:
    config = read_config(parsed.config, parsed.set)
    options = compiler_options(parsed.compiler_option)
    _check_output_files(parsed.json, parsed.plot)
    use_cpu_only()
    try:
        meshes = [slices_mesh(topology, parsed.slices) for topology in parsed.topology]
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
    reports = []
    for (topology, mesh), kernels in itertools.product(
        zip(parsed.topology, meshes, strict=True), parsed.kernels or [config.kernels]
    ):
        with_kernels = dataclasses.replace(config, kernels=kernels)
        report = compile_for(
            with_kernels, topology, mesh, options, _program_names(parsed.programs)
        )
        reports.append(report)
        print(compile_report.format_report(report), end="\n\n")
    if len(reports) > 1:
        print(compile_report.format_comparison(reports))
    if parsed.json is not None:
        document = {
            "config": config.describe(),
            "reports": [report.to_json() for report in reports],
        }
        text = json.dumps(document, indent=2) + "\n"
        _write(parsed.json, text)
    if parsed.plot is not None:
        compile_report.plot_memory(reports, parsed.plot)
    return 0 if all(report.fits for report in reports) else 1


def _check_output_files(json: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """Raises an error if a file could not be written, before any work is done."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(
                f"{option} {path}: the directory {path.parent} does not exist."
            )
        if path is not None and path.is_dir():
            raise UsageError(f"{option} {path} is a directory, not a file.")
    if plot is None:
        return
    if plot.suffix.lower() not in PLOT_TYPES:
        raise UsageError(
            f"--plot {plot}: the file must end with one of {', '.join(PLOT_TYPES)}."
        )
    check_plot_library("--plot")


def slices_mesh(topology: str, num_slices: int) -> Mesh:
    """Returns the mesh that the command `train` makes of such devices."""
    if num_slices == 1:
        return compile_report.topology_mesh(topology)
    return compile_report.topology_mesh(
        topology, (SLICE_AXIS, SHARD_AXIS), (num_slices, -1), num_slices=num_slices
    )


def compile_for(
    config: RunConfig,
    topology: str,
    mesh: Mesh,
    options: dict[str, str],
    programs: Sequence[ProgramName],
) -> compile_report.CompileReport:
    """Compiles the train step and other programs of a run, and returns their report.

    Args:
      config: config of the run.
      topology: generation and grid of the slices, for the report.
      mesh: mesh of the slices' devices.
      options: XLA's compiler options.
      programs: programs to compile beside the train step.
    """

    def announce(program: str) -> None:
        title = f"{name} for {topology} (devices: {mesh.size})"
        print(f"compiling {title}: {program} ...", file=sys.stderr, flush=True)

    def announced(
        programs: Iterable[compile_report.UncompiledProgram],
    ) -> Iterator[compile_report.UncompiledProgram]:
        for program in programs:
            if program.function is not None:
                announce(program.name)
            yield program

    if not callable(getattr(config.data, "outline", None)):
        raise UsageError(
            f"The config's data source, a {type(config.data).__name__}, must have a "
            "method outline, which returns a data set with the shapes of the real "
            "batches but reads no file; see tpu_embedding.tools.train.DataSource."
        )
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    try:
        plan = make_run_plan(config, data, mesh, compiler_options=options)
        name = _step_name(config, plan)
        step, state, batch = abstract_step(config, data, plan)
        others = other_programs(config, data, plan, programs)
        announce(TRAIN_STEP)
        return compile_report.compile_report(
            step,
            state,
            batch,
            plan,
            features=batch.features,
            name=name,
            topology=topology,
            others=announced(others),
        )
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"XLA: {str(error).splitlines()[0]}") from error


def _step_name(config: RunConfig, plan: EmbeddingPlan) -> str:
    """Returns the config's name, and its kernels unless XLA was to run alone."""
    by_xla = all(stack.kernels is None for stack in plan.stacks)
    if config.kernels == "xla" or (config.kernels == AUTO and by_xla):
        return config.name
    return f"{config.name} with {config.kernels} kernels"


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: on failure, the previous file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _program_names(text: str) -> tuple[ProgramName, ...]:
    """Returns the programs of a list with commas, without the train step."""
    names = text.split(",")
    if names == ["all"]:
        return PROGRAM_NAMES
    known = ("train_step", *PROGRAM_NAMES)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"must be all, or some of {','.join(known)}, got {unknown[0]!r}"
        )
    return tuple(name for name in PROGRAM_NAMES if name in names)
