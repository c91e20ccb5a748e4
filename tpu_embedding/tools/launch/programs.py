"""The programs of a launch and their arguments: the same on every host and backend."""

import importlib.resources
import pathlib
from typing import Final, Literal, get_args

from tpu_embedding.tools.launch.settings import Launch

Program = Literal["train", "doctor"]
PROGRAMS: Final[tuple[Program, ...]] = get_args(Program)

MOUNT: Final = "/mnt/bucket"
"""Path of the bucket on every host."""

EXTRAS: Final = "[tpu,train]"
"""Extras of the package that a TPU host needs."""


def program_arguments(
    launch: Launch, program: Program, *options: str
) -> tuple[str, ...]:
    """Returns the arguments of `tpu-embedding` on a host.

    Args:
      launch: the launch.
      program: `"train"` or `"doctor"`.
      *options: further options of the training command, such as `"--resume"`.
    """
    if program == "doctor":
        # With several slices, the devices of all of them are found.
        expected = ("--expect", launch.topology) if launch.slices == 1 else ()
        return ("doctor", *expected)
    arguments = ["train", _on_host(launch, launch.config)]
    arguments += ["--output-dir", output_dir(launch)]
    if launch.data_dir:
        arguments += ["--data-dir", f"{MOUNT}/{launch.data_dir}"]
    for setting in launch.settings:
        arguments += ["--set", setting]
    return (*arguments, *options)


def output_dir(launch: Launch) -> str:
    """Returns the folder of the results, as hosts see it."""
    return f"{MOUNT}/{launch.name}/results"


def verdict_dir(launch: Launch) -> str:
    """Returns the folder of the doctor's verdicts, as hosts see it.

    All hosts must make one plan, so they share the verdicts that decide on kernels.
    """
    return f"{MOUNT}/{launch.name}/verdicts"


def requirement(launch: Launch) -> str:
    """Returns what pip installs on a host."""
    if launch.package in launch.own_files:
        return _on_host(launch, launch.package) + EXTRAS
    return launch.package


def read_script(name: str) -> str:
    """Returns the text of a shell script of this package.

    Args:
      name: file name, such as `"run_host.sh"`.
    """
    files = importlib.resources.files("tpu_embedding.tools.launch")
    return (files / "scripts" / name).read_text(encoding="utf-8")


def _on_host(launch: Launch, path: str) -> str:
    """Returns the path of an uploaded file on a host; other names stay."""
    if path not in launch.own_files:
        return path
    return f"{MOUNT}/{launch.name}/launch/{pathlib.PurePath(path).name}"
