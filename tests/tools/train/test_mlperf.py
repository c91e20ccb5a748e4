"""MLPerf's own checker reads the logs of `dlrm_v4`."""

import dataclasses
import json

import pytest

from tests.tools.train.runs import run, small_config
from tpu_embedding.tools.train import MLPerf, evaluate, load_config
from tpu_embedding.tools.train.mlperf import MLPerfLog
from tpu_embedding.tools.train.run_directory import LOG_FILE

RULES = "6.1.0"


def failed_checks(path):
    """Returns the keys that the checker complains about, and further complaints."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", RULES, quiet=False, werror=True)
    checker.check_file(path, f"training_{RULES}/common.yaml")
    return set(checker.overwritable), checker.not_overwritable


def write_log(path, config, data, step, auc):
    """Writes the log of a run with one evaluation, without training."""
    log = MLPerfLog(path, config, data)
    log.write("init_stop", "run_start", "block_start", step=0)
    log.write("block_stop", "eval_start", step=step)
    log.write("eval_accuracy", step=step, value=auc)
    log.write("eval_stop", step=step)
    log.write("run_stop", step=step, status="success")


def test_a_closed_log_of_the_full_config_passes(tmp_path):
    config = load_config("dlrm_v4")
    outline = config.data.outline(batch_size=config.batch_size, seed=0)
    assert config.evaluate_from % config.evaluate_every == 0
    write_log(tmp_path / "log", config, outline, config.evaluate_from, 0.76)
    assert failed_checks(tmp_path / "log") == (set(), [])


def test_an_open_log_of_the_small_config_fails_only_for_its_size(tmp_path):
    """The open division fixes the data of the benchmark, and bounds its rates."""
    config = load_config("dlrm_v4_small")
    data = config.data.open(None, batch_size=config.batch_size, seed=0)
    write_log(tmp_path / "log", config, data, 3000, 0.8)
    of_size = {"train_samples", "eval_samples"}
    of_rate = {"opt_base_learning_rate", "opt_sparse_base_learning_rate"}
    assert failed_checks(tmp_path / "log") == (of_size | of_rate, [])
    write_log(tmp_path / "log", config, data, 3000, 0.7)
    failed, others = failed_checks(tmp_path / "log")
    assert failed == of_size | of_rate
    assert "eval_accuracy" in others[0]


def test_a_resumed_run_continues_its_log(tmp_path):
    config, path = load_config("dlrm_v4_small"), tmp_path / "log"
    settings = MLPerf(benchmark="dlrmv4", division="open", keys={})
    config = dataclasses.replace(config, mlperf=settings)
    MLPerfLog(path, config, None).write_start(0)
    begun = path.read_text()
    log = MLPerfLog(path, config, None, first_step=2)
    log.write_start(2)
    assert path.read_text() == begun
    log.write("run_stop", step=3, status="success")
    ended = path.read_text()
    assert ended.startswith(begun) and ended.count("\n") == begun.count("\n") + 1
    MLPerfLog(path, config, None, first_step=3).write("run_stop", step=3)
    assert path.read_text() == ended
    MLPerfLog(path, config, None).write_start(0)
    assert path.read_text().count("\n") == begun.count("\n")


def events_of(path):
    """Returns the keys of the events from the first block on, and their steps of 2."""
    lines = path.read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    timed = [x for x in events if "samples_count" in x["metadata"]]
    return [(x["key"], x["metadata"]["samples_count"] // 2) for x in timed[2:]]


EVALUATION = ("block_stop", "eval_start", "eval_accuracy", "eval_stop", "block_start")


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize("killed_after", range(12))
def test_a_killed_run_leaves_no_unpaired_events(tmp_path, killed_after, evaluates):
    """Killed after any event of the evaluations at 2 and 4, it resumes after 2."""
    config, path = load_config("dlrm_v4_small"), tmp_path / "log"
    settings = MLPerf(benchmark="dlrmv4", division="open", keys={})
    config = dataclasses.replace(config, mlperf=settings, batch_size=2)
    log = MLPerfLog(path, config, None)
    log.write_start(0)
    first = path.read_text()
    for step in (2, 4):
        log.write(*EVALUATION, step=step)
    lines = path.read_text().splitlines(keepends=True)
    end = len(first.splitlines()) + killed_after
    path.write_text("".join(lines[:end]) + "".join(lines[end : end + 1])[:20])
    MLPerfLog(path, config, None, first_step=2, evaluates=evaluates).write_start(2)
    is_kept = not evaluates and killed_after >= len(EVALUATION)
    kept = [(key, 2) for key in EVALUATION] if is_kept else []
    assert events_of(path) == [("block_start", 0), *kept]


@pytest.mark.full
def test_a_run_logs_its_blocks_and_evaluations(tmp_path, monkeypatch):
    settings = MLPerf(benchmark="dlrmv4", division="open", keys={})
    changed = small_config("evaluate_every=2", "evaluate_from=3", "num_steps=6")
    config = dataclasses.replace(changed, mlperf=settings)
    monkeypatch.setattr("tests.tools.train.runs.small_config", lambda *_: config)
    result = run(tmp_path)
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    run_start = next(i for i, x in enumerate(events) if x["key"] == "run_start")
    block = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"]
    timed = ["run_start", *block, *block, "block_start", "block_stop", "run_stop"]
    assert [x["key"] for x in events[run_start:]] == timed
    found = [x for x in events if x["key"] == "eval_accuracy"]
    assert [x["metadata"]["samples_count"] for x in found] == [4 * 48, 6 * 48]
    assert found[-1]["value"] == result.metrics["auc"]
    times = [x["time_ms"] for x in events]
    assert times == sorted(times)
    evaluate(config, tmp_path)
    assert (tmp_path / LOG_FILE).read_text().splitlines() == lines
