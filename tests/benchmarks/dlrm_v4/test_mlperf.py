"""MLPerf's own checker reads the logs of `dlrm_v4`."""

import dataclasses
import json

import pytest
from mlperf import LOG_FILE, MLPerfLog

from tests.benchmarks.dlrm_v4 import FULL, SMALL
from tests.tiers import each_once
from tests.tools.train.runs import run, small_config
from tpu_embedding.tools.train import (
    RunDirectoryError,
    RunEvent,
    evaluate,
    load_config,
)

RULES = "6.1.0"
LOG = MLPerfLog(benchmark="dlrmv4", division="open", keys={})


def failed_checks(path):
    """Returns the keys that the checker complains about, and further complaints."""
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    checker = compliance.make_checker("training", RULES, quiet=False, werror=True)
    checker.check_file(path, f"training_{RULES}/common.yaml")
    return set(checker.overwritable), checker.not_overwritable


class Run:
    """A run that only tells its events."""

    def __init__(self, directory, config, data=None):
        self.directory, self.config, self.data = directory, config, data

    def tell(self, kind, step=0, **values):
        self.config.on_event(
            RunEvent(kind=kind, step=step, values=values, **vars(self))
        )

    def evaluate(self, step, auc=0.5):
        self.tell("evaluation_start", step)
        self.tell("evaluation", step, auc=auc)

    def whole(self, step, auc):
        """Tells of a run with one evaluation; returns the log."""
        self.tell("init")
        self.tell("start")
        self.evaluate(step, auc)
        self.tell("result", step, target_met=True)
        return self.directory / LOG_FILE


def tiny_run(directory, evaluate_every=2):
    config = load_config(SMALL)
    changes = {"batch_size": 2, "evaluate_every": evaluate_every, "on_event": LOG}
    return Run(directory, dataclasses.replace(config, **changes))


def test_a_closed_log_of_the_full_config_passes(tmp_path):
    config = load_config(FULL)
    outline = config.data.outline(batch_size=config.batch_size, seed=0)
    assert config.evaluate_from % config.evaluate_every == 0
    log = Run(tmp_path, config, outline).whole(config.evaluate_from, 0.76)
    assert failed_checks(log) == (set(), [])


def test_an_open_log_of_the_small_config_fails_only_for_its_size(tmp_path):
    """The open division fixes the data of the benchmark, and bounds its rates."""
    config = load_config(SMALL)
    data = config.data.open(None, batch_size=config.batch_size, seed=0)
    of_size = {"train_samples", "eval_samples"}
    of_rate = {"opt_base_learning_rate", "opt_sparse_base_learning_rate"}
    log = Run(tmp_path, config, data).whole(3000, 0.8)
    assert failed_checks(log) == (of_size | of_rate, [])
    log = Run(tmp_path, config, data).whole(3000, 0.7)
    failed, others = failed_checks(log)
    assert failed == of_size | of_rate
    assert "eval_accuracy" in others[0]


def events_of(path):
    lines = path.read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


EVALUATION = ("block_stop", "eval_start", "eval_accuracy", "eval_stop", "block_start")


@pytest.mark.parametrize(
    ("killed_after", "evaluates"), each_once(range(12), [True, False])
)
def test_a_killed_run_leaves_no_unpaired_events(tmp_path, killed_after, evaluates):
    """Killed after any event of the evaluations at 2 and 4, it resumes after 2."""
    tiny, path = tiny_run(tmp_path, 2 if evaluates else 0), tmp_path / LOG_FILE
    tiny.tell("init")
    tiny.tell("start")
    first = len(path.read_text().splitlines())
    tiny.evaluate(2)
    tiny.evaluate(4)
    lines = path.read_text().splitlines(keepends=True)
    end = first + killed_after
    path.write_text("".join(lines[:end]) + "".join(lines[end : end + 1])[:20])
    tiny.tell("init", 2)
    tiny.tell("start", 2)
    is_kept = not evaluates and killed_after >= len(EVALUATION)
    kept = [(key, 2 * 2) for key in EVALUATION] if is_kept else []
    found = [
        (x["key"], x["metadata"]["samples_count"]) for x in events_of(path)[first - 1 :]
    ]
    assert found == [("block_start", 0), *kept]


def test_a_log_of_somebody_else_is_not_followed(tmp_path):
    tiny, path, target = tiny_run(tmp_path), tmp_path / LOG_FILE, tmp_path / "other"
    target.write_bytes(b"\xff")
    path.symlink_to(target)
    with pytest.raises(RunDirectoryError, match=LOG_FILE):
        tiny.tell("init", 2)
    path.unlink()
    target.rename(path)
    with pytest.raises(RunDirectoryError, match=LOG_FILE):
        tiny.tell("init", 2)


@pytest.mark.full
def test_a_run_logs_its_blocks_and_evaluations(tmp_path, monkeypatch):
    changed = small_config("evaluate_every=2", "evaluate_from=3", "num_steps=6")
    config = dataclasses.replace(changed, on_event=LOG)
    monkeypatch.setattr("tests.tools.train.runs.small_config", lambda *_: config)
    result = run(tmp_path)
    events = events_of(tmp_path / LOG_FILE)
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
    assert events_of(tmp_path / LOG_FILE) == events
