"""Arguments that several commands share, and the conversion of their values."""

import argparse
import contextlib
from collections.abc import Sequence
from typing import Final

import jax
from jax.sharding import Mesh

from tpu_embedding.plan.device_mesh import device_mesh
from tpu_embedding.tools.train.config.config_files import load_config
from tpu_embedding.tools.train.config.overrides import apply_overrides
from tpu_embedding.tools.train.config.run_config import RunConfig

MAX_EMULATED_DEVICES: Final = 256
"""Maximum number of emulated CPU devices.

Each device waits for the others in a thread of its own, and XLA:CPU has at most this
many. With one device more, the process waits, and XLA then aborts it (jax 0.12).
"""


class UsageError(ValueError):
    """Raised if the command line contradicts itself or names something missing."""


def add_config_arguments(
    parser: argparse.ArgumentParser,
    *,
    config_help: str = "name of a config, or path of a Python file",
) -> None:
    """Adds the arguments of a command that reads a run config."""
    parser.add_argument("config", metavar="CONFIG", help=config_help)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the config, such as num_steps=100 or model.dim=8",
    )


def read_config(name: str, settings: Sequence[str]) -> RunConfig:
    """Returns a run config with the settings of `--set` applied.

    Args:
      name: name of a config, or path of a Python file.
      settings: assignments `KEY=VALUE`.

    Raises:
      UsageError: if two settings have the same key.
      ConfigError: if the config or a setting is wrong.
    """
    refuse_repeated("--set", settings)
    return apply_overrides(load_config(name), settings)


def add_data_and_devices(parser: argparse.ArgumentParser, *, devices_help: str) -> None:
    """Adds the arguments of a command that runs a config: its data and its devices."""
    parser.add_argument(
        "--data-dir",
        metavar="PATH",
        help="file or directory of the data",
    )
    parser.add_argument(
        "--devices",
        type=num_devices,
        metavar="N",
        help=f"{devices_help}; on all devices by default",
    )


def add_compiler_option(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of a command that compiles the train step."""
    parser.add_argument(
        "--compiler-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="XLA option of the train step, added to those of the package; TPUs only",
    )


def compiler_options(assignments: Sequence[str]) -> dict[str, str]:
    """Returns name to value of each assignment `NAME=VALUE`."""
    options = {}
    for assignment in assignments:
        name, separator, value = assignment.partition("=")
        if not (name and separator):
            raise UsageError(f"--compiler-option takes NAME=VALUE, got {assignment!r}.")
        options[name] = value
    refuse_repeated("--compiler-option", assignments)
    return options


def refuse_repeated(option: str, assignments: Sequence[str]) -> None:
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


def use_cpu_only() -> None:
    """Restricts JAX to CPU devices, unless it has been initialised already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def positive_int(text: str) -> int:
    """Converts an argument to an int of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an int, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def emulated_mesh(
    count: int, num_processes: int = 1, num_slices: int | None = None
) -> Mesh:
    """Returns a mesh of CPU devices; creates them if JAX is not initialised yet.

    Args:
      count: devices of all processes together.
      num_processes: processes of the job, each of which has an equal number.
      num_slices: equal slices to emulate; None: one.
    """
    if count % num_processes:
        raise UsageError(
            f"--devices must be a multiple of the {num_processes} processes of the "
            f"job, got {count}."
        )
    use_cpu_only()
    # If JAX has been initialised already, its devices are used.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count // num_processes)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise UsageError(
            f"--devices {count}: JAX has started with {len(devices)} CPU devices "
            "in this process already."
        )
    try:
        return device_mesh(devices[:count], num_slices=num_slices)
    except ValueError as error:
        raise UsageError(f"--slices: {error}") from error


def num_devices(text: str) -> int:
    """Converts an argument to a number of devices that XLA can emulate."""
    value = positive_int(text)
    if value > MAX_EMULATED_DEVICES:
        raise argparse.ArgumentTypeError(
            f"must be at most {MAX_EMULATED_DEVICES}, the devices that XLA can emulate "
            f"on a CPU, got {value}"
        )
    return value
