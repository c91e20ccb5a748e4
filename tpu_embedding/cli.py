"""The command `tpu-embedding`: trains a run config, or compiles it for absent TPUs.

    tpu-embedding train CONFIG
    tpu-embedding compile CONFIG --topology GENERATION:CHIPS

Errors end in one line on stderr, never in a traceback. Exit status 2 means that the
command, the config or the data are wrong. Exit status 1 means that a run failed after
it had started, or that a program of a run does not fit.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import Mesh

import tpu_embedding
from tpu_embedding import aot
from tpu_embedding.aot.report import TRAIN_STEP
from tpu_embedding.checkpoint.run_checkpoints import CheckpointError
from tpu_embedding.data.batch import DataError
from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.training.ahead_of_time import (
    PROGRAM_NAMES,
    ProgramName,
    other_programs,
)
from tpu_embedding.training.config_files import list_configs, load_config
from tpu_embedding.training.errors import ConfigError, describe_error, own_code
from tpu_embedding.training.loop import train
from tpu_embedding.training.overrides import apply_overrides
from tpu_embedding.training.pipeline import TrainingDivergedError
from tpu_embedding.training.reporting import (
    PLOT_FILE,
    RECORDS_FILE,
    MissingPlotLibraryError,
)
from tpu_embedding.training.run_config import RunConfig
from tpu_embedding.training.run_directory import CHECKPOINTS_DIR, ExistingRun
from tpu_embedding.training.run_lock import RunDirectoryError
from tpu_embedding.training.step import abstract_step, make_run_plan

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, the status that shells report.

MAX_EMULATED_DEVICES: Final = 256
"""Maximum number of emulated CPU devices.

Each device waits for the others in a thread of its own, and XLA:CPU has at most this
many. With one device more, the process waits, and XLA then aborts it (jax 0.12).
"""


class UsageError(ValueError):
    """Raised if the command line contradicts itself or names something missing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      arguments: command line without the program's name; None takes it from `sys.argv`.

    Returns:
      0 on success; 1 if training failed, or if a program of a run does not fit a
      topology; 2 if settings or data are wrong; 130 if interrupted.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except _WRONG_USAGE_ERRORS as error:
        return _fail(str(error), WRONG_USAGE, parsed)
    except (TrainingDivergedError, MissingPlotLibraryError) as error:
        return _fail(str(error), FAILED, parsed)
    except (OSError, MemoryError) as error:
        return _fail(describe_error(error), FAILED, parsed)
    except jax.errors.JaxRuntimeError as error:
        return _fail(f"XLA: {str(error).partition(chr(10))[0]}", FAILED, parsed)
    except KeyboardInterrupt:
        print(parsed.interrupted, file=sys.stderr)
        return INTERRUPTED


_WRONG_USAGE_ERRORS: Final = (
    UsageError,
    ConfigError,
    DataError,
    CheckpointError,
    RunDirectoryError,
)


def _fail(message: str, status: int, parsed: argparse.Namespace) -> int:
    """Prints the error that is being handled, and returns the exit status."""
    if parsed.traceback:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpu-embedding",
        description="Embedding tables for JAX on TPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {tpu_embedding.__version__}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_compile(commands)
    return parser


def _add_train(commands) -> None:
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train the model of a run config",
        description="Trains the model of a run config: prints progress, evaluates, and "
        f"writes {RECORDS_FILE}, {PLOT_FILE} and {CHECKPOINTS_DIR}/ to the output "
        "directory.",
        epilog=f"Configs of the package: {', '.join(list_configs())}. Exit status: 0 "
        "if the run is done, 1 if it failed after it had started, 2 if the command, "
        "the config or the data are wrong, 130 if it was interrupted.",
    )
    parser.set_defaults(
        run=_train, interrupted="interrupted; --resume continues the run"
    )
    _add_config_arguments(parser)
    parser.add_argument(
        "--data-dir",
        type=pathlib.Path,
        metavar="PATH",
        help="file or directory of the data",
    )
    parser.add_argument(
        "--output-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="directory for the results; runs/NAME by default",
    )
    parser.add_argument(
        "--devices",
        type=_num_devices,
        metavar="N",
        help=f"train on N emulated CPU devices, at most {MAX_EMULATED_DEVICES}; on all "
        "devices by default",
    )
    parser.add_argument(
        "--stop-at",
        type=_positive_int,
        metavar="STEP",
        help="save a checkpoint and stop after this step, as if interrupted",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in the output directory, or from the "
        "beginning if its run saved none",
    )
    existing.add_argument(
        "--overwrite",
        action="store_true",
        help="move the files of an earlier run in the output directory to DIR.old-1, "
        "or the next free number, once the new run has passed all checks",
    )


def _add_compile(commands) -> None:
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
    parser.set_defaults(run=_compile, interrupted="interrupted")
    _add_config_arguments(parser)
    parser.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="GENERATION:CHIPS",
        help=f"a TPU slice, such as {', '.join(EXAMPLE_TOPOLOGIES)}; may be repeated",
    )
    parser.add_argument(
        "--slices",
        type=_positive_int,
        default=1,
        metavar="N",
        help="number of such slices, connected by the data center network",
    )
    parser.add_argument(
        "--kernels",
        action="append",
        choices=["xla", "sparse_core"],
        help="backend that reads and updates rows; repeat it to compare both "
        "(default: that of the config, xla)",
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
        "--batch",
        type=_positive_int,
        metavar="N",
        help="samples per step over all devices; same as --set batch_size=N",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="also write the reports to a JSON file",
    )
    parser.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="also write an HTML page with plots of memory, traffic and time",
    )


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="name of a config, or path of a Python file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the config, such as num_steps=100 or model.dim=8",
    )
    parser.add_argument(
        "--compiler-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="XLA option of the train step, added to those of the package; TPUs only",
    )
    parser.add_argument(
        "--traceback",
        action="store_true",
        help="print the traceback of an error, too, to debug a config of your own",
    )


def _train(parsed: argparse.Namespace) -> int:
    _refuse_repeated("--set", parsed.set)
    config = apply_overrides(load_config(parsed.config), parsed.set)
    output_dir = parsed.output_dir or pathlib.Path("runs") / config.name
    mesh = None if parsed.devices is None else _emulated_mesh(parsed.devices)
    existing_run: ExistingRun = "refuse"
    if parsed.resume or parsed.overwrite:
        existing_run = "resume" if parsed.resume else "move_aside"
    train(
        config,
        output_dir,
        data_dir=parsed.data_dir,
        mesh=mesh,
        existing_run=existing_run,
        stop_at=parsed.stop_at,
        compiler_options=_compiler_options(parsed.compiler_option),
    )
    return 0


def _compile(parsed: argparse.Namespace) -> int:
    settings = list(parsed.set)
    if parsed.batch is not None:
        settings.append(f"batch_size={parsed.batch}")
    _refuse_repeated("--set", settings)
    config = apply_overrides(load_config(parsed.config), settings)
    options = _compiler_options(parsed.compiler_option)
    for option, path in (("--json", parsed.json), ("--html", parsed.html)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(
                f"{option} {path}: the directory {path.parent} does not exist."
            )
        if path is not None and path.is_dir():
            raise UsageError(f"{option} {path} is a directory, not a file.")
    _use_cpu_only()
    try:
        meshes = [
            aot.topology_mesh(topology, num_slices=parsed.slices)
            for topology in parsed.topology
        ]
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
    reports = []
    for (topology, mesh), kernels in itertools.product(
        zip(parsed.topology, meshes, strict=True), parsed.kernels or [config.kernels]
    ):
        with_kernels = dataclasses.replace(config, kernels=kernels)
        report = _compile_for(with_kernels, topology, mesh, options, parsed.programs)
        reports.append(report)
        print(aot.format_report(report), end="\n\n")
    if len(reports) > 1:
        print(aot.format_comparison(reports))
    if parsed.json is not None:
        document = {
            "config": config.describe(),
            "reports": [report.to_json() for report in reports],
        }
        _write(parsed.json, json.dumps(document, indent=2) + "\n")
    if parsed.html is not None:
        _write(parsed.html, aot.render_html(reports))
    return 0 if all(report.fits for report in reports) else FAILED


def _compile_for(
    config: RunConfig,
    topology: str,
    mesh: Mesh,
    options: dict[str, str],
    programs: Sequence[ProgramName],
) -> aot.CompileReport:
    def announce(program: str) -> None:
        title = f"{_step_name(config)} for {topology} (devices: {mesh.size})"
        print(f"compiling {title}: {program} ...", file=sys.stderr, flush=True)

    def announced(programs: Iterable[aot.Program]) -> Iterator[aot.Program]:
        for program in programs:
            if program.function is not None:
                announce(program.name)
            yield program

    if not callable(getattr(config.data, "outline", None)):
        raise UsageError(
            f"The config's data source, a {type(config.data).__name__}, must have a "
            "method outline, which returns a data set with the shapes of the real "
            "batches but reads no file; see tpu_embedding.training.DataSource."
        )
    with own_code(f"{type(config.data).__name__}.outline"):
        data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    try:
        with own_code("The config"):
            plan = make_run_plan(config, data, mesh, compiler_options=options)
            step, state, batch = abstract_step(config, data, plan)
            others = other_programs(config, data, plan, programs)
            announce(TRAIN_STEP)
            return aot.compile_report(
                step,
                state,
                batch,
                plan,
                features=batch.features,
                name=_step_name(config),
                topology=topology,
                others=announced(others),
            )
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"XLA: {str(error).splitlines()[0]}") from error


def _step_name(config: RunConfig) -> str:
    """Returns the config's name, and its kernels if XLA does not run alone."""
    if config.kernels == "xla":
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


def _compiler_options(assignments: Sequence[str]) -> dict[str, str]:
    """Returns name to value of each assignment `NAME=VALUE`."""
    options = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not (name and separator):
            raise UsageError(f"--compiler-option takes NAME=VALUE, got {assignment!r}.")
        options[name] = value
    _refuse_repeated("--compiler-option", assignments)
    return options


def _refuse_repeated(option: str, assignments: Sequence[str]) -> None:
    """Raises an error if two assignments `NAME=VALUE` have the same name."""
    values: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name in values:
            raise UsageError(
                f"{option} {name} is given twice, as {values[name]!r} and {value!r}; "
                "leave one of the two out."
            )
        values[name] = value


def _use_cpu_only() -> None:
    """Restricts JAX to CPU devices, unless it has been initialised already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def _emulated_mesh(num_devices: int) -> Mesh:
    """Returns a mesh of CPU devices; creates them if JAX is not initialised yet."""
    _use_cpu_only()
    # If JAX has been initialised already, its devices are used.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise UsageError(
            f"--devices {num_devices}: JAX has started with {len(devices)} CPU devices "
            "in this process already."
        )
    return Mesh(np.asarray(devices[:num_devices]), ("shard",))


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an int, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


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


def _num_devices(text: str) -> int:
    value = _positive_int(text)
    if value > MAX_EMULATED_DEVICES:
        raise argparse.ArgumentTypeError(
            f"must be at most {MAX_EMULATED_DEVICES}, the devices that XLA can emulate "
            f"on a CPU, got {value}"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
