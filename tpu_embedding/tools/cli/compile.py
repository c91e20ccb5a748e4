"""The command `tpu-embedding compile`."""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.paths import local_path
from tpu_embedding.plan.backend_request import AUTO
from tpu_embedding.plan.device_mesh import SHARD_AXIS, SLICE_AXIS
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.cli.arguments import (
    UsageError,
    add_compiler_option,
    add_config_arguments,
    compiler_options,
    positive_int,
    read_config,
    use_cpu_only,
)
from tpu_embedding.tools.compile_report.step_report import TRAIN_STEP
from tpu_embedding.tools.jobs.exit_status import FAILED
from tpu_embedding.tools.plotting import PLOT_TYPES, check_plot_library
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.errors import as_config_error
from tpu_embedding.tools.train.loop.ahead_of_time import (
    PROGRAM_NAMES,
    ProgramName,
    abstract_step,
    other_programs,
)
from tpu_embedding.tools.train.loop.run_plan import make_run_plan


def add_compile(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "compile",
        allow_abbrev=False,
        help="compile the programs of a run config for TPUs, without having any",
        description="Compiles the programs of a run for TPUs, which this machine need "
        "not have: train step, initial values, evaluation step, serving lookup. Prints "
        "if each fits into memory, the memory traffic of the train step, and its "
        "operations on SparseCore. Nothing is allocated, and no data are read. Times "
        "are modelled, not measured.",
        epilog="Exit status: 0 if every program fits every topology, 1 if one does not "
        "fit, 2 if the command is wrong.",
    )
    parser.set_defaults(run=_compile)
    add_config_arguments(parser)
    add_compiler_option(parser)
    parser.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="GENERATION:CHIPS",
        help=f"a TPU slice, such as {', '.join(EXAMPLE_TOPOLOGIES)}; may be repeated",
    )
    parser.add_argument(
        "--slices",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of such slices, connected by the data center network",
    )
    parser.add_argument(
        "--kernels",
        action="append",
        choices=["auto", "xla", "sparse_core"],
        help="backend that reads and updates rows; repeat it to compare some. auto "
        "follows the verdicts of tpu-embedding doctor on such a chip, or else takes "
        "xla (default: that of the config, auto)",
    )
    parser.add_argument(
        "--programs",
        type=_program_names,
        default=PROGRAM_NAMES,
        metavar="NAMES",
        help="programs to compile beside the train step: all (the default), or some "
        f"of {','.join(PROGRAM_NAMES)}; train_step for that alone",
    )
    parser.add_argument(
        "--json",
        type=local_path,
        metavar="FILE",
        help="also write the reports to a JSON file",
    )
    parser.add_argument(
        "--plot",
        type=local_path,
        metavar="FILE",
        help="also draw the memory of every program, as PNG, SVG or PDF; needs "
        "matplotlib",
    )


def _compile(parsed: argparse.Namespace) -> int:
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
        report = compile_for(with_kernels, topology, mesh, options, parsed.programs)
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
    return 0 if all(report.fits for report in reports) else FAILED


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
    with as_config_error(f"{type(config.data).__name__}.outline"):
        data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    try:
        with as_config_error("The config"):
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
        raise argparse.ArgumentTypeError(
            f"must be all, or some of {','.join(known)}, got {unknown[0]!r}"
        )
    return tuple(name for name in PROGRAM_NAMES if name in names)
