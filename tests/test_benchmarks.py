"""Benchmarks run from end to end on tiny shapes, and their figures fill the tables."""

import json
import pathlib
import re
import subprocess
import sys
import types

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import interleaved  # noqa: E402  # pyright: ignore[reportMissingImports]
import measuring  # noqa: E402  # pyright: ignore[reportMissingImports]
import peers  # noqa: E402  # pyright: ignore[reportMissingImports]
import processor  # noqa: E402  # pyright: ignore[reportMissingImports]
import render_tables  # noqa: E402  # pyright: ignore[reportMissingImports]
import results_file  # noqa: E402  # pyright: ignore[reportMissingImports]
import settings  # noqa: E402  # pyright: ignore[reportMissingImports]
import step_check  # noqa: E402  # pyright: ignore[reportMissingImports]
import waiting  # noqa: E402  # pyright: ignore[reportMissingImports]

TINY = settings.SETTINGS["T0"]


def run(script, *options, file):
    """Runs a benchmark; returns its output and the results with its figures."""
    command = [sys.executable, f"benchmarks/{script}", *options, "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    results = results_file.load_results()
    name = results_file.merge(results, json.loads(file.read_text()))
    assert name == script.removesuffix(".py")
    return result.stdout, results


def test_peers_run_in_turns_and_agree(tmp_path):
    output, results = run(
        *("peers.py", "--setting", "T0", "--peer", "jax_dense", "fbgemm"),
        *("--python", f"fbgemm={sys.executable}", "--rounds", "1", "--steps", "2"),
        file=tmp_path / "peers.json",
    )
    assert "left out: fbgemm: " in output and "not installed" in output
    assert "round 1 of 1, train, ms: ours " in output
    rows = {row["peer"]: row for row in results["peers"]["results"]}
    tiny = [row for row in rows.values() if row["setting"] == "T0"]
    assert [row["peer"] for row in tiny] == ["ours", "jax_dense"]
    for row in tiny:
        assert row["max_difference"] < 1e-6
        assert row["train_steps"] == row["forward_steps"] == 2
    peer = rows["jax_dense"]
    assert peer["train_ratio"] == peer["train_ours_ms"] / peer["train_ms"]
    table = render_tables.TABLES["peers"](results)
    assert "| T0: 3 x 1,000 x 8, batch 64, 3 ids | tpu_embedding | rowwise" in table
    assert "JAX, dense gradients" in render_tables.draw(results)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("checkpoint_speed.py", ["--rounds", "1", "--gb", "0.05"]),
        ("compile_time.py", ["--rounds", "1"]),
        ("device_count.py", ["--setting", "T0", "--devices", "1", "2"]),
        ("dlrm_speed.py", ["--rounds", "1", "--steps", "2"]),
        (
            "dynamic_stream.py",
            [
                *("--seeds", "1", "2", "--rates", "0.3", "--steps", "200"),
                *("--users", "100", "--items", "50"),
            ],
        ),
        # Text is compared with pandas, which tests do not install.
        (
            "input_speed.py",
            ["--gb", "0.03", "--windows", "2", "--format", "arrays", "parquet"],
        ),
        ("initialization.py", ["--rounds", "1", "--max-gb", "0.01"]),
        ("peak_memory.py", ["--setting", "T0"]),
        ("prepare_speed.py", ["--seconds", "0"]),
        ("unique_rows.py", ["--setting", "tiny", "--rounds", "1", "--steps", "2"]),
        ("host_memory.py", ["--setting", "T0", "--rounds", "1", "--steps", "2"]),
        ("first_step.py", ["--rounds", "1"]),
        (
            "serving_latency.py",
            [
                *("--setting", "tiny", "--batch", "1", "16", "--rows", "1000"),
                *("--rounds", "1", "--calls", "2"),
            ],
        ),
        ("dynamic_steps.py", ["--setting", "tiny", "--rounds", "1", "--steps", "2"]),
    ],
)
def test_figures_fill_the_table(script, options, tmp_path):
    _, results = run(script, *options, file=tmp_path / "figures.json")
    name = script.removesuffix(".py")
    table = render_tables.TABLES[name](results)
    assert len(table.splitlines()) == 2 + len(results[name]["results"])


@pytest.mark.parametrize(
    ("metric", "value", "teacher", "wanted"),
    [
        ("auc", 0.65, 0.7, "0.7000 (0.7500 of its lead over 0.5)"),
        ("auc", 0.65, 0.5, "0.5000"),
        ("log_loss", 0.6, 0.5, "0.5000 (ratio 1.2000)"),
    ],
)
def test_a_training_run_is_compared_with_its_teacher(
    metric, value, teacher, wanted, tmp_path
):
    target = {"metric": metric, "at_least": 0.5, "at_most": None}
    first = {
        "run": {"name": "some", "seed": 0, "target": target},
        "devices": {"count": 1, "kind": "cpu"},
        "versions": {"jax": "0"},
    }
    result = {"metrics": {metric: value}, "teacher": teacher, "seconds": 1.0}
    lines = [json.dumps(first), json.dumps({"result": result})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    output, results = run(
        "training_runs.py", str(tmp_path), file=tmp_path / "figures.json"
    )
    shown = f"{value:.4f}"
    assert output == f"some: {metric} {shown}, teacher {wanted}\n"
    table = render_tables.TABLES["training"](results)
    assert f"| {shown} | {wanted} | 1 s |" in table


def test_waits_without_figures_are_left_out():
    results = results_file.load_results()
    every = waiting.waits(results)
    del results["peers"]
    assert waiting.waits(results) == [w for w in every if w.script != "peers.py"]
    assert len(waiting.render(results).splitlines()) == 2 + len(waiting.waits(results))
    assert waiting.waits({}) == []
    assert waiting.draw({}).endswith("</svg>\n")


def test_all_goes_on_after_a_benchmark_that_fails(tmp_path):
    options = ["--quick", "--only", "peers", "prepare_speed", "--output", tmp_path]
    options += ["--python", "torch=/nowhere"]
    command = [sys.executable, ROOT / "benchmarks" / "all.py", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "== peers FAILED" in done.stdout
    assert (tmp_path / "prepare_speed.json").exists()
    assert not (tmp_path / "peers.json").exists()


def test_a_table_without_figures_says_so():
    results = results_file.load_results()
    results.pop("peers", None)
    assert render_tables.TABLES["peers"](results) == "Not measured yet.\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"setting": ["S1", "S2", "S3"], "python": []}),
        ("--python torch=a fbgemm=b", {"python": ["torch=a", "fbgemm=b"]}),
        ("--python torch=a --python fbgemm=b", {"python": ["torch=a", "fbgemm=b"]}),
        ("--setting S2 --setting S1", {"setting": ["S2", "S1"]}),
        ("--peer torch --peer", {"peer": ["torch"]}),
        ("--peer", {"peer": []}),
    ],
)
def test_an_option_keeps_all_its_values(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "argv", ["peers.py", *words.split()])
    assert vars(peers._parse()).items() >= expected.items()


def test_all_options_of_several_values_keep_them():
    for script in (ROOT / "benchmarks").glob("*.py"):
        for call in re.findall(
            r"add_argument\([^)]*?nargs=[^)]*\)", script.read_text()
        ):
            assert '"--' not in call or "AllValues" in call, (script.name, call)


CPUS = {
    "intel": (
        "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f\n\nflags: no",
        {"model": "Xeon", "instruction_sets": ["avx2", "avx512f"]},
    ),
    "arm": (
        "Features\t: fp asimd sve",
        {"model": "", "instruction_sets": ["asimd", "sve"]},
    ),
    "unknown": (None, {"model": "", "instruction_sets": []}),
}


@pytest.mark.parametrize(("text", "expected"), CPUS.values(), ids=CPUS)
def test_figures_name_the_cpu(text, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPU_FILE", tmp_path / "cpuinfo")
    if text is not None:
        processor.CPU_FILE.write_text(text)
    measuring.write_document(
        tmp_path / "figures.json", "peers", shapes={}, results=[{"peer": "new"}]
    )
    document = json.loads((tmp_path / "figures.json").read_text())
    document["machine"] = "2 CPU cores, x86_64"
    assert document["cpu"] == expected
    results = results_file.load_results()
    results_file.merge(results, document)
    *earlier, new = results["peers"]["results"]
    assert new["cpu"] == expected
    assert all(row.get("peer") != "new" for row in earlier)
    table = render_tables.TABLES["processors"](results)
    assert f"| 1 | {expected['model']}: " in table
    summary = render_tables.TABLES["summary"](results)
    is_shown = "2 CPU cores, x86_64, Xeon, median" in summary
    assert is_shown == (expected["model"] == "Xeon")


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


def test_a_wrong_side_is_refused(tmp_path, monkeypatch):
    wrong = np.zeros((2, TINY.batch, TINY.tables, TINY.dim), np.float32)
    closed = []

    def ask(command, file):
        np.save(file, wrong)
        return {"versions": {}}

    side = types.SimpleNamespace(ask=ask, close=lambda: closed.append(True))
    monkeypatch.setattr(step_check, "SideProcess", lambda *_, **__: side)
    batches = step_check.write_batches(TINY, 1, tmp_path)
    info = types.SimpleNamespace(module="", title="Zeros", optimizer="adagrad")
    with pytest.raises(interleaved.SideFailedError, match="Zeros differs from NumPy"):
        step_check.start_checked(info, TINY, batches)
    assert closed


def test_a_side_that_ends_is_named(tmp_path):
    message = "(?s)no_such_side.*No module"
    with pytest.raises(interleaved.SideFailedError, match=message):
        interleaved.SideProcess("no_such_side", TINY, tmp_path / "no.npy")


def test_a_slow_side_does_fewer_steps():
    turns = interleaved.Turns(rounds=2, steps=3, seconds=1.0)
    asked = []

    def ask(command, *, method, first, count, limit):
        asked.append((method, first))
        assert (command, count, limit) == ("time_each", 3, 1.0)
        return {"seconds": [0.5], "peak_bytes": 7}

    sides = {"a": types.SimpleNamespace(ask=ask), "b": types.SimpleNamespace(ask=ask)}
    times = interleaved.time_in_turns(sides, ("train", "forward"), turns)
    train, forward = ("train", 1), ("forward", 5)
    assert asked[:4] == [train, train, forward, forward]
    assert asked[4:] == [("train", 9)] * 2 + [("forward", 13)] * 2
    assert asked[-1][1] + turns.steps + 1 == turns.num_batches(2)
    assert times["b"]["train"].seconds == [0.5, 0.5]
    assert times["b"]["train"].median_ms == 500
    assert times["b"]["train"].peak_bytes == 7


def test_a_peer_beyond_the_memory_is_left_out():
    turns = interleaved.Turns(rounds=1, steps=1, seconds=1.0)
    comparison = peers.Comparison(TINY, {}, turns)
    groups = comparison._groups(["fbgemm", "torch", "jax_dense"], 1.9e9)
    assert groups == [["fbgemm", "torch"], ["jax_dense"]]
    assert comparison._groups(["torch"], 0.5e9) == [[]]
    row = comparison._row("torch") | {"left_out": comparison._left_out["torch"]}
    assert row["left_out"] == "needs 1 GB, 0 are free"
    table = render_tables.TABLES["peers"]({"peers": {"results": [row]}})
    assert "| adagrad | left out: needs 1 GB, 0 are free |" in table
    assert "left out: needs 1 GB" in peers._table([row])


def test_peers_beside_one_that_ends_are_left_out(monkeypatch):
    def ask(command, **arguments):
        raise interleaved.SideFailedError("torch ended with status -9\nlast words")

    side = types.SimpleNamespace(ask=ask, close=lambda: None)
    monkeypatch.setattr(peers.Comparison, "_start", lambda *_: side)
    turns = interleaved.Turns(rounds=1, steps=1, seconds=1.0)
    comparison = peers.Comparison(TINY, {}, turns)
    times = comparison._time_group(side, ["torch"])
    assert times["ours"]["train"].seconds == []
    assert comparison._left_out == {"torch": "torch ended with status -9"}
