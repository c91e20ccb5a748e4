"""The picture of memory: a bar for each program, with all that it needs."""

import dataclasses
import re
import sys

import pytest

from tests.conftest import mesh_of
from tests.tools.compile_report.report_cases import INIT, MEBIBYTE, REFUSED, REPORT
from tpu_embedding.tools import cli, compile_report, plotting
from tpu_embedding.tools.compile_report import memory_plot

RUN = dataclasses.replace(
    REPORT, others=(INIT, dataclasses.replace(INIT, memory=REFUSED.memory))
)
UNKNOWN = dataclasses.replace(
    REPORT, memory=dataclasses.replace(REPORT.memory, capacity=None, available=None)
)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Returns the axes of the plot of some reports, one for each."""

    def draw(*reports):
        made = []

        def make_figure(*arguments, **options):
            made.append(plotting.make_figure(*arguments, **options))
            return made[0]

        monkeypatch.setattr(memory_plot, "make_figure", make_figure)
        compile_report.plot_memory(reports, tmp_path / "memory.svg")
        return made[0].axes

    return draw


def test_a_bar_is_as_long_as_the_memory(drawn):
    run, refused = drawn(RUN, REFUSED)
    for axis, programs in ((run, RUN.programs), (refused, REFUSED.programs)):
        ends = [0.0] * len(programs)
        for bars in axis.containers:
            for i, bar in enumerate(bars):
                assert bar.get_x() == pytest.approx(ends[i])
                ends[i] += bar.get_width()
        needs = [program.memory.required / 2**30 for program in programs]
        assert ends == pytest.approx(needs)
    tables, slots, *_ = run.containers
    assert (tables.get_label(), slots.get_label()) == ("tables", "slot variables")
    assert slots[0].get_width() * 1024 == pytest.approx(310)


def test_programs_are_named(drawn):
    (axis,) = drawn(RUN)
    assert axis.get_title() == "my step on big:2x2: 4 devices"
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "train step",
        INIT.name,
        f"{INIT.name}: DOES NOT FIT",
    ]
    (line,) = axis.lines
    assert line.get_xdata()[0] * 1024 * MEBIBYTE == REPORT.memory.capacity


def test_an_unknown_capacity_is_not_drawn(drawn):
    (axis,) = drawn(UNKNOWN)
    assert not axis.lines


@pytest.fixture
def compile_command(monkeypatch):
    """The command, with a compiler that always gives the same report."""
    monkeypatch.setattr(compile_report, "topology_mesh", lambda *_, **__: mesh_of(1))
    monkeypatch.setattr("tpu_embedding.tools.cli.compile.compile_for", lambda *_: RUN)
    return ["compile", "synthetic", "--topology", "big:2x2", "--plot"]


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_command_writes_it(tmp_path, compile_command, suffix, magic):
    path = tmp_path / f"memory{suffix}"
    assert cli.main([*compile_command, str(path)]) == 1  # It does not fit.
    assert path.read_bytes().startswith(magic)
    assert list(tmp_path.iterdir()) == [path]


def test_without_its_library_nothing_is_compiled(
    tmp_path, compile_command, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(
        "tpu_embedding.tools.cli.compile.compile_for",
        lambda *_: pytest.fail("compiled"),
    )
    assert cli.main([*compile_command, str(tmp_path / "memory.png")]) == 1
    message = r"error: --plot needs matplotlib, .* 'tpu-embedding\[train\]'\n"
    assert re.fullmatch(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
