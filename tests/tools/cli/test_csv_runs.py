"""After a run of a CSV file: commands that need only its directory."""

import csv
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.tools.cli.test_command import status_of
from tpu_embedding.tools.train.trained_csv import load_served

ROOT = pathlib.Path(__file__).parents[3]
OPTIONS = ["--label", "click", "--set", "num_steps=4", "--set", "batch_size=50"]


def write_rows(path, num_rows, label="click", new=""):
    rows = [
        f"u{i % 7}{new * (i % 3 == 0)},{i % 5}| {i % 3},{i % 9}.5,2024-01-{1 + i % 28},"
        f"{i % 2}"
        for i in range(num_rows)
    ]
    path.write_text("\n".join([f"user,tags,price,day,{label}", *rows]) + "\n")
    return path


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def scores_of(path):
    return [float(row["probability"]) for row in rows_of(path)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("csv_run")
    file = write_rows(path / "clicks.csv", 300)
    command = ["train", file, "--output-dir", path / "run", *OPTIONS]
    assert status_of(*command) == 0
    file.unlink()  # Nothing needs it later.
    return path


def test_rows_of_another_file_are_predicted_and_served(directory, tmp_path):
    file = write_rows(tmp_path / "new.csv", 40, label="note", new="x")
    ids = ["--id", "user", "--id", "day"]
    scores = tmp_path / "scores.csv"
    command = ["predict", directory / "run", file, "--output", scores]
    assert status_of(*command, *ids) == 0
    with scores.open() as rows:
        assert next(rows) == "user,day,probability\n"
        assert next(rows).startswith("u0x,2024-01-1,0.")
    assert len(scores_of(scores)) == 40

    assert status_of("export", directory / "run", tmp_path / "served") == 0
    cells = rows_of(file)
    cells = {name: [row[name] for row in cells] for name in cells[0] if name != "note"}
    served = load_served(tmp_path / "served")
    predictions = np.asarray(served(cells)["predictions"])
    np.testing.assert_allclose(predictions, scores_of(scores), atol=1e-5)


def test_rows_are_numbered_and_printed(directory, tmp_path, capsys):
    file = write_rows(tmp_path / "new.csv", 3)
    assert status_of("predict", directory / "run", file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "row,probability"
    assert [line.partition(",")[0] for line in lines[1:]] == ["1", "2", "3"]


def test_a_run_is_evaluated_on_another_file_and_keeps_its_records(
    directory, tmp_path, capsys
):
    file = write_rows(tmp_path / "new.csv", 90, new="x")
    records = (directory / "run" / "metrics.jsonl").read_bytes()
    assert status_of("evaluate", directory / "run", file) == 0
    assert "log_loss 0." in capsys.readouterr().out
    assert (directory / "run" / "metrics.jsonl").read_bytes() == records


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["evaluate", "RUN"], "evaluate"),
        (["evaluate", "RUN", "unlabelled.csv"], "'click'"),
        (["predict", "RUN", "short.csv"], "['tags', 'price', 'day']"),
        (["predict", "RUN", "unlabelled.csv", "--id", "key"], "'key'"),
        (["predict", "RUN", "absent.csv"], "absent.csv"),
        (["predict", ".", "unlabelled.csv"], "holds no run"),
    ],
)
def test_errors_name_what_is_missing(directory, tmp_path, arguments, message, capsys):
    write_rows(tmp_path / "unlabelled.csv", 5, label="note")
    (tmp_path / "short.csv").write_text("user\nu1\n")
    places = {"RUN": directory / "run", ".": tmp_path}
    arguments = [
        tmp_path / x if x.endswith(".csv") else places.get(x, x) for x in arguments
    ]
    assert status_of(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_schema_is_an_error(directory, tmp_path, capsys):
    path = directory / "run" / "schema.json"
    file, text = write_rows(tmp_path / "new.csv", 3), path.read_text()
    try:
        for damaged in ("[]", "{", '{"columns": [{"name": "x", "kind": "category"}]}'):
            path.write_text(damaged)
            assert status_of("predict", directory / "run", file) == 2
            assert "schema.json" in capsys.readouterr().err
    finally:
        path.write_text(text)


@pytest.mark.parametrize(
    "column, text, table",
    [("user", "u3", "user"), ("tags", "4", "tags"), ("price", "3.5", "price (bucket)")],
)
def test_the_row_of_a_cell_is_shown(directory, column, text, table, capsys):
    assert status_of("inspect", directory / "run", "--row", column, text) == 0
    assert f"{table} {text}: row " in capsys.readouterr().out
    assert status_of("inspect", directory / "run", "--row", column, "") == 2


def write_homes(path, label, num_rows, seed, cities="abcde"):
    """Writes homes with a price, or with a yes where it is high; returns the labels."""
    random = np.random.default_rng(seed)
    city, size = random.integers(5, size=num_rows), random.integers(20, 120, num_rows)
    price = 300 + 100 * city + 5 * size + random.normal(0, 50, num_rows)
    values = price.round(1) if label == "price" else np.where(price > 850, "yes", "no")
    names = np.array([*cities])[city]
    rows = [f"{a},{b},{c}" for a, b, c in zip(names, size, values, strict=True)]
    path.write_text("\n".join([f"city,size,{label}", *rows]) + "\n")
    return values == "yes" if label == "sold" else values


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("label", ["sold", "price"])
def test_scores_of_another_file_after_four_commands(tmp_path, label):
    run = tmp_path / "run"
    write_homes(tmp_path / "homes.csv", label, 2000, seed=0)
    labels = write_homes(tmp_path / "new.csv", label, 300, seed=1, cities="abxde")
    for command in (
        ["train", "homes.csv", "--label", label, "--output-dir", run],
        ["evaluate", run, "new.csv"],
        ["inspect", run, "--row", "city", "b"],
        ["predict", run, "new.csv", "--output", "scores.csv"],
    ):
        command = [tmp_path / x if str(x).endswith(".csv") else x for x in command]
        program = [sys.executable, "-m", "tpu_embedding.tools.cli"]
        end = subprocess.run(
            [*program, *map(str, command)], cwd=ROOT, capture_output=True, text=True
        )
        assert end.returncode == 0, end.stderr
        assert not end.stderr
    name = "probability" if label == "sold" else "prediction"
    scores = np.array([float(row[name]) for row in rows_of(tmp_path / "scores.csv")])
    assert len(scores) == len(labels)
    if label == "price":
        assert np.sqrt(np.mean((scores - labels) ** 2)) < 0.7 * labels.std()
    else:
        assert np.mean(scores[labels][:, None] > scores[~labels]) > 0.8
