"""The text of a report: complete, and right about what does not fit."""

import dataclasses
import json
import re

import pytest

from tests.tools.compile_report.report_cases import (
    GATHER,
    INIT,
    MEBIBYTE,
    REFUSED,
    REPORT,
    cost,
)
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.tools.compile_report import format_comparison, format_report


def words_of(report):
    return " ".join(format_report(report).split())


CASES = {
    "several programs": dataclasses.replace(REPORT, others=(INIT,)),
    "one": REPORT,
    "one that does not fit": REFUSED,
    "bandwidths and capacity unknown": dataclasses.replace(
        REPORT,
        hardware=HardwareInfo(name="cpu"),
        memory=dataclasses.replace(REPORT.memory, capacity=None, available=None),
    ),
    "nothing moves": dataclasses.replace(
        REPORT,
        floor=cost(0),
        traffic=dataclasses.replace(REPORT.traffic, total=cost(0)),
    ),
}


@pytest.mark.parametrize("report", CASES.values(), ids=CASES.keys())
def test_times_are_called_modelled(report):
    text = format_report(report)
    assert text.startswith(f"my step on {report.topology}: 4 devices; ")
    assert "measured" not in text
    assert ("modelled" in text) == (report.traffic is not None)
    assert "times are modelled" in format_comparison([report])


def test_each_figure_stands_there_once():
    words = words_of(REPORT)
    memory, traffic = REPORT.memory, REPORT.traffic
    sizes = [
        *memory.parts.values(),
        *(row.cost.hbm_bytes for row in (*traffic.classes, *traffic.parts)),
        *(REPORT.floor.hbm_bytes, REPORT.floor.ici_bytes),
        *(traffic.loops[0].per_iteration.hbm_bytes, GATHER.hbm_bytes),
    ]
    assert sum(memory.parts.values()) == memory.required
    for size in sizes:
        assert words.count(f" {format_bytes(size)}") == 1, format_bytes(size)
    for figure in (1001, 1002, 1003, 1004, 1005, "1.5 s", "2.8 s", "123 GB/s"):
        assert len(re.findall(rf"(?<![\d.]){figure}\b", words)) == 1, figure
    assert "4 shards; the plan & more" in words
    assert "jax 0.98.7" in words


def test_a_step_that_does_not_fit():
    words = words_of(REFUSED)
    assert "DOES NOT FIT: needs 2.24 GiB of 1.95 GiB HBM, 291.00 MiB too much" in words
    assert REFUSED.refusal in words
    rest = REFUSED.memory.required - sum((1100, 310, 211, 112)) * MEBIBYTE
    assert f"not itemised by the compiler {format_bytes(rest)}" in words
    assert "not itemised" not in words_of(REPORT)
    one, other = format_comparison([REPORT, REFUSED]).splitlines()[2:]
    assert " yes " in one and " NO " in other


def test_the_programs_of_a_run():
    refused = dataclasses.replace(INIT, memory=REFUSED.memory)
    words = words_of(dataclasses.replace(REPORT, others=(INIT, refused)))
    assert words.count(f"THE RUN DOES NOT FIT: {INIT.name} needs") == 1
    assert words.count(f"{INIT.name}: {INIT.note}") == 2
    assert "THE RUN DOES NOT FIT: train step" not in words


def test_reports_are_json():
    values = json.loads(json.dumps(REPORT.to_json()))
    assert values["traffic"]["sparse_core"][0]["name"] == GATHER.name
