"""Tests the last lines of a run."""

import dataclasses
import types

import pytest

from tpu_embedding.tools.train import Target, load_config
from tpu_embedding.tools.train.loop.run_summary import RunResult, report_end

TARGET = Target(metric="auc", at_least=0.5, relative_to="teacher")


def last_lines(result):
    """Returns the lines that a run prints at its end."""
    lines = []
    report = types.SimpleNamespace(
        directory=None,
        record=lambda record: None,
        plot=lambda *arguments: None,
        line=lines.append,
    )
    config = dataclasses.replace(load_config("synthetic"), target=TARGET)
    report_end(report, config, result, 1)
    return lines


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"log_loss": 0.5}, "all labels of the held-out samples are equal"),
        ({"log_loss": 0.5, "auc": 0.7}, "the data set knows no teacher"),
    ],
)
def test_an_unknown_target_has_a_reason(metrics, reason):
    result = RunResult(
        step=1,
        metrics=metrics,
        metric="log_loss",
        teacher=None,
        target_met=None,
        seconds=1.0,
    )
    lines = last_lines(result)
    assert lines[0].endswith(f"of the teacher's lead over 0.5: unknown, as {reason}")


def test_a_share_of_the_teachers_auc_counts_from_chance():
    assert TARGET.is_met(0.65, 0.8)
    assert not TARGET.is_met(0.649, 0.8)
    assert TARGET.is_met(0.65, None) is None


@pytest.mark.parametrize(
    ("metric", "value", "teacher", "wanted"),
    [
        ("auc", 0.65, 0.7, "(teacher 0.7000, 0.7500 of its lead over 0.5)"),
        ("auc", 0.65, 0.5, "(teacher 0.5000)"),
        ("log_loss", 0.6, 0.5, "(teacher 0.5000, ratio 1.2000)"),
    ],
)
def test_the_result_is_compared_with_the_teacher_as_in_the_target(
    metric, value, teacher, wanted
):
    result = RunResult(
        step=1,
        metrics={metric: value},
        metric=metric,
        teacher=teacher,
        target_met=None,
        seconds=1.0,
    )
    assert wanted in last_lines(result)[-1]
