"""The timeline, on programs whose times are known by hand.

An array of a program is half a MiB, and HBM moves a MiB in a second: to negate an array
takes a second, if nothing else is under way.
"""

import pytest

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.tools.compile_report import timeline
from tpu_embedding.tools.compile_report.cost import program_cost
from tpu_embedding.tools.compile_report.hlo import parse_module
from tpu_embedding.tools.compile_report.timeline import make_timeline

MEBIBYTE = 2**20
HARDWARE = HardwareInfo(
    name="slow", hbm_bytes_per_second=MEBIBYTE, ici_bytes_per_second=MEBIBYTE / 16
)
F = "f32[1024,128]{1,0:T(8,128)}"
START = (
    "%s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), "
    'async_execution_thread="sparsecore", to_apply=%on_sparse_core'
)
UPDATE = f"%u = (({F}), {F}) call-update(%s, %a)"
DONE = f"%d = {F} call-done(%u)"
COPY_START = f"%cs = ({F[:-1]}S(1)}}, {F}, u32[]{{:S(2)}}) copy-start(%a)"
COPY_DONE = f"%cd = {F[:-1]}S(1)}} copy-done(%cs)"
SEND = f"%e = {F} all-to-all(%a), replica_groups={{{{0,1}}}}, dimensions={{0}}"


def negate(name, operand="a"):
    return f"%{name} = {F} negate(%{operand})"


def timeline_of(*lines, hardware=HARDWARE):
    text = f"""HloModule m, is_scheduled=true, num_partitions=2

%on_sparse_core (p: f32[1024,128]) -> f32[1024,128] {{
  %p = {F} parameter(0)
  %n = {F} negate(%p)
  ROOT %o = {F} negate(%n)
}}

ENTRY %main (a: f32[1024,128]) -> f32[1024,128] {{
  %a = {F} parameter(0)
"""
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
    module = parse_module(text)
    return make_timeline(module, program_cost(module), hardware)


def spans_of(found):
    return [(i.lane, i.begin, i.end) for i in found.intervals]


CASES = {
    "nothing": ((), 0, 0, 0, []),
    "in a row": (
        (negate("b"), SEND, negate("c")),
        *(6, 0, 0),
        [("TensorCore", 0, 1), ("TensorCore", 5, 6), ("links", 1, 5)],
    ),
    # It starts with what it works on, not where it is prepared.
    "awaited at once": (
        (START, negate("b"), UPDATE, DONE, negate("c")),
        *(4, 2, 0),
        [("TensorCore", 0, 1), ("TensorCore", 3, 4), ("SparseCore", 1, 3)],
    ),
    # Two share the bandwidth: the shorter takes twice its time, the longer waits less.
    "beside each other": (
        (START, UPDATE, negate("b"), DONE, negate("c")),
        *(4, 3, 2),
        [("TensorCore", 0, 2), ("TensorCore", 3, 4), ("SparseCore", 0, 3)],
    ),
    # Links have a bandwidth of their own: only the second of HBM is shared.
    "beside a collective": (
        (START, UPDATE, SEND, DONE),
        *(4, 3, 0),
        [("SparseCore", 0, 3), ("links", 0, 4)],
    ),
    "copy": (
        (COPY_START, negate("b"), COPY_DONE),
        *(1.5, 0, 0),
        [("TensorCore", 0, 1.5), ("copies", 0, 1)],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_times_by_hand(case):
    lines, length, sparse_core, overlap, spans = case
    found = timeline_of(*lines)
    assert found.axis == "modelled seconds"
    assert found.length == pytest.approx(length)
    assert found.sparse_core == pytest.approx(sparse_core)
    assert found.overlap == pytest.approx(overlap)
    assert [lane for lane, *_ in spans_of(found)] == [lane for lane, *_ in spans]
    for (_, *at), (_, *expected) in zip(spans_of(found), spans, strict=True):
        assert at == pytest.approx(expected)
    assert found.num_left_out == 0


def test_order_of_the_schedule_where_bandwidths_are_not_known():
    found = timeline_of(
        *(negate("b"), START, UPDATE, negate("c"), SEND, DONE),
        hardware=HardwareInfo(name="unknown"),
    )
    assert found.axis == "order of the schedule"
    assert spans_of(found) == [
        *(("TensorCore", 0, 1), ("TensorCore", 1, 2)),
        *(("SparseCore", 1, 3), ("links", 2, 3)),
    ]
    assert (found.length, found.sparse_core, found.overlap) == (3, 2, 1)


def test_short_neighbours_are_one_and_the_longest_are_kept(monkeypatch):
    tiny = [f"%t{i} = f32[8,128]{{1,0:T(8,128)}} negate(%x)" for i in range(3)]
    lines = ["%x = f32[8,128]{1,0:T(8,128)} constant({...})"]
    for i in range(4):
        lines += [negate(f"b{i}"), SEND.replace("%e", f"%e{i}")]
    # Half a percent of the whole: too long to merge, but the shortest.
    lines += [*tiny, SEND.replace("%e", "%e4")]
    every = timeline_of(*lines)
    assert sum(i.num_operations for i in every.intervals) == 12
    monkeypatch.setattr(timeline, "_MERGE_SHARE", 0.01)
    merged = timeline_of(*lines)
    assert [i.num_operations for i in merged.intervals].count(3) == 1
    assert merged.num_left_out == 0
    monkeypatch.setattr(timeline, "MAX_INTERVALS", 9)
    kept = timeline_of(*lines)
    assert kept.num_left_out == 3
    assert [i.num_operations for i in kept.intervals] == [1] * 9
    assert kept.length == every.length
