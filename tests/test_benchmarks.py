"""Benchmarks run from end to end on tiny shapes, and their figures fill the table."""

import json
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import interleaved  # noqa: E402  # pyright: ignore[reportMissingImports]
import record  # noqa: E402  # pyright: ignore[reportMissingImports]
import results_file  # noqa: E402  # pyright: ignore[reportMissingImports]
import settings  # noqa: E402  # pyright: ignore[reportMissingImports]
import step_check  # noqa: E402  # pyright: ignore[reportMissingImports]

TINY = settings.SETTINGS["T0"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("peers.py", "--setting T0 --peer jax_dense --rounds 1 --steps 2"),
        ("checkpoint_speed.py", "--rounds 1 --gb 0.05"),
        ("compile_time.py", "--rounds 1"),
        ("device_count.py", "--setting T0 --devices 1 2"),
        ("host_rows.py", "--tiny --devices 1 2"),
        ("host_rows_planner.py", "--tiny --steps 2"),
        ("input_speed.py", "--gb 0.03 --windows 1"),
        ("first_step.py", "--rounds 1"),
        ("memory_tables.py", "--steps 1 --rows 100 200"),
        ("table_size.py", "--devices 1 --steps 2 --rows 100 200"),
        ("serving_latency.py", "--setting tiny --batch 1 16 --rows 1000 --calls 2"),
    ],
)
def test_figures_fill_the_table(script, options, tmp_path):
    file, name = tmp_path / "figures.json", script.removesuffix(".py")
    command = [sys.executable, f"benchmarks/{script}", *options.split()]
    command += ["--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = results_file.load_results()
    assert results_file.merge(results, json.loads(file.read_text())) == name
    found = results[name]["results"]
    assert record.render(results).count(f"| {name} | ") == len(found)


def test_the_table_is_not_stale():
    page = record.PAGE.read_text()
    results = results_file.load_results()
    assert record.render_page(page, results) == page
    assert record.PAGE.with_name(record.PICTURE).read_text() == record.draw(results)


def test_a_new_figure_replaces_the_earlier_one():
    results = results_file.load_results()
    before = len(results["table_size"]["results"])
    case = {"devices": 8, "rows": 100_000}
    new = [case | {"ratio": 77.0}, {"devices": 3, "rows": 7, "ratio": 78.0}]
    document = {"benchmark": "table_size", "versions": {"jax": "1.2.3"}}
    assert results_file.merge(results, document | {"results": new}) == "table_size"
    assert len(results["table_size"]["results"]) == before + 1
    table = record.render(results)
    assert "| table_size | devices 8, rows 100,000 | ratio 77.00 |" in table


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad"])
def test_the_judge_of_the_first_step(optimizer):
    setting = settings.Setting(
        name="one", tables=1, rows=4, dim=2, batch=2, valence=2, exponent=1.0
    )
    ids = np.array([[[1, 3], [3, 3]]])
    before, after = step_check.first_step(setting, ids, optimizer)
    rows = settings.initial_values(0, np.arange(4), 2)
    np.testing.assert_array_equal(before[:, 0], [rows[1] + rows[3], rows[3] + rows[3]])

    one, two = settings.cotangents(setting)[:, 0].astype(np.float64)
    gradients = {1: one, 3: one + 2 * two}
    for row, gradient in gradients.items():
        squares = gradient**2
        if optimizer == "rowwise_adagrad":
            squares = squares.mean()
        rows[row] -= 0.01 * gradient / np.sqrt(0.1 + squares)
    expected = [rows[1] + rows[3], rows[3] + rows[3]]
    np.testing.assert_allclose(after[:, 0], expected, rtol=0, atol=1e-7)  # float32


def test_a_wrong_side_is_rejected(tmp_path, monkeypatch):
    wrong = np.zeros((2, TINY.batch, TINY.tables, TINY.dim), np.float32)
    closed = []

    def ask(command, file):
        np.save(file, wrong)
        return {"versions": {}}

    side = types.SimpleNamespace(ask=ask, close=lambda: closed.append(True))
    monkeypatch.setattr(step_check, "SideProcess", lambda *_, **__: side)
    batches = step_check.write_batches(TINY, 1, tmp_path)
    info = types.SimpleNamespace(module="", title="Zeros", optimizer="adagrad")
    with pytest.raises(interleaved.SideFailedError, match="Zeros"):
        step_check.start_checked(info, TINY, batches)
    assert closed
