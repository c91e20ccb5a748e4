"""Wrong command lines and configs: one error each, which names field and value.

Each case runs in this process, which is fast. `test_as_a_process` runs a few of them as
a process of their own.
"""

import os
import re
import subprocess
import sys

import jax
import pytest

from tests.own_config import write_clicks, write_config
from tpu_embedding.tools import cli


@pytest.fixture(scope="module", autouse=True)
def _jax_has_started():
    """Initialises JAX first, so that `--devices` of one test affects no other test."""
    assert len(jax.devices()) == 8


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(arguments):
    """Returns the exit status, whether argparse or the command itself refuses."""
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return error.code


def check_one_error(text, message):
    assert "Traceback" not in text
    (line,) = re.findall(r"^.*\berror: .*$", text, re.MULTILINE)
    assert re.search(message, line), line


def setting(key, value, message):
    """Returns the case of one `--set`; all errors name the key and quote the value."""
    quoted = re.escape(value)
    return ["train", "synthetic", "--set", f"{key}={value}"], f"{message}.*{quoted}"


COMMAND_LINES = [
    # Usage
    ([], "required: COMMAND"),
    (["fly"], "invalid choice: 'fly'"),
    (["train"], "required: CONFIG"),
    (["train", "synthetic", "--wings"], "unrecognized arguments: --wings"),
    (["train", "synthetic", "--over"], "unrecognized arguments: --over"),
    (["train", "synthetic", "extra"], "unrecognized arguments: extra"),
    (["train", "synthetic", "--resume", "--overwrite"], "not allowed with .*--resume"),
    (["train", "synthetic", "--set"], "--set: expected one argument"),
    (["train", "synthetic", "--stop-at", "0"], "--stop-at: must be at least 1, got 0"),
    (["train", "synthetic", "--stop-at", "x"], "--stop-at: must be an int, got 'x'"),
    (
        ["train", "synthetic", "--profile", "5:5"],
        "--profile: A profile needs START:STOP with 0 <= START < STOP, got 5:5",
    ),
    (
        ["train", "synthetic", "--profile", "2"],
        "--profile: A profile needs START:STOP, two numbers of steps such as 100:105",
    ),
    (
        ["compile", "synthetic", "--topology", "v5e:2x2", "--programs", "init,x"],
        "--programs: must be all, or some of train_step,init,.*, got 'x'",
    ),
    # Devices
    (["train", "synthetic", "--devices", "0"], "--devices: must be at least 1, got 0"),
    (["train", "synthetic", "--devices", "-1"], "--devices: must be at least 1, .* -1"),
    (["train", "synthetic", "--devices", "2.5"], "--devices: must be an int, .*'2.5'"),
    (["train", "synthetic", "--devices", "all"], "--devices: must be an int, .*'all'"),
    (["train", "synthetic", "--devices", "257"], "--devices: .* at most 256, .* 257"),
    (["train", "synthetic", "--devices", "512"], "--devices: .* at most 256, .* 512"),
    (["train", "synthetic", "--devices", "9"], "--devices 9: JAX has started with 8"),
    # Configs and paths
    (["train", "nothing"], "no config 'nothing'.*dlrm, dlrm_dcnv2, dlrm_v4, "),
    (["train", "nothing.py"], "no config 'nothing.py'"),
    (["train", "."], "no config '.'"),
    (["train", ""], "no config ''"),
    (["train", "synthetic", "--data-dir", "."], "reads no file.*leave --data-dir out"),
    (["train", "movielens"], "reads MovieLens-100K.*--data-dir"),
    (["train", "movielens", "--data-dir", "absent"], "absent.* is missing"),
    (["train", "dlrm", "--data-dir", "absent"], "absent is missing on this machine"),
    (["train", "dlrm", "--data-dir", "junk.csv"], "Convert Criteo's text once"),
    (["train", "synthetic", "--output-dir", "file"], "--output-dir file: .* no direct"),
    (["train", "synthetic", "--output-dir", "file/x"], "--output-dir .* no directory"),
    (["train", "synthetic", "--resume"], "no run in runs/synthetic to resume"),
    (
        ["train", "synthetic", "--output-dir", "old"],
        "old holds an earlier run that sav",
    ),
    (["train", "synthetic", "--output-dir", "foreign"], "foreign/checkpoints exists"),
    # Settings: keys
    (["train", "synthetic", "--set", "steps=3"], "'steps' is no key.*num_steps"),
    (["train", "synthetic", "--set", "model.width=3"], "'model.width' is no key"),
    (["train", "synthetic", "--set", "model.dim.x=3"], "'model.dim.x' is no key"),
    (["train", "synthetic", "--set", "=3"], "'' is no key"),
    (["train", "synthetic", "--set", "seed"], "--set takes KEY=VALUE, got 'seed'"),
    (["train", "synthetic", "--set", "model=3"], "'model' is a section"),
    (["train", "synthetic", "--set", "make_table_optimizer=3"], "is a function"),
    (
        ["train", "synthetic", "--set", "seed=1", "--set", "seed=2"],
        "--set seed is given twice, as '1' and '2'",
    ),
    # Settings: types
    setting("num_steps", "many", "num_steps must be an int, got"),
    setting("num_steps", "1.5", "num_steps must be an int, got"),
    setting("batch_size", "", "batch_size must be an int, got ''"),
    setting("table_learning_rate", "fast", "must be a finite number, got"),
    setting("table_learning_rate", "nan", "must be a finite number, got"),
    setting("dense_learning_rate", "inf", "must be a finite number, got"),
    setting("model.hidden_sizes", "8,x", "must be ints separated by commas, got"),
    setting("capacity", "x", "capacity must be an int or none, got"),
    setting("loss", "hinge", "loss must be one of log_loss, squared_error"),
    setting("target.at_most", "nan", "at_most must be a finite number or none, got"),
    # Settings: values
    setting("seed", "-1", "RunConfig.seed must be an int of at least 0, got"),
    setting("seed", "4294967296", r"RunConfig.seed must be at most 2\*\*32 - 1, got"),
    setting("seed", "99999999999999999999999", "RunConfig.seed must be at most"),
    setting("batch_size", "0", "RunConfig.batch_size must be an int of at least 1"),
    setting("num_steps", "-5", "RunConfig.num_steps must be an int of at least 1"),
    setting("log_every", "0", "RunConfig.log_every must be an int of at least 1"),
    setting("capacity", "0", "RunConfig.capacity must be an int of at least 1"),
    setting("table_learning_rate", "-0.5", "table_learning_rate must be .*not negativ"),
    setting("kernels", "gpu", "RunConfig.kernels must be one of"),
    (
        ["train", "synthetic", "--set", "target.at_most=none"],
        "Target must have at_most or at_least, and not both, got None and None",
    ),
    (
        ["train", "synthetic", "--set", "target.at_least=1"],
        "and not both, got 1.02 and 1.0",
    ),
    setting("loss_weight", "0", "RunConfig.loss_weight must be finite and positive"),
    setting("max_dense_norm", "-1", "max_dense_norm must be finite and positive, or"),
    setting("target.metric", "bogus", r"target.metric must be one of \['log_loss'\]"),
    setting(
        "loss", "squared_error", r"target.metric must be .*\['rmse'\] for the loss"
    ),
    setting("name", "../../x", "RunConfig.name must be .* without path separators"),
    setting("name", "/tmp/x", "RunConfig.name must be .* without path separators"),
    (["train", "synthetic", "--set", r"name=a\b"], r"without path .*'a\\\\b'"),
    setting("name", "..", "RunConfig.name must be a string without path separators"),
    setting("name", "", "RunConfig.name must be a string without path separators"),
    setting("model.dim", "0", "ClickModelConfig.dim must be positive, got"),
    setting("data.valence", "0", "valence must be at least 1, got"),
    setting("data.zipf_exponent", "-1", "zipf_exponent must be a finite number"),
    setting("data.num_evaluation_samples", "0", "num_evaluation_samples must be"),
    # Options of the compiler
    (["train", "synthetic", "--compiler-option", "a"], "takes NAME=VALUE, got 'a'"),
    (
        ["train", "synthetic", "--compiler-option", "a=b"],
        "empty on cpu, got {'a': 'b'}",
    ),
    (
        ["train", "synthetic", "--compiler-option", "a=1", "--compiler-option", "a=2"],
        "--compiler-option a is given twice, as '1' and '2'",
    ),
    # compile
    (["compile", "synthetic"], "required: --topology"),
    (["compile", "--topology", "v5e:2x2"], "required: CONFIG"),
    (["compile", "synthetic", "--topology", "v5e:2x2", "--slices", "x"], "--slices: m"),
    (
        ["compile", "synthetic", "--topology", "v5e:2x2", "--kernels", "gpu"],
        "--kernels: invalid choice: 'gpu'",
    ),
    (
        ["compile", "synthetic", "--topology", "v5e:2x2", "--json", "."],
        r"--json \. is a directory, not a file",
    ),
    (
        ["compile", "synthetic", "--topology", "v5e:2x2", "--plot", "absent/a.svg"],
        "--plot absent/a.svg: the directory absent does not exist",
    ),
    (
        ["compile", "synthetic", "--topology", "v5e:2x2", "--plot", "a.html"],
        "--plot a.html: the file must end with one of .png, .svg, .pdf",
    ),
]


def identifier(case):
    return " ".join(case[0]) or "(nothing)"


@pytest.mark.parametrize(
    ("arguments", "message"), COMMAND_LINES, ids=map(identifier, COMMAND_LINES)
)
def test_wrong_command_line(tmp_path, capsys, arguments, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "junk.csv").write_text("a,b\n1,2\n")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"run": {}}\n')
    (tmp_path / "foreign" / "checkpoints" / "3").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert run(arguments) == cli.WRONG_USAGE
    check_one_error(capsys.readouterr().err, message)
    assert sorted(tmp_path.rglob("*")) == before


BROKEN_FILES = {
    "config = (\n": r"fails with SyntaxError: .*\(mine.py, line 1\)",
    "a = 1\nb = a / 0\n": "fails in line 2 of mine.py with ZeroDivisionError",
    "import not_there\n": "fails in line 1 of .* with ModuleNotFoundError.*'not_there'",
    "x = 1\n": "must define `config`.* got nothing",
    "config = 3\n": "must define `config`.* got a int",
    "exit()\n": r"fails in line 1 of mine.py with a call of exit\(None\)",
    "import sys\nsys.exit(3)\n": r"fails in line 2 of mine.py with a call of exit\(3\)",
    "raise SystemExit('bye')\n": r"fails in line 1 of .* with a call of exit\('bye'\)",
    "x = '\0'\n": "fails with SyntaxError",
    "a = 1\nraise MemoryError\n": "fails in line 2 of mine.py with MemoryError",
    "import jax\nraise jax.errors.JaxRuntimeError('X')\n": "fails in line 2 of mine.py "
    "with JaxRuntimeError: X",
    "import tpu_embedding.tools.train as t\nraise t.DataError('no file')\n": "fails in "
    "line 2 of mine.py with DataError: no file",
    "import tpu_embedding.tools.train as t\nt.load_config('x')\n": "fails in line 2 of "
    "mine.py with ConfigError: There is no config 'x'",
    "def f(): f()\nf()\n": "fails in line 1 of mine.py with RecursionError",
}


@pytest.mark.parametrize("text", BROKEN_FILES, ids=repr)
def test_broken_file(tmp_path, capsys, text):
    (tmp_path / "mine.py").write_text(text)
    assert run(["train", "mine.py"]) == cli.WRONG_USAGE
    check_one_error(capsys.readouterr().err, f"config mine.py {BROKEN_FILES[text]}")


# Changes of the documented config: piece, replacement, error.
TABLE_RULE = "lambda run: te.optimizers.adagrad(run.table_learning_rate)"
DENSE_RULE = "lambda run: optax.adam(run.dense_learning_rate)"
OUTPUTS = "train.click_outputs(self.mlp(inputs)[:, 0])"
OPEN = "return Clicks(data_dir, self.num_held_out, batch_size, seed)"
TRAIN_BATCH = "return self.batch(random.integers(self.num_train, size=self.batch_size))"
EVALUATION = "yield self.batch(start + np.arange(self.batch_size))"
LAYER = "te.TPUEmbedding(None, plan=plan, rngs=rngs)"

WRONG_CONFIGS = [
    # The config itself
    (
        "data=ClicksSource()",
        "data=object()",
        "RunConfig.data must be .*DataSource, open",
    ),
    ("data=ClicksSource()", "data=None", "RunConfig.data must be .* got None"),
    ("data=ClicksSource()", "data=ClicksSource", "RunConfig.data must be an instance"),
    (
        "model=ClickModelConfig()",
        "model=3",
        "RunConfig.model must be .*feature_config a",
    ),
    ("batch_size=64", "batch_size=64.0", "batch_size must be an int .* got 64.0"),
    ("batch_size=64", "batch_size=True", "batch_size must be an int .* got True"),
    ("num_steps=200", "num_steps='9'", "num_steps must be an int .* got '9'"),
    ('"log_loss"', '"hinge"', "RunConfig.loss must be one of .* got 'hinge'"),
    ("rate=0.1", "rate='fast'", "table_learning_rate must be finite .* got 'fast'"),
    ("rate=0.1", "rate=None", "table_learning_rate must be finite .* got None"),
    ('name="clicks"', "name=None", "RunConfig.name must be a string .* got None"),
    (
        'name="clicks",',
        'name="clicks", target=train.Target(metric="auc", at_most=1.0),',
        "target.metric must be one of .*'log_loss'.* got 'auc'",
    ),
    ("dim: int = 16", "dim: object = np.sum", "ClickModelConfig.feature_config fails"),
    ("dim: int = 16", "dim: object = object()", "RunConfig.model.dim must be a number"),
    # Optimizers
    (TABLE_RULE, "None", "make_table_optimizer must be a function .* got None"),
    (TABLE_RULE, "lambda run: None", "make_table_optimizer must return an .* got None"),
    (TABLE_RULE, "lambda run: 'adadam'", "make_table_optimizer must return .*'adadam'"),
    (TABLE_RULE, "lambda run: run.rate", "make_table_optimizer fails in line .*'rate'"),
    (TABLE_RULE, "lambda: 3", "make_table_optimizer fails with TypeError"),
    (DENSE_RULE, "None", "make_dense_optimizer must be a function .* got None"),
    (DENSE_RULE, "lambda run: None", "make_dense_optimizer must return an .* got None"),
    (DENSE_RULE, "lambda run: 1 / 0", "make_dense_optimizer fails in line .*ZeroDivi"),
    # The source
    (OPEN, "pass", "ClicksSource must open a .*Dataset, got a NoneType without train_"),
    (OPEN, "return {}", "got a dict without train_batch and evaluation_batches"),
    (OPEN, "return data_dir['x']", "ClicksSource.open fails in line .* with TypeError"),
    (OPEN, "raise OSError('disk')", "ClicksSource.open fails in line .* OSError: disk"),
    (OPEN, "exit()", r"ClicksSource.open fails in line .* with a call of exit\(None\)"),
    ("skiprows=1", "skiprows=0", "ClicksSource.open fails in line .* ValueError"),
    (
        "self.seed = path, batch_size",
        "self.seed = path, 8",
        "Clicks.batch_size .* got 8",
    ),
    # Batches
    (
        TRAIN_BATCH,
        "return None",
        r"Clicks.train_batch\(0\) must be .*Batch, got a None",
    ),
    (
        TRAIN_BATCH,
        "return {}['x']",
        r"Clicks.train_batch\(0\) fails in line .* KeyError",
    ),
    (
        "size=self.batch_size)",
        "size=9)",
        r"train_batch\(0\): labels .* \[64\], .* \[9\]",
    ),
    (
        "labels=clicks",
        "labels=clicks[:, None]",
        r"labels must be .* got shape \[64, 1\]",
    ),
    ("labels=clicks", "labels=None", r"labels must be an array of numbers .* got None"),
    ("labels=clicks", "labels=['a'] * 64", "labels must be an array of numbers .* <U1"),
    ("labels=clicks", "labels=clicks * 1j", "labels must be .* got dtype complex128"),
    (
        "labels=clicks",
        "labels=clicks - 7",
        r"in \[0, 1\] for the loss 'log_loss', .*-7",
    ),
    ("labels=clicks", "labels=clicks * np.nan", "labels must lie in .* got nan"),
    (
        "weights=is_sample",
        "weights=-1.0 * is_sample",
        "weights must .*at least 0, got -1",
    ),
    ("weights=is_sample", "weights=0 * is_sample", "weights must be positive for at l"),
    ("weights=is_sample", "weights=1.0", r"weights must be .* \[64\], got shape \[\]"),
    (
        "labels=clicks",
        "labels=clicks, dense=clicks",
        r"dense must .* \[64, any\], .*\[64\]",
    ),
    (
        "labels=clicks",
        "labels=clicks, dense=np.full((64, 2), np.inf)",
        "dense must be finite, got inf for sample 0 .*clicks.csv, line .*column 0",
    ),
    (
        '"user": users, ',
        "",
        "Training batch 0: .*must have the structure of feature_con",
    ),
    (
        '"user": users',
        '"user": users[:9]',
        "same number of samples, got .* 9 for .*'user'",
    ),
    (
        '"user": users',
        '"user": users * 1.5',
        "'user' must be integers, got dtype float",
    ),
    ('"user": users', '"user": users + 7', r"'user' must lie in \[0, 7\)"),
    (EVALUATION, "return iter(())", r"evaluation_batches\(\) must yield at least one"),
    (EVALUATION, "return 3", r"Clicks.evaluation_batches\(\) fails with TypeError"),
    (EVALUATION, "yield start", r"Batch 0 of Clicks.evaluation.* got a int"),
    (EVALUATION, "yield {}['x']", r"evaluation_batches\(\) fails in line .* KeyError"),
    # The model
    (
        "in sizes.items()",
        "in sizes",
        "ClickModelConfig.feature_config fails in line .*Va",
    ),
    ("size, dim=self.dim", "0, dim=self.dim", "vocabulary_size must be .* got 0"),
    (
        "return ClickModel(",
        "return (",
        "build must return an nnx.Module .* got a tuple",
    ),
    (LAYER, "nnx.Linear(2, 2, rngs=rngs)", "must return a model that owns a TPUEmbedd"),
    (LAYER, f"{LAYER}.y", "ClickModelConfig.build fails in line .* AttributeError"),
    (
        LAYER,
        "te.TPUEmbedding({'user': te.FeatureConfig(table=te.TableConfig("
        "vocabulary_size=7, dim=16))}, rngs=rngs)",
        "the TPUEmbedding 'embedding' of ClickModel must have the plan that build got",
    ),
    (OUTPUTS, "None", "ClickModel.__call__ must return .*Outputs, got a NoneType"),
    (OUTPUTS, "self.mlp(inputs)[:, 0]", "must return .*Outputs, got a "),
    (
        OUTPUTS,
        "train.click_outputs(self.mlp(inputs))",
        r"Outputs whose scores are floats of .*\[64\], got float32 \[64, 1\]",
    ),
    (
        OUTPUTS,
        "train.Outputs(scores=inputs[:, 0], predictions=inputs[:, 0], penalty=0)",
        "Outputs whose penalty are floats .* got int",
    ),
    ("2 * dim, (32", "dim, (32", "ClickModel.__call__ fails in line .* TypeError"),
    ('rows["user"]', 'rows["name"]', "__call__ fails in line .* KeyError: 'name'"),
]


def change(case):
    old, new, _ = case
    return f"{old} -> {new}"


@pytest.mark.parametrize(
    ("old", "new", "message"), WRONG_CONFIGS, ids=map(change, WRONG_CONFIGS)
)
def test_wrong_config(tmp_path, capsys, old, new, message):
    write_config(tmp_path, (old, new))
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv", "--devices", "1"]
    assert run(arguments) == cli.WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    check_one_error(captured.err, message)
    assert not (tmp_path / "runs").exists()


def test_label_outside_of_the_loss_names_file_and_line(tmp_path, capsys):
    write_config(tmp_path)
    write_clicks(tmp_path / "clicks.csv", num_lines=300, label=4)
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv"]
    assert run([*arguments, "--set", "batch_size=100"]) == cli.WRONG_USAGE
    check_one_error(
        capsys.readouterr().err,
        r"labels must lie in \[0, 1\] for the loss 'log_loss', got 4 for sample 99 "
        r"\(clicks.csv, line 301\)",
    )


def test_traceback_on_request(tmp_path, capsys):
    write_config(tmp_path, ('rows["user"]', 'rows["name"]'))
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv", "--traceback"]
    assert run(arguments) == cli.WRONG_USAGE
    error = capsys.readouterr().err
    assert 'rows["name"]' in error
    assert error.splitlines()[-1].startswith("error: ClickModel.__call__ fails in line")


def test_full_disk_is_a_failed_run(tmp_path, capsys, monkeypatch):
    def no_space(*arguments, **options):
        raise OSError(28, "No space left on device")

    write_config(tmp_path)
    monkeypatch.setattr(
        "tpu_embedding.tools.train.loop.training_loop.RunReport", no_space
    )
    arguments = ["train", "clicks.py", "--data-dir", "clicks.csv", "--devices", "1"]
    assert run(arguments) == cli.FAILED
    check_one_error(capsys.readouterr().err, "No space left on device")


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "synthetic", "--devices", "512"],
        ["train", "synthetic", "--set", "target.metric=x"],
        ["train", "calls_exit.py"],
    ],
    ids=" ".join,
)
def test_as_a_process(tmp_path, arguments):
    (tmp_path / "calls_exit.py").write_text("exit(0)\n")
    path = os.pathsep.join(path for path in sys.path if path)
    finished = subprocess.run(
        [sys.executable, "-m", "tpu_embedding.tools.cli", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == cli.WRONG_USAGE
    check_one_error(finished.stderr, "error: ")
