"""The command `tpu-embedding launch`."""

import argparse
import pathlib
import sys
from typing import Any

from tpu_embedding.paths import local_path
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.cli.arguments import UsageError, read_config, use_cpu_only
from tpu_embedding.tools.cli.compile import compile_for, slices_mesh
from tpu_embedding.tools.jobs.exit_status import FAILED
from tpu_embedding.tools.launch import (
    PROGRAMS,
    Launch,
    load_launch,
    make_script,
    what_deletes,
)
from tpu_embedding.tools.train.config.run_config import RunConfig
from tpu_embedding.tools.train.loop.ahead_of_time import PROGRAM_NAMES


def add_launch(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "launch",
        allow_abbrev=False,
        help="print a script that trains on TPUs of Google Cloud",
        description="Prints a script for bash, which creates TPU machines of Google "
        "Cloud and trains on all of them, by gcloud and kubectl. Nothing is run: read "
        "the script, then run it. First, the config is compiled for the slices. If it "
        "does not fit, no script is printed.",
        epilog="Exit status: 0 if the script is printed, 1 if the config does not fit, "
        "2 if the launch file is wrong.",
    )
    parser.set_defaults(run=_launch)
    parser.add_argument(
        "file", type=local_path, metavar="FILE", help="TOML file of the launch"
    )
    parser.add_argument(
        "--program",
        choices=PROGRAMS,
        default="train",
        help="train (the default), or doctor to check the hosts",
    )
    parser.add_argument(
        "--skip-compile-check",
        action="store_true",
        help="do not compile the config for the slices first",
    )


def _launch(parsed: argparse.Namespace) -> int:
    try:
        launch = load_launch(parsed.file)
    except OSError as error:
        raise UsageError(
            f"FILE must be a launch file, got {parsed.file}: {error.strerror}; give "
            "the path of one, or write it as docs/guides/launching.md shows."
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    _check_own_files(launch)
    config = read_config(launch.config, launch.settings)
    if not parsed.skip_compile_check and not _fits(launch, config):
        print(
            f"error: {launch.config} does not fit {launch.topology}, so no script is "
            "printed. Take a larger topology or more slices, or change settings.",
            file=sys.stderr,
        )
        return FAILED
    print(make_script(launch, parsed.program))
    print(f"What ends the machines: {what_deletes(launch)}", file=sys.stderr)
    return 0


def _check_own_files(launch: Launch) -> None:
    missing = [each for each in launch.own_files if not local_path(each).is_file()]
    if missing:
        raise UsageError(
            f"package and config must name files that exist, got {', '.join(missing)}; "
            "build the wheel, or correct the path, which begins at the current "
            f"directory, {pathlib.Path.cwd()}."
        )


def _fits(launch: Launch, config: RunConfig) -> bool:
    """Compiles a config for the slices, and returns True if every program fits."""
    use_cpu_only()
    try:
        mesh = slices_mesh(launch.topology, launch.slices)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{error} --skip-compile-check leaves this out.") from error
    report = compile_for(config, launch.topology, mesh, {}, PROGRAM_NAMES)
    if not report.fits:
        print(compile_report.format_report(report), file=sys.stderr)
    return report.fits
