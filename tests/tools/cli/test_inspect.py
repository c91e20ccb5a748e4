"""Tests `tpu-embedding inspect`: the tables of a checkpoint, and one row by its id."""

import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

import tpu_embedding as te
from tests.checkpoint.states import plan_of, state_of
from tpu_embedding.strings.string_ids import save_vocabularies
from tpu_embedding.tools import cli

USER_ID = 2**40


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A run with two checkpoints of a static and a dynamic table."""
    directory = tmp_path_factory.mktemp("run")
    plan = plan_of({"movie": 2000, "user": te.Dynamic(capacity=64)}, devices=1)
    state = state_of(plan)
    ids = {"movie": np.arange(2), "user": np.array([USER_ID, -7])}
    batch = te.inputs.prepare_features(ids, plan)
    result = te.functional.insert_ids(state["tables"], state["slots"], batch, plan)
    state = {"tables": result.tables, "slots": result.slots}
    with ocp.CheckpointManager(directory / "checkpoints") as manager:
        for step in (9, 10):
            manager.save(step, args=te.checkpoint.SaveState(state, plan))
    return directory


def test_tables_are_listed(run_directory, capsys):
    assert cli.main(["inspect", str(run_directory)]) == 0
    text = capsys.readouterr().out
    assert str(run_directory / "checkpoints" / "10") in text
    assert re.search(r"^movie +accumulators +2,000 +4 +float32$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("table", "id_", "row"), [("movie", 17, 17), ("user", USER_ID, 0), ("user", -7, 1)]
)
def test_a_row_is_printed(run_directory, capsys, table, id_, row):
    path = run_directory / "checkpoints" / "10"
    assert cli.main(["inspect", str(path), "--row", table, str(id_)]) == 0
    (wanted,) = te.checkpoint.read_table(path, table, [row])
    text = capsys.readouterr().out
    assert f"values: {wanted.tolist()}\naccumulators: [" in text


@pytest.fixture
def with_strings(run_directory, tmp_path):
    """A copy of the run whose static table has a vocabulary."""
    copied = shutil.copytree(run_directory, tmp_path / "run")
    movies = te.inputs.Vocabulary(["55", "39", "a b"], mask_token="")
    save_vocabularies(copied, {"movie": movies})
    return copied


@pytest.mark.parametrize(
    ("string", "row", "place"),
    [("39", 3, ""), ("a b", 4, "checkpoints"), ("55", 2, "checkpoints/10")],
)
def test_strings_have_the_rows_of_the_vocabulary(
    with_strings, capsys, string, row, place
):
    arguments = ["inspect", str(with_strings / place), "--row", "movie", string]
    assert cli.main(arguments) == 0
    path = with_strings / "checkpoints" / "10"
    (wanted,) = te.checkpoint.read_table(path, "movie", [row])
    shown = capsys.readouterr().out
    assert f"movie {string}: row {row}\nvalues: {wanted.tolist()}\n" in shown


WRONG_ROWS = [
    *([name, "movie", name] for name in ("2", "", "[UNK]")),
    *(["film", "film", "3"], ["user", "user", "5"], ["user", "user", "x"]),
]


@pytest.mark.parametrize(("shown", "table", "id_"), WRONG_ROWS)
def test_unknown_rows(with_strings, capsys, shown, table, id_):
    assert cli.main(["inspect", str(with_strings), "--row", table, id_]) == 2
    assert f"{shown!r}" in capsys.readouterr().err


def test_rows_outside_of_a_table(run_directory, capsys):
    assert cli.main(["inspect", str(run_directory), "--row", "movie", "2000"]) == 2
    assert "1999" in capsys.readouterr().err


@pytest.mark.full
def test_links_out_of_a_run_are_not_followed(with_strings, tmp_path, capsys):
    (with_strings / "vocabularies").rename(tmp_path / "moved")
    (with_strings / "vocabularies").symlink_to(tmp_path / "moved")
    assert cli.main(["inspect", str(with_strings)]) == 2
    assert str(with_strings / "vocabularies") in capsys.readouterr().err
