"""Small runs that tests train, in this process or in others."""

import pathlib
import subprocess
import sys

import jax

from tests.conftest import mesh_of
from tests.processes.test_processes import environment_of
from tpu_embedding.tools.train import apply_overrides, load_config, train
from tpu_embedding.tools.train.run_directory import RECORDS_FILE, read_records
from tpu_embedding.tools.train.run_steps import abstract_step, make_run_plan

SMALL = (
    "batch_size=48",
    "num_steps=6",
    "model.dim=4",
    "model.hidden_sizes=8",
    "data.num_evaluation_samples=96",
    "log_every=2",
    "evaluate_every=0",
    "checkpoint_every=2",
)


def small_config(*settings, name="synthetic"):
    return apply_overrides(load_config(name), [*SMALL, *settings])


def run(directory, *settings, devices=2, **options):
    """Trains a small config on emulated devices of this process."""
    return train(small_config(*settings), directory, mesh=mesh_of(devices), **options)


def set_options(settings):
    """Returns the options of the command that change a config."""
    return [word for setting in settings for word in ("--set", setting)]


def check_traced(name, *settings):
    """Traces the train step of a config, without its data."""
    config = apply_overrides(load_config(name), ["batch_size=8", *settings])
    data = config.data.outline(batch_size=8, seed=0)
    plan = make_run_plan(config, data, mesh_of(2))
    step, state, batch = abstract_step(config, data, plan)
    new_state, metrics = step.eval_shape(state, batch)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert metrics["loss"].shape == ()


def losses_of(directory):
    """Returns the recorded losses by step."""
    records = read_records(pathlib.Path(directory) / RECORDS_FILE)
    return {r["step"]: r["train"]["loss"] for r in records if "train" in r}


def metrics_of(directory):
    """Returns the metrics of the last evaluation."""
    records = read_records(pathlib.Path(directory) / RECORDS_FILE)
    return [r["evaluation"] for r in records if "evaluation" in r][-1]


def start_command(directory, *arguments, settings=SMALL, config="synthetic", within=()):
    """Starts `tpu-embedding train` in a process of its own."""
    command = [sys.executable, "-m", "tpu_embedding.tools.cli", "train", config]
    command += ["--output-dir", str(directory), *map(str, arguments)]
    command += set_options(settings)
    return subprocess.Popen(
        [*within, *command],
        env=environment_of() | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process, start):
    """Reads the output of a process up to a line; returns the line."""
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(process.stderr.read())
