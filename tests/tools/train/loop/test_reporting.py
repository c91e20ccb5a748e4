"""Tests the lines, records and plot of a run."""

import errno
import json
import sys
from unittest import mock

import pytest

from tpu_embedding.tools.plotting import MissingPlotLibraryError
from tpu_embedding.tools.train.loop.reporting import (
    PLOT_FILE,
    RECORDS_FILE,
    RunReport,
    read_records,
)

PROGRESS = {
    "step": 50,
    "loss": 0.5,
    "steps_per_second": 12.34,
    "samples_per_second": 12340.0,
    "input_wait": 0.257,
    "skipped": 0,
    "rounds": 2,
    "out_of_range": 0,
}


@pytest.fixture
def report(tmp_path):
    report = RunReport(tmp_path / "run")
    yield report
    report.close()


def test_a_lost_terminal_ends_no_report_but_a_full_disk_does(report, monkeypatch):
    def refuse(text):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", mock.Mock(write=refuse))
    report.line("lost")
    monkeypatch.setattr(report, "_file", mock.Mock(write=refuse))
    with pytest.raises(OSError, match="Input/output error"):
        report.progress(PROGRESS, 1000)


def test_progress_line_and_record(report, capsys):
    report.progress(PROGRESS, 1000)
    assert capsys.readouterr().out == (
        "step   50/1000  loss 0.50000  12.3 steps/s  12,340 samples/s  input wait 26%"
        "  rounds 2\n"
    )
    assert list(read_records(report.directory / RECORDS_FILE)) == [PROGRESS]


COUNTS = {
    "ids": 1000,
    "hits": 931,
    "inserts": 57,
    "evictions": 20,
    "not_admitted": 0,
    "no_place": 12,
    "load": 0.8125,
}


def test_dynamic_tables_are_shown(report, capsys):
    record = PROGRESS | {"dynamic_tables": {"user": COUNTS, "item": COUNTS}}
    report.progress(record, 1000)
    shown = "93.1% hits, load 0.81, 12 no place"
    assert f"rounds 2  user: {shown}  item: {shown}\n" in capsys.readouterr().out
    assert list(read_records(report.directory / RECORDS_FILE)) == [record]


def test_ids_out_of_range_are_shown(report, capsys):
    report.progress(PROGRESS | {"out_of_range": 1234}, 1000)
    assert "ids out of range 1,234" in capsys.readouterr().out


def test_skipped_steps_are_shown(report, capsys):
    report.progress(PROGRESS | {"skipped": 3}, 1000)
    assert "loss 0.50000" in (line := capsys.readouterr().out) and "skipped 3" in line
    report.progress(PROGRESS | {"skipped": 50, "loss": None}, 1000)
    assert "  no loss  " in capsys.readouterr().out


def test_unknown_rate_is_left_out(report, capsys):
    report.progress(PROGRESS | {"steps_per_second": None}, 1000)
    assert "steps/s" not in capsys.readouterr().out


def test_half_a_line_does_not_spoil_the_next(tmp_path):
    path = tmp_path / RECORDS_FILE
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    report = RunReport(tmp_path)
    report.record({"step": 2})
    report.close()
    assert list(read_records(path)) == [{"step": 1}, {"step": 2}]
    assert [json.loads(line) for line in path.read_text().splitlines()[2:]] == [
        {"step": 2}
    ]


def test_records_are_strict_json(report):
    with pytest.raises(ValueError, match="JSON"):
        report.record({"loss": float("nan")})


@pytest.mark.parametrize("teacher", [None, 0.3])
def test_plot(report, teacher):
    for step in (50, 100, 50):
        report.progress(PROGRESS | {"step": step}, 100)
    report.evaluation(100, {"log_loss": 0.4, "auc": 0.7}, 1.0)
    report.plot("a run", "log_loss", teacher)
    assert (report.directory / PLOT_FILE).read_bytes().startswith(b"\x89PNG")


def test_plot_without_its_library_names_the_extra(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPlotLibraryError, match=r"'tpu-embedding\[train\]'"):
        report.plot("a run", "log_loss", None)
