"""Tests the command line: whole runs of a few steps, and one error per bad input."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from tests.conftest import needs_kernels
from tests.own_config import PAGE, write_config
from tests.tools.data.criteo_text import write_criteo_text
from tpu_embedding.tools import cli
from tpu_embedding.tools.data.criteo_to_parquet import convert
from tpu_embedding.tools.jobs.run_lock import run_lock
from tpu_embedding.tools.train.loop.reporting import PLOT_FILE, RECORDS_FILE


@pytest.fixture(scope="module", autouse=True)
def _jax_has_started():
    """Initialises JAX first, so that `--devices` of one test affects no other test."""
    assert len(jax.devices()) == 8


TINY = {
    "synthetic": [
        "batch_size=50",
        "model.dim=4",
        "model.hidden_sizes=8",
        "data.num_evaluation_samples=120",
    ],
    "movielens": ["batch_size=500", "model.dim=4", "data.max_history=10"],
    "dlrm": [
        "batch_size=50",
        "model.dim=4",
        "model.bottom_sizes=8",
        "model.top_sizes=8",
        "data.vocabulary_size=50",
        "data.num_evaluation_samples=120",
    ],
}


def train_arguments(config, output_dir, *more, settings=()):
    arguments = ["train", config, "--devices", "1", "--output-dir", str(output_dir)]
    given = [*TINY.get(config, ()), "num_steps=3", "log_every=2", *settings]
    last = dict(setting.split("=") for setting in given)
    for key, value in last.items():
        arguments += ["--set", f"{key}={value}"]
    return [*arguments, *more]


def check_run(output, directory):
    lines = output.splitlines()
    assert re.fullmatch(r"result: \w+ [\d.]+( \(.*\))?, 3 steps in [\d.]+ s", lines[-1])
    assert any("whole stack" in line for line in lines)
    assert any(line.startswith("step 2/3  loss ") for line in lines)
    assert any(line.startswith("step 3/3  loss ") for line in lines)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", output)
    records = [
        json.loads(line) for line in (directory / RECORDS_FILE).read_text().splitlines()
    ]
    assert "run" in records[0]
    assert "result" in records[-1]
    assert (directory / PLOT_FILE).is_file()
    assert (directory / "checkpoints" / "3").is_dir()


def check_refusal(capsys, arguments, message, status=cli.WRONG_USAGE):
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert re.search(message, captured.err), captured.err


def test_synthetic(tmp_path, capsys):
    assert cli.main(train_arguments("synthetic", tmp_path)) == 0
    output = capsys.readouterr().out
    check_run(output, tmp_path)
    assert re.search(
        r"result: log_loss [\d.]+ \(teacher [\d.]+, ratio [\d.]+\)", output
    )
    check_refusal(capsys, train_arguments("synthetic", tmp_path), "earlier run.*resume")

    def resume(setting):
        return train_arguments("synthetic", tmp_path, "--resume", settings=[setting])

    check_refusal(capsys, resume("seed=1"), "run.seed")
    assert cli.main(resume("num_steps=5")) == 0
    assert "2 steps in" in capsys.readouterr().out
    before = (tmp_path / RECORDS_FILE).read_text()
    overwrite = train_arguments("synthetic", tmp_path, "--overwrite")
    check_refusal(capsys, [*overwrite, "--set", "seed=-1"], "RunConfig.seed")
    assert (tmp_path / RECORDS_FILE).read_text() == before
    assert cli.main(overwrite) == 0
    output = capsys.readouterr().out
    check_run(output, tmp_path)
    moved = tmp_path.with_name(f"{tmp_path.name}.old-1")
    assert output.startswith(f"moved the earlier run to {moved}\n")
    assert (moved / RECORDS_FILE).read_text() == before
    assert (moved / "checkpoints" / "5").is_dir()


def test_damage_of_the_last_step_is_a_failure(tmp_path, monkeypatch, capsys):
    """The loss before the last update is finite, and the evaluation after it is not."""
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv", "--devices", "1"]
    arguments += ["--set", "num_steps=1", "--set", "dense_learning_rate=1e30"]
    message = "evaluation after step 1 has the log_loss (nan|inf)"
    check_refusal(capsys, arguments, message, status=cli.FAILED)


@pytest.mark.full
def test_own_config_from_a_script(tmp_path):
    """The script of the guide trains on eight emulated devices."""
    (script,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "jax_num_cpu_devices" in block
    ]
    write_config(tmp_path, ("num_steps=200", "num_steps=2"))
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert "8 devices, cpu" in finished.stdout
    assert "log_loss" in finished.stdout.splitlines()[-1]


def test_two_runs_in_one_directory(tmp_path, capsys):
    with run_lock(tmp_path / "run.lock"):
        for option in ("--resume", "--overwrite"):
            arguments = train_arguments("synthetic", tmp_path, option)
            check_refusal(capsys, arguments, "is in use by process .*--output-dir")
        assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


@pytest.mark.full
def test_own_config(tmp_path, monkeypatch, capsys):
    """The config of the guide trains, resumes and takes settings of its classes."""
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv", "--devices", "3"]
    for setting in ("model.dim=4", "data.num_held_out=20", "log_every=2"):
        arguments += ["--set", setting]
    assert cli.main([*arguments, "--set", "num_steps=2"]) == 0
    capsys.readouterr()
    assert cli.main([*arguments, "--set", "num_steps=3", "--resume"]) == 0
    assert "result: log_loss" in capsys.readouterr().out.splitlines()[-1]
    records = (tmp_path / "runs" / "clicks" / RECORDS_FILE).read_text()
    run = json.loads(records.splitlines()[0])["run"]
    assert run["data"] == {"type": "ClicksSource", "num_held_out": 20}
    assert run["model"] == {"type": "ClickModelConfig", "dim": 4}


@pytest.mark.full
def test_movielens(tmp_path, capsys, movielens_dir):
    more = ["--data-dir", str(movielens_dir)]
    assert cli.main(train_arguments("movielens", tmp_path, *more)) == 0
    output = capsys.readouterr().out
    check_run(output, tmp_path)
    assert "result: rmse" in output


@pytest.mark.full
def test_dlrm_on_a_file(tmp_path, capsys):
    convert(write_criteo_text(tmp_path / "day_0", 300), tmp_path / "day_0.parquet")
    arguments = train_arguments("dlrm", tmp_path / "run", "--data-dir", str(tmp_path))
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    check_run(output, tmp_path / "run")
    assert "teacher" not in output.splitlines()[-1]


def test_damaged_file_is_named(tmp_path, capsys):
    path = tmp_path / "day_0.parquet"
    path.write_text("no Parquet")
    arguments = train_arguments("dlrm", tmp_path / "run", "--data-dir", str(path))
    check_refusal(capsys, arguments, "day_0.parquet is missing, damaged or no Parquet")


def test_training_without_the_plot_library_fails_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = train_arguments("synthetic", tmp_path / "run")
    check_refusal(capsys, arguments, "extra `train`", status=cli.FAILED)
    assert list(tmp_path.iterdir()) == []


def test_imports_without_optional_libraries():
    """A core install has neither the plot's library nor those of the tests."""
    blocked = ["beartype", "hypothesis", "matplotlib", "pytest"]
    code = (
        f"import sys; sys.modules |= dict.fromkeys({blocked})\n"
        "import tpu_embedding.tools.compile_report, tpu_embedding.tools.cli\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_divergence_is_a_failure(tmp_path, capsys):
    settings = ["dense_learning_rate=1e30"]
    check_refusal(
        capsys,
        train_arguments("synthetic", tmp_path, settings=settings),
        "loss of step 2 is (nan|inf)",
        status=cli.FAILED,
    )


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_compile(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["compile", "synthetic", "--topology", "v5e:2x2", "--topology"]
    arguments += ["v6e:2x2", "--set", "batch_size=128", "--set", "model.dim=32"]
    arguments += ["--programs", "train_step,checkpoint"]
    plot = tmp_path / "memory.svg"
    assert cli.main([*arguments, "--json", str(path), "--plot", str(plot)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        f"compiling synthetic for {topology} (devices: 4): {program} ..."
        for topology in ("v5e:2x2", "v6e:2x2")
        for program in ("train step", "save")
    ]
    for part in (
        r"synthetic on v5e:2x2: 4 devices; traced in [\d.]+ s, compiled in [\d.]+ s",
        r"\n4 devices, v6e; per device: tables",
        r"\nevery program of the run fits \(3 of them\)\n",
        r"\nsave +yes .*\nrestore +yes ",
        r"\nsave: one block of rows per device and stack",
        r"\nfits: needs [\d.]+ MiB of 32.00 GiB HBM, [\d.]+ GiB free\n",
        r"\nmodelled traffic per device and step, at peak HBM 819 GB/s",
        r"\nembedding part / minimum +[\d.]+x",
        r"\noperations on SparseCore:\n",
        r"\ntables or slot variables copied within HBM: none\n",
        r"\ntopology  devices  fits  largest program .*\n"
        r"v5e:2x2 +4   yes .*\nv6e:2x2 +4   yes ",
    ):
        assert re.search(part, captured.out), part
    written = json.loads(path.read_text())
    assert written["config"]["batch_size"] == 128
    assert written["config"]["model"]["dim"] == 32
    assert [r["topology"] for r in written["reports"]] == ["v5e:2x2", "v6e:2x2"]
    assert all(r["memory"]["fits"] and r["fits"] for r in written["reports"])
    names = [[o["name"] for o in r["others"]] for r in written["reports"]]
    assert names == [["save", "restore"]] * 2
    drawn = plot.read_text()
    for topology in ("v5e:2x2", "v6e:2x2"):
        assert f"synthetic on {topology}: 4 devices" in drawn


@pytest.mark.full
@needs_kernels
@pytest.mark.tpu_compiler
def test_compile_with_each_backend(capsys):
    arguments = ["compile", "synthetic", "--topology", "v6e:1x1", "--kernels", "xla"]
    arguments += ["--set", "batch_size=128", "--set", "model.dim=32"]
    arguments += ["--programs", "train_step"]
    assert cli.main([*arguments, "--kernels", "sparse_core"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "compiling synthetic for v6e:1x1 (devices: 1): train step ...",
        "compiling synthetic with sparse_core kernels for v6e:1x1 (devices: 1): train "
        "step ...",
    ]
    for part in (
        r"\nsynthetic with sparse_core kernels on v6e:1x1: 1 device;",
        r"\nstack_0 +read +xla, direct +the default",
        r"\nstack_0 +pool, spread, update, write +xla +the default",
        r"\nstack_0 +read, update, write +sparse_core +requested",
        r"\nstack +direction +backend +for this batch\nstack_0 +pool +sparse_core +",
    ):
        assert re.search(part, captured.out), part


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_compile_says_by_its_status_that_a_step_does_not_fit(tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = ["compile", "dlrm", "--topology", "v5e:2x2", "--json", str(path)]
    arguments += ["--programs", "train_step"]
    arguments += ["--set", "data.vocabulary_size=20000000", "--set", "model.dim=128"]
    assert cli.main(arguments) == cli.FAILED
    assert "DOES NOT FIT: needs " in capsys.readouterr().out
    (report,) = json.loads(path.read_text())["reports"]
    assert not report["memory"]["fits"]
    assert report["traffic"] is None


LARGE_INITIALIZER = """
import dataclasses
import jax
import jax.numpy as jnp
from tpu_embedding.tools.train import load_config

def twentyfold(key, shape, dtype):
    rows = jax.random.uniform(key, shape[1:], dtype)
    copies = jnp.broadcast_to(rows, (20, *shape))
    return jax.lax.optimization_barrier(copies).mean(0)

@dataclasses.dataclass(frozen=True)
class Model:
    inner: object

    def feature_config(self, data):
        features = self.inner.feature_config(data)
        user = features["user"]
        table = dataclasses.replace(
            user.table, vocabulary_size=8_000_000, initializer=twentyfold
        )
        return features | {"user": dataclasses.replace(user, table=table)}

    def build(self, data, plan, *, rngs):
        return self.inner.build(data, plan, rngs=rngs)

synthetic = load_config("synthetic")
config = dataclasses.replace(synthetic, model=Model(synthetic.model))
"""


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_compile_names_the_program_that_does_not_fit(tmp_path, monkeypatch, capsys):
    """Initial values take twenty tables at once; the train step fits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.py").write_text(LARGE_INITIALIZER)
    arguments = ["compile", "large.py", "--topology", "v5e:1x1"]
    arguments += ["--set", "model.inner.dim=32", "--programs", "init"]
    arguments += ["--json", "report.json"]
    assert cli.main(arguments) == cli.FAILED
    captured = capsys.readouterr()
    verdict = re.escape("THE RUN DOES NOT FIT: initial tables needs ")
    assert re.search(f"\n{verdict}[\\d.]+ GiB of 15.75 GiB HBM, ", captured.out)
    assert re.search(r"\nfits: needs [\d.]+ GiB of 16.00 GiB HBM", captured.out)
    (report,) = json.loads((tmp_path / "report.json").read_text())["reports"]
    assert report["memory"]["fits"] and not report["fits"]
    fits = {o["name"]: o["memory"]["fits"] for o in report["others"]}
    assert [name for name, does in fits.items() if not does] == ["initial tables"]


NO_OUTLINE = """
import dataclasses
from tpu_embedding.tools.train import load_config

@dataclasses.dataclass(frozen=True)
class Mine:
    def open(self, data_dir, *, batch_size, seed): ...

config = dataclasses.replace(load_config("synthetic"), data=Mine())
"""


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no config 'nothing'"),
        (["no_outline.py"], "a Mine, must have a method outline"),
        (["synthetic", "--set", "data.valence=0"], "valence must be at least 1"),
        (["synthetic", "--set", "capacity=0"], "capacity must be an int of at least 1"),
        (["synthetic", "--compiler-option", "=1"], "takes NAME=VALUE, got '=1'"),
        (["synthetic", "--compiler-option", "a=1"], "No such compile option: 'a'"),
        (["synthetic", "--slices", "257"], "num_slices must be from 1 to 256, got 257"),
        (["synthetic", "--topology", "v9:2x2"], "'v9:2x2' is not known.*v5e, v5p"),
        (["synthetic", "--topology", "v5e:0x1"], "'v5e:0x1' does not exist"),
        (
            ["synthetic", "--json", "not_there/x.json"],
            "--json .*not_there does not exist",
        ),
        (
            ["synthetic", "--plot", "not_there/x.png"],
            "--plot .*not_there does not exist",
        ),
    ],
)
def test_compile_refusals(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_outline.py").write_text(NO_OUTLINE)
    config, *more = arguments
    arguments = ["compile", config, "--topology", "v5e:2x2", *more]
    assert cli.main(arguments) == cli.WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [li for li in captured.err.splitlines() if not li.startswith("compiling")]
    assert len(lines) == 1
    assert re.fullmatch(f"error: .*{message}.*", lines[0])


def test_compile_without_libtpu(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    check_refusal(
        capsys,
        ["compile", "synthetic", "--topology", "v5e:2x2"],
        r"needs libtpu; install it with pip install 'tpu-embedding\[tpu\]'\.$",
    )


@pytest.mark.full
def test_as_a_process(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    arguments = train_arguments("synthetic", "run", "--devices", "3")
    finished = subprocess.run(
        [sys.executable, "-m", "tpu_embedding.tools.cli", *arguments],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    check_run(finished.stdout, tmp_path / "run")
    assert "3 devices, cpu" in finished.stdout
    assert finished.stderr == ""
