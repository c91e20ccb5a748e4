"""The command `tpu-embedding`: `tpu-embedding train CONFIG` runs a config.

Wrong settings and damaged data end in one line on the error stream and status 2, never
in a traceback.
"""

import argparse
import importlib.metadata
import pathlib
import shutil
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from tpu_embedding.checkpoint.run_checkpoints import CheckpointError
from tpu_embedding.data.batch import DataError
from tpu_embedding.training.config_files import ConfigError, list_configs, load_config
from tpu_embedding.training.loop import CHECKPOINTS_DIR, train
from tpu_embedding.training.overrides import apply_overrides
from tpu_embedding.training.pipeline import TrainingDivergedError
from tpu_embedding.training.reporting import PLOT_FILE, RECORDS_FILE

FAILED = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class UsageError(ValueError):
    """The command line asks for something that cannot be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; None means the arguments of the process.

    Returns:
      Exit status: 0, 1 if training failed, 2 if settings or data are wrong.
    """
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (UsageError, ConfigError, DataError, CheckpointError, OSError) as error:
        return _fail(error, USAGE)
    except TrainingDivergedError as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        print("interrupted; --resume continues the run", file=sys.stderr)
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
    parser.set_defaults(run=_train)
    parser.add_argument(
        "config", metavar="CONFIG", help="name of a config, or path of a Python file"
    )
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
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the config, such as num_steps=100 or model.dim=8",
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
    )
    return 0


def _emulated_mesh(num_devices: int) -> Mesh:
    """Returns a mesh of CPU devices; makes them if JAX has none yet."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        # JAX has started already: its devices must do.
        pass
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
