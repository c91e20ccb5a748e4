"""The command `tpu-embedding`: trains a run config, or reports on it without a TPU.

    tpu-embedding train CONFIG
    tpu-embedding compile CONFIG --topology GENERATION:CHIPS

Wrong settings and damaged data end in one line on the error stream and status 2, never
in a traceback. Status 1 says that training failed, or that a step does not fit.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embedding import aot
from tpu_embedding.checkpoint.run_checkpoints import CheckpointError
from tpu_embedding.data.batch import DataError
from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.training.config_files import ConfigError, list_configs, load_config
from tpu_embedding.training.loop import CHECKPOINTS_DIR, train
from tpu_embedding.training.overrides import apply_overrides
from tpu_embedding.training.pipeline import TrainingDivergedError
from tpu_embedding.training.reporting import (
    PLOT_FILE,
    RECORDS_FILE,
    MissingPlotLibraryError,
)
from tpu_embedding.training.run_config import RunConfig
from tpu_embedding.training.step import abstract_step, make_run_plan

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; None means the arguments of the process.

    Returns:
      Exit status: 0; 1 if training failed, or a step does not fit a topology; 2 if
      settings or data are wrong.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (UsageError, ConfigError, DataError, CheckpointError, OSError) as error:
        return _fail(error, USAGE)
    except (TrainingDivergedError, MissingPlotLibraryError) as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        print(parsed.interrupted, file=sys.stderr)
        return INTERRUPTED


def _fail(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpu-embedding", description="Embedding tables for JAX on TPUs."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {_version()}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_compile(commands)
    return parser


def _add_train(commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model by a run config",
        description="Trains a model by a run config: prints progress, evaluates, and "
        f"writes {RECORDS_FILE}, {PLOT_FILE} and {CHECKPOINTS_DIR}/ to the output "
        "directory.",
        epilog=f"Configs that come with the package: {', '.join(list_configs())}.",
    )
    parser.set_defaults(
        run=_train, interrupted="interrupted; --resume continues the run"
    )
    _add_config_arguments(parser)
    parser.add_argument(
        "--data-dir", type=pathlib.Path, metavar="PATH", help="where the data are"
    )
    parser.add_argument(
        "--output-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="where results go; runs/NAME if left out",
    )
    parser.add_argument(
        "--devices",
        type=_positive,
        metavar="N",
        help="train on N emulated CPU devices; if left out, on all devices there are",
    )
    parser.add_argument(
        "--stop-at",
        type=_positive,
        metavar="STEP",
        help="checkpoint and leave after this step, as if interrupted",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in the output directory",
    )
    existing.add_argument(
        "--overwrite",
        action="store_true",
        help="remove an earlier run from the output directory",
    )


def _add_compile(commands) -> None:
    parser = commands.add_parser(
        "compile",
        help="report what a run config's step is on TPUs, without any",
        description="Compiles the train step of a run config for TPUs that need not be "
        "there, and prints whether it fits, what it moves and what runs on SparseCore. "
        "Nothing is allocated, and no data are read. Times are modelled, not measured.",
        epilog="Exit status: 0 if the step fits every topology, 1 if it does not fit "
        "one of them, 2 if something is wrong with the command.",
    )
    parser.set_defaults(run=_compile, interrupted="interrupted")
    _add_config_arguments(parser)
    parser.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="GENERATION:CHIPS",
        help=f"a slice, such as {', '.join(EXAMPLE_TOPOLOGIES)}; may be repeated",
    )
    parser.add_argument(
        "--slices",
        type=_positive,
        default=1,
        metavar="N",
        help="how many such slices, joined by the network of the data centre",
    )
    parser.add_argument(
        "--batch",
        type=_positive,
        metavar="N",
        help="samples per step over all devices; short for --set batch_size=N",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the reports there, too"
    )
    parser.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write a page with plots of memory, traffic and time there, too",
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
        help="XLA option of the train step, beside those the package sets; TPUs only",
    )


def _train(parsed: argparse.Namespace) -> int:
    config = apply_overrides(load_config(parsed.config), parsed.set)
    output_dir = parsed.output_dir or pathlib.Path("runs") / config.name
    mesh = None if parsed.devices is None else _emulated_mesh(parsed.devices)
    if parsed.overwrite:
        _remove_run(output_dir)
    elif not parsed.resume and (output_dir / RECORDS_FILE).exists():
        raise UsageError(
            f"{output_dir} holds an earlier run; continue it with --resume, replace it "
            "with --overwrite, or choose another --output-dir."
        )
    train(
        config,
        output_dir,
        data_dir=parsed.data_dir,
        mesh=mesh,
        resume=parsed.resume,
        stop_at=parsed.stop_at,
        compiler_options=_compiler_options(parsed.compiler_option),
    )
    return 0


def _compile(parsed: argparse.Namespace) -> int:
    settings = list(parsed.set)
    if parsed.batch is not None:
        settings.append(f"batch_size={parsed.batch}")
    config = apply_overrides(load_config(parsed.config), settings)
    options = _compiler_options(parsed.compiler_option)
    for option, path in (("--json", parsed.json), ("--html", parsed.html)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no such directory.")
    _keep_to_cpu()
    try:
        meshes = [
            aot.topology_mesh(topology, num_slices=parsed.slices)
            for topology in parsed.topology
        ]
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error
    reports = []
    for topology, mesh in zip(parsed.topology, meshes, strict=True):
        print(
            f"compiling {config.name} for {topology} (devices: {mesh.size}) ...",
            file=sys.stderr,
            flush=True,
        )
        report = _compile_for(config, topology, mesh, options)
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
    return 0 if all(report.memory.fits for report in reports) else FAILED


def _compile_for(
    config: RunConfig, topology: str, mesh: Mesh, options: dict[str, str]
) -> aot.CompileReport:
    if not hasattr(config.data, "outline"):
        raise UsageError(
            f"The config's data source, a {type(config.data).__name__}, must have a "
            "method outline, which gives the shapes of its batches without files; see "
            "tpu_embedding.training.CriteoSource.outline."
        )
    try:
        data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
        plan = make_run_plan(config, data, mesh, compiler_options=options)
    except ValueError as error:
        raise UsageError(str(error)) from error
    step, state, batch = abstract_step(config, data, plan)
    try:
        return aot.compile_report(
            step,
            state,
            batch,
            plan,
            features=batch.features,
            name=config.name,
            topology=topology,
        )
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"XLA: {str(error).splitlines()[0]}") from error


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file as a whole: a failure leaves what was there before."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _compiler_options(assignments: Sequence[str]) -> dict[str, str]:
    options = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not (name and separator):
            raise UsageError(f"--compiler-option takes NAME=VALUE, got {assignment!r}.")
        options[name] = value
    return options


def _keep_to_cpu() -> None:
    """Leaves accelerators of this machine alone, unless JAX has started already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def _emulated_mesh(num_devices: int) -> Mesh:
    """Returns a mesh of CPU devices; makes them if JAX has none yet."""
    _keep_to_cpu()
    # If JAX has started already, its devices must do.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", num_devices)
    devices = jax.devices("cpu")
    if len(devices) < num_devices:
        raise UsageError(
            f"--devices {num_devices}: JAX has started with {len(devices)} CPU devices "
            "in this process already."
        )
    return Mesh(np.asarray(devices[:num_devices]), ("shard",))


def _remove_run(output_dir: pathlib.Path) -> None:
    """Removes what a run writes, and nothing else that may be there."""
    for name in (RECORDS_FILE, PLOT_FILE):
        (output_dir / name).unlink(missing_ok=True)
    if (output_dir / CHECKPOINTS_DIR).is_dir():
        shutil.rmtree(output_dir / CHECKPOINTS_DIR)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _version() -> str:
    try:
        return importlib.metadata.version("tpu-embedding")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
