"""The report page: well-formed, complete, and needs nothing from elsewhere."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest

from tests.conftest import mesh_of
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.tools import cli, compile_report
from tpu_embedding.tools.compile_report.bandwidth import Cost
from tpu_embedding.tools.compile_report.memory import Memory
from tpu_embedding.tools.compile_report.programs import ProgramMemory
from tpu_embedding.tools.compile_report.report import (
    CompileReport,
    LoopCost,
    NamedOperation,
    OperationCost,
    ProgramTraffic,
)
from tpu_embedding.tools.compile_report.timeline import Interval, Timeline

MEBIBYTE = 2**20


def cost(mebibytes, links=0.0):
    return Cost(
        hbm_bytes=mebibytes * MEBIBYTE,
        ici_bytes=links * MEBIBYTE,
        dcn_bytes=0,
        hbm_seconds=mebibytes * 1.001e-5,
        ici_seconds=links * 1.003e-4,
        dcn_seconds=None,
    )


GATHER = NamedOperation(
    name="gather.1",
    operation_class="gather",
    dims=(77, 128),
    hbm_bytes=1.9 * MEBIBYTE,
    runs="every step",
    op_name="jit(step)/shard_map/gather",
    source="packed_rows.py:7",
)
TIMELINE = Timeline(
    axis="modelled seconds",
    length=0.010,
    sparse_core=0.0042,
    overlap=0.0017,
    intervals=(
        Interval(
            lane="TensorCore",
            begin=0.0,
            end=0.006,
            operation_class="matmul",
            part="dense",
            op_name="jit(step)/a<b",
            num_operations=37,
        ),
        Interval(
            lane="SparseCore",
            begin=0.004,
            end=0.010,
            operation_class="gather",
            part="embedding",
            op_name="",
        ),
    ),
    num_left_out=1234,
)
REPORT = CompileReport(
    name="my step",
    topology="big:2x2",
    num_slices=1,
    num_devices=4,
    hardware=HardwareInfo(name="big", hbm_bytes_per_second=123e9),
    versions=(("jax", "0.98.7"),),
    plan="4 shards; the plan & more",
    memory=Memory(
        tables=1100 * MEBIBYTE,
        slots=310 * MEBIBYTE,
        dense=211 * MEBIBYTE,
        inputs=112 * MEBIBYTE,
        padding=13 * MEBIBYTE,
        outputs=14 * MEBIBYTE,
        temporaries=515 * MEBIBYTE,
        code=16 * MEBIBYTE,
        required=2291 * MEBIBYTE,
        available=3900 * MEBIBYTE,
        capacity=4096 * MEBIBYTE,
        fits=True,
    ),
    floor=cost(21.5, 2.25),
    traffic=ProgramTraffic(
        total=cost(99.75, 9.5),
        classes=(
            OperationCost(name="gather", num_operations=1001, cost=cost(55.25)),
            OperationCost(name="all-to-all", num_operations=1002, cost=cost(1, 7.75)),
        ),
        parts=tuple(
            OperationCost(name=name, num_operations=count, cost=cost(mebibytes))
            for name, count, mebibytes in (
                *(("embedding", 1003, 66.5), ("dense", 1004, 33.125)),
                ("unattributed", 1005, 0.375),
            )
        ),
        loops=(
            LoopCost(
                op_name="jit(step)/while", source="a.py:1", per_iteration=cost(3.625)
            ),
        ),
        sparse_core=(GATHER,),
        table_copies=(),
        table_moves=(),
    ),
    timeline=TIMELINE,
    trace_seconds=1.5,
    compile_seconds=2.75,
    refusal="",
)
REFUSED = dataclasses.replace(
    REPORT,
    topology="small:1x1",
    memory=dataclasses.replace(
        REPORT.memory,
        **dict.fromkeys(("padding", "outputs", "temporaries", "code")),
        capacity=2048 * MEBIBYTE,
        available=2000 * MEBIBYTE,
        fits=False,
    ),
    traffic=None,
    timeline=None,
    refusal="RESOURCE_EXHAUSTED: 2.2G exceeds <HBM>",
)
INIT = ProgramMemory(
    name="initial <slot> variables",
    memory=REPORT.memory,
    trace_seconds=0.5,
    compile_seconds=1.25,
    refusal="",
    note="one & only",
)
CASES = {
    "several programs": [
        dataclasses.replace(
            REPORT,
            others=(INIT, dataclasses.replace(INIT, memory=REFUSED.memory)),
        )
    ],
    "one": [REPORT],
    "with one that does not fit": [REPORT, REFUSED],
    "one that does not fit": [REFUSED],
    "bandwidths and capacity unknown": [
        dataclasses.replace(
            REPORT,
            hardware=HardwareInfo(name="cpu"),
            memory=dataclasses.replace(REPORT.memory, capacity=None, available=None),
            timeline=dataclasses.replace(
                TIMELINE, axis="order of the schedule", length=10
            ),
        )
    ],
    "nothing moves": [
        dataclasses.replace(
            REPORT,
            floor=cost(0),
            traffic=dataclasses.replace(REPORT.traffic, total=cost(0)),
            timeline=Timeline(
                axis="modelled seconds",
                length=0,
                sparse_core=0,
                overlap=0,
                intervals=(),
                num_left_out=0,
            ),
        )
    ],
}


def parsed(reports):
    return ElementTree.fromstring(compile_report.render_html(reports))


def words_of(page):
    return " ".join(" ".join(page.itertext()).split())


@pytest.mark.parametrize("reports", CASES.values(), ids=CASES.keys())
def test_well_formed_and_self_contained(reports):
    text = compile_report.render_html(reports)
    assert text.startswith("<!DOCTYPE html>\n<html")
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<script", text)
    page = parsed(reports)
    assert "measured" not in words_of(page).lower()
    assert "modelled" in words_of(page)
    for report in reports:
        assert report.topology in words_of(page)
    for svg in page.iter("svg"):
        _, _, width, height = map(float, svg.get("viewBox").split())
        for box in svg.iter("rect"):
            x, y, wide, high = (
                float(box.get(name)) for name in ("x", "y", "width", "height")
            )
            assert min(x, y, wide, high) >= 0
            assert x + wide <= width
            assert y + high <= height


def test_each_figure_stands_there_once():
    words = words_of(parsed([REPORT]))
    memory, traffic = REPORT.memory, REPORT.traffic
    sizes = [
        *(memory.tables, memory.slots, memory.dense, memory.inputs, memory.padding),
        *(memory.outputs, memory.temporaries, memory.code),
        *(row.cost.hbm_bytes for row in (*traffic.classes, *traffic.parts)),
        *(REPORT.floor.hbm_bytes, REPORT.floor.ici_bytes),
        *(traffic.loops[0].per_iteration.hbm_bytes, GATHER.hbm_bytes),
    ]
    for size in sizes:
        assert words.count(f" {format_bytes(size)}") == 1, format_bytes(size)
    counts = (1001, 1002, 1003, 1004, 1005, 1234, 37)
    for figure in (*counts, "2.8 s", "10.00 ms", "4.20 ms", "1.70 ms", "123 GB/s"):
        assert len(re.findall(rf"(?<![\d.]){figure}\b", words)) == 1, figure
    assert "4 shards; the plan & more" in words
    assert "jax 0.98.7" in words


def test_bars_are_in_proportion():
    memory_plot, _ = parsed([REPORT]).iter("svg")
    widths = {
        box.find("title").text: float(box.get("width"))
        for box in memory_plot.iter("rect")
    }
    assert widths["slot variables"] / widths["tables"] == pytest.approx(
        310 / 1100, abs=1e-4
    )
    bars = [i.get("style") for i in parsed([REPORT]).iter("i")]
    assert f"width:{100 * 55.25 / 99.75:.2f}%" in bars
    assert {b.get("style") for b in parsed([REPORT]).iter("b")} == {
        f"left:{100 * 21.5 / 99.75:.2f}%",
        f"left:{100 * 2.25 / 9.5:.2f}%",
    }


def test_boxes_of_the_timeline():
    _, plot = parsed([REPORT]).iter("svg")
    hinted = {box.find("title").text: box for box in plot.iter("rect") if len(box) > 0}
    assert set(hinted) == {
        "matmul, dense, 37 operations, the longest: jit(step)/a<b",
        "gather, embedding: no origin given",
    }
    wide = [float(box.get("width")) for box in hinted.values()]
    assert wide[0] == pytest.approx(wide[1])
    labels = [text.text for text in plot.iter("text")]
    for word in ("TensorCore", "SparseCore", "links", "copies", "matmul", "gather"):
        assert word in labels


def test_a_step_that_does_not_fit():
    page = parsed([REPORT, REFUSED])
    marked = [e for e in page.iter() if e.get("class") == "bad"]
    assert ["".join(e.itertext()) for e in marked] == [
        *("NO", "DOES NOT FIT"),
        REFUSED.refusal,
    ]
    rest = REFUSED.memory.required - sum((1100, 310, 211, 112)) * MEBIBYTE
    row = f"not itemised by the compiler 0 B {format_bytes(rest)}"
    assert row in words_of(page)
    assert "DOES NOT FIT" not in words_of(parsed([REPORT]))


def test_the_programs_of_a_run():
    page = parsed(CASES["several programs"])
    words = words_of(page)
    assert words.count("THE RUN DOES NOT FIT: initial <slot> variables needs") == 1
    assert words.count("initial <slot> variables: one & only") == 2
    labels = [text.text for text in page.iter("text")]
    assert labels.count("train step") == 1
    assert labels.count(INIT.name) == 2
    assert "DOES NOT FIT" in labels
    (cell,) = (e for e in page.iter("span") if e.text == "NO")
    assert cell.get("class") == "bad"


def test_names_are_escaped():
    odd = '<b a="1">&\''
    named = dataclasses.replace(REPORT, name=odd, topology=odd, plan=odd, refusal=odd)
    page = parsed([named])
    assert page.find("head/title").text.startswith(odd)
    assert not list(page.iter("b"))[0].get("a")
    assert words_of(page).count(odd) >= 5


@pytest.fixture
def compile_command(monkeypatch):
    """The command, with a compiler that says what a test has put down."""
    monkeypatch.setattr(compile_report, "topology_mesh", lambda *_, **__: mesh_of(1))
    monkeypatch.setattr(cli.compile, "_compile_for", lambda *_: REPORT)
    return ["compile", "synthetic", "--topology", "big:2x2", "--html"]


def test_the_command_writes_it(tmp_path, compile_command):
    path = tmp_path / "report.html"
    path.write_text("an old one")
    assert cli.main([*compile_command, str(path)]) == 0
    assert path.read_text() == compile_report.render_html([REPORT])
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_page(tmp_path, compile_command, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("an old one")
    monkeypatch.setattr(
        compile_report, "render_html", lambda _: "not for UTF-8: \ud800"
    )
    with pytest.raises(UnicodeEncodeError):
        cli.main([*compile_command, str(path)])
    assert path.read_text() == "an old one"
    assert list(tmp_path.iterdir()) == [path]


def test_no_reports():
    with pytest.raises(ValueError, match="render_html takes at least one report"):
        compile_report.render_html([])


def test_reports_with_timelines_are_json():
    values = json.loads(json.dumps(REPORT.to_json()))
    assert values["timeline"]["intervals"][0]["lane"] == "TensorCore"
    assert values["timeline"]["num_left_out"] == 1234
