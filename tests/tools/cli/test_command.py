"""Commands: their help, their exit statuses, and errors in one line."""

import subprocess
import sys
import types
from unittest import mock

import pytest

import tpu_embedding
from tests.tools.train.runs import SMALL, set_options
from tpu_embedding.tools import cli
from tpu_embedding.tools.cli import command


def status_of(*arguments):
    try:
        return cli.main([str(x) for x in arguments])
    except SystemExit as end:  # tyro's
        return end.code


@pytest.mark.parametrize(
    "arguments, shown",
    [
        (["--help"], ["train", "evaluate", "compile", "export", "inspect", "doctor"]),
        (["--version"], [tpu_embedding.__version__]),
        (["train", "synthetic", "--set", "help"], ["--model.hidden-sizes"]),
        (["train", "--help"], ["--output-dir"]),
    ],
)
def test_help_of_commands_and_configs(arguments, shown, capsys):
    assert status_of(*arguments) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in shown)


ONE = ["--devices", "1"]
WRONG_SETTINGS = {
    "num_step=5": "--num-steps",
    "num_steps=many": "num-steps",
    "num_steps=1.5": "num-steps",
    "num_steps=0": "RunConfig.num_steps",
    "model.dims=8": "--model.dim",
    "loss=log": "log_loss",
    "make_table_optimizer=adam": "make-table-optimizer",
    "seed=4294967296": "RunConfig.seed",
    "target.metric=rmse": "metric",
}


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["trian", "synthetic"], "train"),
        (["train", "synthetic", "--device", "8"], "--devices"),
        *((["train", "synthetic", "--set", x], y) for x, y in WRONG_SETTINGS.items()),
        (["train", "syntetic"], "'syntetic'"),
        (["train", "synthetic", "--devices", "9"], "--devices"),
        (["train", "synthetic", "--devices", "0"], "--devices"),
        (["train", "synthetic", *ONE, "--data-dir", "."], "--data-dir"),
        (["train", "dlrm", *ONE, "--data-dir", "x"], "--data-dir"),
        (["train", "clicks.csv"], "'clicks.csv'"),
        (["evaluate", "synthetic", *ONE], "synthetic"),
        (["compile", "synthetic", "--topology", "v9:2x2"], "topology"),
        (["compile", "synthetic", "--topology", "v5e:3x3"], "topology"),
    ],
)
def test_errors_of_the_user(arguments, name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert status_of(*arguments) == 2
    assert name in capsys.readouterr().err
    assert not (tmp_path / "runs" / "clicks").exists()


@pytest.mark.full
def test_train_and_evaluate(tmp_path, capsys):
    options = ["--devices", "2", "--output-dir", tmp_path]
    run = ["synthetic", *options, *set_options(SMALL)]
    assert status_of("train", *run, "--stop-at", "2") == 75
    assert status_of("train", *run) == 2
    assert "--resume" in capsys.readouterr().err
    assert status_of("train", *run, "--resume") == 0
    (trained,) = [s for s in capsys.readouterr().out.splitlines() if "result" in s]
    assert status_of("evaluate", *run) == 0
    assert trained in capsys.readouterr().out


@pytest.mark.full
def test_output_that_nobody_reads_ends_a_command_quietly():
    program = (
        "from tpu_embedding.tools.cli import command\n"
        "class Lines:\n"
        "    def run(self):\n"
        "        for line in range(10**6):\n"
        "            print(line)\n"
        "raise SystemExit(command._run(Lines()))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")


def test_another_broken_pipe_is_an_error(capsys):
    failing = types.SimpleNamespace(run=mock.Mock(side_effect=BrokenPipeError("gone")))
    assert command._run(failing) == 1
    assert "gone" in capsys.readouterr().err
