"""The command `tpu-embedding train`."""

import argparse
import pathlib
from typing import Any, get_args

import jax

from tpu_embedding.checkpoint.run_checkpoints import Fallback
from tpu_embedding.distributed.notices import leaving_together
from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import (
    MAX_EMULATED_DEVICES,
    UsageError,
    add_compiler_option,
    add_config_arguments,
    add_data_and_devices,
    compiler_options,
    emulated_mesh,
    positive_int,
    read_config,
)
from tpu_embedding.tools.cli.compilation_cache import use_compilation_cache
from tpu_embedding.tools.cli.processes import (
    add_process_arguments,
    start_processes,
    supervise,
)
from tpu_embedding.tools.jobs.pulses import start_pulses
from tpu_embedding.tools.train.config.config_files import list_configs
from tpu_embedding.tools.train.loop.profiling import PROFILE_DIR, ProfileWindow
from tpu_embedding.tools.train.loop.reporting import PLOT_FILE, RECORDS_FILE
from tpu_embedding.tools.train.loop.run_directory import CHECKPOINTS_DIR, ExistingRun
from tpu_embedding.tools.train.loop.tensorboard import TENSORBOARD_DIR
from tpu_embedding.tools.train.loop.training_loop import train


def add_train(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train the model of a run config",
        description="Trains the model of a run config: prints progress, evaluates, and "
        f"writes {RECORDS_FILE}, {PLOT_FILE} and {CHECKPOINTS_DIR}/ to the output "
        "directory.",
        epilog=f"Configs of the package: {', '.join(list_configs())}. Exit status: 0 "
        "if the run is done, 1 if it failed after it had started, 2 if the command, "
        "the config or the data are wrong, 75 if SIGTERM or SIGHUP stopped it, 130 if "
        "Ctrl-C did. A run that is stopped saves its state first; a second signal ends "
        "it at once.",
    )
    parser.set_defaults(run=_train)
    add_config_arguments(parser)
    add_compiler_option(parser)
    add_data_and_devices(
        parser,
        devices_help="train on N emulated CPU devices, over all processes, at most "
        f"{MAX_EMULATED_DEVICES} in each",
    )
    parser.add_argument(
        "--output-dir",
        type=local_path,
        metavar="DIR",
        help="directory for the results; runs/NAME by default",
    )
    parser.add_argument(
        "--slices",
        type=positive_int,
        metavar="N",
        help="with --devices: emulate N equal slices, for "
        "--set tables_split_over=slice",
    )
    parser.add_argument(
        "--compilation-cache",
        choices=("on", "off"),
        default="on",
        help="on keeps compiled programs for the next start, in the directory "
        "JAX_COMPILATION_CACHE_DIR or in the user's cache; it is the default",
    )
    parser.add_argument(
        "--stop-at",
        type=positive_int,
        metavar="STEP",
        help="save a checkpoint and stop after this step, as if interrupted",
    )
    add_process_arguments(parser)
    parser.add_argument(
        "--tensorboard",
        action="store_true",
        help="write losses, metrics and rates as TensorBoard scalars, too, to "
        f"{TENSORBOARD_DIR}/ in the output directory",
    )
    parser.add_argument(
        "--profile",
        type=_profile_window,
        metavar="START:STOP",
        help="record a profile for xprof of the steps after START steps, up to step "
        f"STOP, in {PROFILE_DIR}/ in the output directory",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue from the latest checkpoint in the output directory, or from the "
        "beginning if its run saved none",
    )
    parser.add_argument(
        "--fallback",
        choices=get_args(Fallback),
        help="with --resume, if the latest checkpoint is damaged: older continues from "
        "the latest one that is whole, refuse is the default",
    )
    existing.add_argument(
        "--overwrite",
        action="store_true",
        help="move the files of an earlier run in the output directory to DIR.old-1, "
        "or the next free number, once the new run has passed all checks",
    )


def _train(parsed: argparse.Namespace) -> int:
    start_pulses()
    config = read_config(parsed.config, parsed.set)
    output_dir = parsed.output_dir or pathlib.Path("runs") / config.name
    if parsed.fallback is not None and not parsed.resume:
        raise UsageError("--fallback needs --resume: it is about its checkpoints.")
    status = supervise(parsed)
    if status is not None:
        return status
    job = start_processes(parsed)
    if parsed.compilation_cache == "on":
        use_compilation_cache(job)
    else:
        jax.config.update("jax_enable_compilation_cache", False)
    mesh = None
    if parsed.devices is not None:
        keep_freed_memory()
        mesh = emulated_mesh(parsed.devices, job.num_processes, parsed.slices)
    elif parsed.slices is not None:
        raise UsageError(
            "--slices needs --devices: it emulates slices; TPUs know their own."
        )
    elif jax.default_backend() == "cpu":
        keep_freed_memory()
    existing_run: ExistingRun = "refuse"
    if parsed.resume or parsed.overwrite:
        existing_run = "resume" if parsed.resume else "move_aside"
    with leaving_together(job):
        train(
            config,
            output_dir,
            data_dir=parsed.data_dir,
            mesh=mesh,
            existing_run=existing_run,
            fallback=parsed.fallback or "refuse",
            stop_at=parsed.stop_at,
            compiler_options=compiler_options(parsed.compiler_option),
            tensorboard=parsed.tensorboard,
            profile=parsed.profile,
        )
    return 0


def _profile_window(text: str) -> ProfileWindow:
    """Returns the window of `--profile`; argparse prints the error."""
    try:
        return ProfileWindow.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
