"""Cycles of a program written by hand; tests/compiled bounds the cycles of steps."""

import pytest

from tpu_embedding.tools.compile_report.cycles import count_cycles, format_cycles

PROGRAM = """HloModule step

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(16)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8] get-tuple-element(%p), index=1
  %tiny = f32[8] fusion(%x), op_name="tiny", "estimated_cycles":"10"
  ROOT %t = (s32[], f32[8]) tuple(%next, %tiny)
}

%until (p: (pred[], f32[8])) -> pred[] {
  %p = (pred[], f32[8]) parameter(0)
  %any = f32[8] fusion(%p), "estimated_cycles":"1000"
  ROOT %go = pred[] get-tuple-element(%p), index=0
}

%more (p: (pred[], f32[8])) -> (pred[], f32[8]) {
  %p = (pred[], f32[8]) parameter(0)
  %zero = s32[] constant(0)
  %copied = s32[] copy(%zero)
  %start = (s32[], f32[8]) tuple(%copied, %x)
  %inner = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  ROOT %u = (pred[], f32[8]) tuple(%p)
}

%left (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %l = f32[8] sort(%a), "estimated_cycles":"7"
}

%right (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %r = f32[8] reshape(%a), "estimated_cycles":"5"
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %b = f32[8] copy(%a), "estimated_cycles":"100"
  %unknown = f32[8] copy(%a), "estimated_cycles":"-1"
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %b)
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %open = (pred[], f32[8]) while(%b), condition=%until, body=%more, op_name="route"
  %either = f32[8] conditional(%b, %a, %a), branch_computations={%left, %right}
  ROOT %or = f32[8] conditional(%b), true_computation=%left, false_computation=%right
}
"""


def test_loops_count_their_iterations():
    cycles = count_cycles(PROGRAM)
    outside = 100 + 16 * 10 + 2 * (7 + 5)
    assert cycles.total == outside + 2 * 1000 + 16 * 10
    assert cycles.data_loops == ("route",)
    # Two copies, two sorts, 32 fusions and additions, 2 x 17 tests in loops, a copy in
    # the outer loop, and its two tests.
    assert cycles.num_operations == 2 + 2 + 2 * 32 + 2 * 17 + 1 + 2
    most, *_ = cycles.operations
    assert (most.name, most.runs, most.cycles, most.shape) == ("any", 2, 1000, (8,))
    tiny = [x for x in cycles.operations if x.name == "tiny"]
    assert [(x.runs, x.scope) for x in tiny] == [(16, "tiny")] * 2


@pytest.mark.parametrize(
    ("old", "new", "runs"),
    [
        ("constant(16)", "constant(7)", 7),
        ("s32[] constant(0)", "s32[] constant(5)", 11),
        ("%one = s32[] constant(1)", "%one = s32[] constant(3)", 6),
        ("constant(16)", "constant(0)", 0),
        # Data decide about these.
        ("s32[] constant(0)", "s32[] parameter(1)", 1),
        ("%next = s32[] add(%i, %one)", "%next = s32[] multiply(%i, %one)", 1),
        ("direction=LT", "direction=GT", 1),
        ("ROOT %less = pred[] compare", "ROOT %less = pred[] and", 1),
        ("%limit = s32[] constant(16)", "%limit = s32[] parameter(1)", 1),
        ("%limit = s32[] constant(16)", "%limit = f32[] constant(16)", 1),
    ],
)
def test_iterations_of_a_counter(old, new, runs):
    assert old in PROGRAM
    cycles = count_cycles(PROGRAM.replace(old, new))
    assert [x.runs for x in cycles.operations if x.name == "tiny"] == [runs] * 2


def test_text_has_the_most_expensive_operations():
    lines = format_cycles(count_cycles(PROGRAM), 2).splitlines()
    assert lines[0].startswith("estimated cycles: 2,444 in 105 operations")
    assert "SparseCores" in lines[0] and lines[2] == "  route"
    assert [line.split()[0] for line in lines[3:]] == ["cycles", "2,000", "160"]


def test_text_without_a_program_is_rejected():
    with pytest.raises(ValueError):
        count_cycles("")
