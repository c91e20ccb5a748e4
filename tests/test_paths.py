"""Paths as users write them: every function and every command takes them all."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import quick_cases, with_ids
from tests.tools.data.criteo_text import write_criteo_text
from tpu_embedding import kernel_verdicts
from tpu_embedding.checkpoint import CheckpointError, RunCheckpoints, open_tables
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.paths import local_path
from tpu_embedding.tools import cli
from tpu_embedding.tools.data.criteo_to_parquet import convert
from tpu_embedding.tools.train import CriteoSource

PLAN = te.make_plan(
    te.FeatureConfig(table=te.TableConfig(vocabulary_size=10, dim=4, name="movie")),
    mesh_of(1),
)
PATHS = {
    "relative": "ck",
    "pathlib": pathlib.Path("ck"),
    "dot": "./ck",
    "trailing slash": "ck/",
    "parent": "sub/../ck",
    "absolute with parent": "{here}/sub/../ck",
    "two slashes": "{here}//ck",
    "space": "with space/ck",
    "percent": "a%20b/ck",
    "home": "~/ck",
    "home as pathlib": pathlib.Path("~/ck"),
    "link": "link/ck",
    "parent of a link": "link/../ck",
}
"""How a directory may be written. Folder `link` points to `elsewhere/deep`."""
each_path = pytest.mark.parametrize(
    "path",
    quick_cases(
        with_ids(PATHS), "relative", "pathlib", "home", "parent of a link", "percent"
    ),
)

SETTINGS = [
    *("--set", "batch_size=16", "--set", "model.dim=4"),
    *("--set", "model.hidden_sizes=4", "--set", "data.num_evaluation_samples=32"),
    *("--set", "num_steps=2", "--set", "log_every=1", "--set", "checkpoint_every=2"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory; the home directory is in it."""
    for folder in ("home", "sub", "elsewhere/deep", "with space", "a%20b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def written(path, here):
    return path.format(here=here) if isinstance(path, str) else path


def state(seed=0):
    return {
        "tables": te.functional.init_tables(PLAN, jax.random.key(seed)),
        "step": seed,
    }


@each_path
def test_checkpoints(here, path):
    path = written(path, here)
    te.save(path, state(3), plan=PLAN)
    te.save(path, state(4), plan=PLAN, overwrite=True)
    assert te.restore(path, state(), plan=PLAN)["step"] == 4
    rows = te.checkpoint.read_table(path, "movie")
    wanted = te.functional.unstack_tables(state(4)["tables"], PLAN)["movie"]
    np.testing.assert_array_equal(rows, wanted)
    assert te.checkpoint.describe(path).dense == {"step": "int"}
    assert not (here / "~").exists()


@each_path
def test_checkpoints_of_a_run(here, path):
    checkpoints = RunCheckpoints(written(path, here), kept=1, plan=PLAN)
    checkpoints.save(2, state(3), {})
    checkpoints.wait()
    assert checkpoints.restore(state(), {})[1]["step"] == 3
    checkpoints.close()
    assert saved_steps(written(path, here)) == [2]


@each_path
def test_files_of_tables(here, path):
    """Imports from orbax and from NumPy, and exports."""
    target = pathlib.Path(os.path.realpath(os.path.expanduser(written(path, here))))
    values = {"movie": np.arange(40, dtype=np.float32).reshape(10, 4)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(target / "orbax", values)
    np.savez(target / "tables.npz", **values)
    for name in ("orbax", "tables.npz"):
        source = open_tables(os.path.join(written(path, here), name))
        np.testing.assert_array_equal(
            source.tables["movie"].values.read(0, 10), values["movie"]
        )
    layer = te.TPUEmbedding(None, plan=PLAN, rngs=nnx.Rngs(0))
    te.export.save_tables(layer, os.path.join(written(path, here), "served"))
    assert (target / "served" / "export.json").is_file()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a finished run."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    options = ["--devices", "1", "--output-dir", str(directory)]
    assert cli.main(["train", "synthetic", *options, *SETTINGS]) == 0
    return directory


RUN_PATHS = {
    "relative": "runs/a",
    "parent": "../{name}/runs/a",
    "home": "~/runs/a",
    "link": "link/../runs/a",
}


@pytest.mark.full
@pytest.mark.parametrize("path", RUN_PATHS.values(), ids=RUN_PATHS)
def test_inspect(here, run, path, capsys):
    for folder in ("runs", "home/runs", "elsewhere/runs"):
        shutil.copytree(run, here / folder / "a")
    assert cli.main(["inspect", path.format(name=here.name)]) == 0
    assert "step 2" in capsys.readouterr().out


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("path", RUN_PATHS.values(), ids=RUN_PATHS)
def test_train_and_export(here, path):
    (here / "runs").mkdir()
    path = path.format(name=here.name)
    config = here / "home" / "own.py"
    config.write_text(
        "from tpu_embedding.tools.train import load_config\n"
        "config = load_config('synthetic')\n"
    )
    options = ["--devices", "1", "--output-dir", path, *SETTINGS]
    assert cli.main(["train", "~/own.py", *options]) == 0
    assert cli.main(["train", "~/own.py", *options, "--resume"]) == 0
    options = ["--run-dir", path, "--devices", "1", *SETTINGS]
    assert cli.main(["export", "~/own.py", f"{path}-served/", *options]) == 0
    te.export.load(f"{path}-served")
    assert not (here / "~").exists()


@each_path
def test_files_of_data(here, path):
    path = pathlib.Path(written(path, here))
    local_path(path).mkdir(parents=True, exist_ok=True)
    write_criteo_text(local_path(path) / "train.txt", 8)
    convert(path / "train.txt", path / "train.parquet")
    source = CriteoSource(vocabulary_size=10, num_evaluation_samples=4)
    data = source.open(path, batch_size=4, seed=0)
    assert data.train_batch(0).labels.shape == (4,)
    (local_path(path) / "tokens.txt").write_text("a\nb\n")
    assert te.inputs.Vocabulary.from_file(path / "tokens.txt").tokens == ("a", "b")
    assert not (here / "~").exists()


def test_the_directory_of_verdicts(here, monkeypatch):
    monkeypatch.setenv(kernel_verdicts.DIRECTORY_VARIABLE, "~/verdicts")
    assert kernel_verdicts.verdict_file().parent == here / "home" / "verdicts"


def not_there(path):
    shutil.rmtree(path)


def empty_directory(path):
    shutil.rmtree(path)
    path.mkdir()


def a_web_page(path):
    empty_directory(path)
    (path / "manifest.json").write_text(json.dumps({"name": "page", "icons": []}))


def unreadable_file(path):
    (path / "state.json").unlink()
    (path / "state.json").mkdir()


def missing_file(path):
    (path / "tables/movie.values/zarr.json").unlink()


def missing_chunk(path):
    (path / "tables/movie.values/c/0/0").unlink()


NOT_DAMAGED = {
    function.__name__: (function, message)
    for function, message in (
        (not_there, "holds no checkpoint"),
        (empty_directory, "holds no checkpoint"),
        (a_web_page, "is no manifest of te.save"),
        (unreadable_file, "state.json cannot be read: IsADirectoryError"),
        (missing_file, "zarr.json of table 'movie' is missing"),
        (missing_chunk, "0/0 of table 'movie' is missing"),
    )
}


@pytest.mark.parametrize(("change", "message"), NOT_DAMAGED.values(), ids=NOT_DAMAGED)
def test_no_file_is_called_damaged_before_its_digest_disagrees(here, change, message):
    te.save("ck", state(), plan=PLAN)
    change(here / "ck")
    with pytest.raises(CheckpointError, match=message) as error:
        te.restore("ck", state(), plan=PLAN)
    assert "is damaged" not in str(error.value)


def test_an_error_of_orbax_is_no_damage(here, monkeypatch):
    te.save("ck", state(), plan=PLAN)

    def restore(*_, **__):
        raise ValueError("Checkpoint path should be absolute")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", restore)
    with pytest.raises(CheckpointError, match="right checksums, and orbax cannot read"):
        te.restore("ck", state(), plan=PLAN)


def test_other_stores_are_refused(here):
    with pytest.raises(CheckpointError, match="local or start with gs:// or s3://"):
        te.save("file:///tmp/ck", state(), plan=PLAN)
