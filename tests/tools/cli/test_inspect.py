"""Tests `tpu-embedding inspect`: text, JSON, rows and refusals."""

import json
import re

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools import cli


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The latest checkpoint of a run, with a trained and a constant table."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    configs = {
        "movie": te.TableConfig(
            vocabulary_size=2000, dim=4, name="movie", optimizer=te.optimizers.adam(0.1)
        ),
        "genre": te.TableConfig(vocabulary_size=20, dim=7, name="genre"),
    }
    features = {k: te.FeatureConfig(table=table) for k, table in configs.items()}
    plan = te.make_plan(features, mesh_of(2))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    genre = np.ones((20, 7), np.float32)
    genre[3, 0] = np.nan
    with pytest.warns(UserWarning, match="NaN or infinite were written"):
        tables = te.functional.with_table_values(tables, {"genre": genre}, plan)
    slots = te.functional.init_slots(tables, plan)
    momenta = te.functional.slot_values(slots, plan)["movie"]
    name = sorted(momenta)[0]
    momenta[name][17] = 1
    slots = te.functional.with_slot_values(
        slots, {"movie": {name: momenta[name]}}, plan
    )
    checkpoints = te.checkpoint.RunCheckpoints(directory, kept=None, plan=plan)
    for step in (9, 10):
        checkpoints.save(step, {"tables": tables, "slots": slots}, {})
    checkpoints.close()
    return directory / "10"


def run(capsys, *arguments):
    assert cli.main(["inspect", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", captured.out)
    return captured.out


def test_text(checkpoint, capsys):
    text = run(capsys, checkpoint)
    assert text.startswith(f"{checkpoint}, step 10\ntables: 2, rows: 2,020, values: ")
    assert re.search(r"^movie +count int32\[\] +2,000 +4 +float32 ", text, re.MULTILINE)
    assert re.search(r"^movie( +[\d.]+){3} +1,999 +99.95% +0$", text, re.MULTILINE)
    assert re.search(r"^genre( +2.646){3} +\? +- +1$", text, re.MULTILINE)
    assert "never touched is not known for genre: it has no slot variables" in text
    # A run, its checkpoints, and its latest checkpoint are the same.
    for path in (checkpoint.parent, checkpoint.parent.parent):
        assert run(capsys, path) == text
    assert "genre" not in run(capsys, checkpoint, "--table", "movie")


def test_json(checkpoint, capsys):
    document = json.loads(run(capsys, checkpoint, "--json"))
    assert document["step"] == 10
    movie, genre = document["tables"]["movie"], document["tables"]["genre"]
    assert (movie["vocabulary_size"], movie["dim"], movie["bytes"]) == (2000, 4, 32000)
    assert (movie["never_touched"], genre["never_touched"]) == (1999, None)
    assert (movie["not_finite"], genre["not_finite"]) == (0, 1)
    assert genre["norms"]["maximum"] == pytest.approx(7**0.5)


def test_rows(checkpoint, capsys):
    text = run(capsys, checkpoint, "--table", "movie", "--rows", "17,3")
    heads = [line for line in text.splitlines() if line.startswith("movie, row")]
    assert [head.rpartition(", ")[2] for head in heads] == ["touched", "never touched"]
    arguments = ("--table", "movie", "--rows", "17,3", "--json")
    rows = json.loads(run(capsys, checkpoint, *arguments))
    values = te.checkpoint.read_table(checkpoint, "movie", [17, 3])
    for row, wanted in zip(rows, values, strict=True):
        np.testing.assert_array_equal(np.float32(row["values"]), wanted)
    text = run(capsys, checkpoint, "--table", "genre", "--rows", "3")
    assert text.startswith("genre, row 3: norm nan, touched or not: ?\n  values ")
    assert len(text.splitlines()) == 3  # Seven values take two lines.
    rows = json.loads(run(capsys, checkpoint, "--table=genre", "--rows=3", "--json"))
    assert rows[0]["values"][:2] == ["nan", 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["not_there"], "not_there holds no checkpoint"),
        (["{}", "--rows", "3"], "--rows needs --table"),
        (["{}", "--table", "film"], "--table film: .* has the tables genre, movie"),
        (
            ["{}", "--table", "genre", "--rows", "20"],
            "from 0 to 19, or from -20 .*, got 20",
        ),
    ],
)
def test_refusals(checkpoint, capsys, arguments, message):
    arguments = [argument.format(checkpoint) for argument in arguments]
    assert cli.main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert re.search(message, captured.err), captured.err


RANGES = {
    "0:10": range(10),
    "5:": range(5, 20),
    ":": range(20),
    "-1": [19],
    "-3:": [17, 18, 19],
    "-20,2:4,19": [0, 2, 3, 19],
    "18:99": [18, 19],
}


@pytest.mark.parametrize(("rows", "wanted"), RANGES.items())
def test_ranges_and_negative_rows(checkpoint, capsys, rows, wanted):
    arguments = ("--table=genre", f"--rows={rows}", "--json")
    found = json.loads(run(capsys, checkpoint, *arguments))
    assert [row["row"] for row in found] == list(wanted)


@pytest.mark.parametrize(
    ("rows", "got"), [("-21", "-21"), ("4:4", "empty"), ("20:", "empty")]
)
def test_rows_that_are_not_there(checkpoint, capsys, rows, got):
    command = ["inspect", str(checkpoint), "--table=genre", f"--rows={rows}"]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert "from 0 to 19, or from -20 to -1 from its end" in error and got in error


@pytest.mark.parametrize("rows", ["3,x", "1:2:3", "a:", ""])
def test_row_ids_that_are_none(checkpoint, capsys, rows):
    command = ["inspect", str(checkpoint), "--table", "movie", f"--rows={rows}"]
    assert cli.main(command) == 2
    assert "--rows must" in capsys.readouterr().err
