"""The command `tpu-embedding export`."""

import argparse
import contextlib
import json
import math
import pathlib
from typing import Any, Final

import numpy as np

from tpu_embedding.export.row_formats import ROW_FORMATS
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import (
    UsageError,
    add_config_arguments,
    add_data_and_devices,
    emulated_mesh,
    positive_int,
    read_config,
)
from tpu_embedding.tools.jobs.exit_status import FAILED
from tpu_embedding.tools.train.config.config_files import list_configs
from tpu_embedding.tools.train.loop.export_run import (
    EXPORT_FORMATS,
    RunExport,
    export_run,
)
from tpu_embedding.tools.train.loop.reporting import RECORDS_FILE

_MAX_RECORD: Final = 2**20
"""Maximum characters of a run's first record that are read, to find its config."""

_UNREADABLE: Final = (OSError, ValueError, LookupError, TypeError, RecursionError)
"""Errors of a record that is no JSON, or has no name of a config."""

TOLERANCE: Final = 1e-6
"""Largest difference that the order of float32 sums explains."""


def add_export(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="export the model of a run for serving",
        description="Exports the model of a run from its newest checkpoint: as a "
        "StableHLO program with its weights beside it, as a TensorFlow SavedModel, or "
        "as the tables alone.",
        epilog="Exit status: 0 if the export is written, 1 if exported and live "
        "outputs differ by more than the tolerance, 2 if the command, the config, the "
        "data or the checkpoint are wrong.",
    )
    parser.set_defaults(run=_export)
    add_config_arguments(
        parser,
        config_help="name of a config, path of a Python file, or output directory of "
        "a run of a config of the package",
    )
    parser.add_argument(
        "output", type=local_path, metavar="OUTPUT", help="new directory to write"
    )
    parser.add_argument(
        "--run-dir",
        type=local_path,
        metavar="DIR",
        help="output directory of the run; runs/NAME by default",
    )
    add_data_and_devices(parser, devices_help="restore on N emulated CPU devices")
    parser.add_argument(
        "--format",
        choices=EXPORT_FORMATS,
        default="stablehlo",
        help="stablehlo (the default), savedmodel, or safetensors for tables alone",
    )
    parser.add_argument(
        "--dtype",
        choices=ROW_FORMATS,
        default="float32",
        help="type of the tables in the files (default: float32)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="samples of a batch; any number by default",
    )
    parser.add_argument(
        "--check",
        type=positive_int,
        metavar="N",
        help="compare exported and live outputs on N held-out batches",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference that --check accepts, over the largest output if that "
        f"is above 1; {TOLERANCE:g} for float32 tables, none for others",
    )


def _export(parsed: argparse.Namespace) -> int:
    name, run_dir = _config_and_run(parsed)
    config = read_config(name, parsed.set)
    result = export_run(
        config,
        run_dir or pathlib.Path("runs") / config.name,
        parsed.output,
        format=parsed.format,
        dtype=parsed.dtype,
        batch_size=parsed.batch_size,
        data_dir=parsed.data_dir,
        mesh=None if parsed.devices is None else emulated_mesh(parsed.devices),
        num_checked=parsed.check or 0,
    )
    _print_export(result, parsed)
    tolerance = parsed.tolerance
    if tolerance is None and parsed.dtype == "float32":
        tolerance = TOLERANCE
    worst = np.max([0.0, *result.differences.values()])  # NaN if one is.
    if math.isfinite(worst) and (tolerance is None or worst <= tolerance):
        return 0
    limit = "" if tolerance is None else f" by more than {tolerance:g}"
    print(f"the outputs differ{limit}")
    return FAILED


def _config_and_run(parsed: argparse.Namespace) -> tuple[str, pathlib.Path | None]:
    """Returns the config's name or path, and the directory of the run if it is given.

    The records of a run may come from anyone. So their name of the config is never a
    file to execute, but one of the configs of the package, or it is refused.

    Raises:
      UsageError: if the argument is a directory whose records name no such config.
    """
    path = local_path(parsed.config)
    if not path.is_dir():
        return parsed.config, parsed.run_dir
    if parsed.run_dir is not None:
        raise UsageError(
            f"CONFIG {path} is the directory of a run, so --run-dir must be left out, "
            f"got {parsed.run_dir}."
        )
    name = None
    with contextlib.suppress(*_UNREADABLE):
        with (path / RECORDS_FILE).open(encoding="utf-8") as file:
            name = json.loads(file.readline(_MAX_RECORD))["run"]["name"]
    if not isinstance(name, str) or name not in list_configs():
        found = "no config" if name is None else f"{name!r}, no config of the package"
        raise UsageError(
            f"CONFIG {path} must be a config or the output directory of a run of one "
            f"of the package's, but its {RECORDS_FILE} names {found}; give the config, "
            f"and --run-dir {path}."
        )
    return name, path


def _print_export(result: RunExport, parsed: argparse.Namespace) -> None:
    print(f"exported step {result.step} to {parsed.output}, {parsed.format}")
    for name, table in result.document["tables"].items():
        error = table["error"]
        print(
            f"  table {name}: {table['dtype']}{table['shape']}, rounding error at most "
            f"{error['largest']:.3g}, relative {error['relative']:.3g}"
        )
    for name, difference in result.differences.items():
        print(
            f"  {name}: largest difference from the live model {difference:.3g} over "
            f"{parsed.check} batches"
        )
