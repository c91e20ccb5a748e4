"""The parser of HLO text: shapes as they lie in memory, instructions, sources."""

import pytest

from tpu_embedding.tools.compile_report.hlo import HBM, parse_module, parse_shapes

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

FileNames
1 "/somewhere/a.py"
2 "/somewhere/b.py"

FunctionNames
1 "<module>"

FileLocations
1 {file_name_id=1 function_name_id=1 line=21 end_line=21 column=2 end_column=9}
2 {file_name_id=2 function_name_id=1 line=7 end_line=7 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

%fused_computation.3 (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(%param_0), metadata={NEGATE}
}, execution_thread="sparsecore"

%reducer (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main.7_spmd (param.1: f32[8], param: s32[]) -> (f32[8], s32[]) {
  %param.1 = f32[8]{0} parameter(0), metadata={op_name="state[0][\\'tables\\'].lines"}
  %param = s32[]{:T(128)} parameter(1)
  %constant.1 = f32[2,2]{1,0} constant({ { 1, 2 }, { 3, 4 } })
  %copy-start = (VMEM, f32[8]{0}, u32[]{:S(2)}) copy-start(%param.1), metadata={COPY}
  %copy-done = VMEM copy-done(%copy-start)
  %fusion = f32[8]{0} fusion(%copy-done), calls=%fused_computation.3, config={"(%b"}
  ROOT %tuple = (f32[8]{0}, /*index=1*/s32[]) tuple(%fusion, /*index=1*/%param)
}
"""
# What would make lines too long.
for short, whole in (
    ("VMEM", "f32[8]{0:T(1024)S(1)}"),
    ("COPY", 'source_file="c.py" source_line=3'),
    ("NEGATE", 'op_name="jit(step)/neg" stack_frame_id=2'),
):
    TEXT = TEXT.replace(short, whole)


def test_module():
    module = parse_module(TEXT)
    assert list(module.computations) == [
        "fused_computation.3",
        "reducer",
        "main.7_spmd",
    ]
    assert module.entry.name == "main.7_spmd"
    assert module.num_partitions == 4
    assert module.entry.root.name == "tuple"
    assert module.entry.root.operands == ("fusion", "param")
    assert module.computations["reducer"].root.operands == ("a", "b")
    unfused = [i.name for i in module.unfused_instructions()]
    assert "neg" not in unfused
    assert {"sum", "copy-done", "tuple"} <= set(unfused)


def test_sources_by_frame_and_by_line():
    module = parse_module(TEXT)
    negate = module.computations["fused_computation.3"].root
    assert module.source_of(negate) == "/somewhere/b.py:7"
    assert negate.op_name == "jit(step)/neg"
    assert module.source_of(module.entry.instructions["copy-start"]) == "c.py:3"
    assert module.source_of(module.entry.instructions["fusion"]) == ""


def test_instructions():
    entry = parse_module(TEXT).entry
    start = entry.instructions["copy-start"]
    assert (start.opcode, start.base_opcode) == ("copy-start", "copy")
    assert start.sizes == (8, 8, 1)
    assert [shape.memory_space for shape in start.shapes] == [1, HBM, 2]
    fusion = entry.instructions["fusion"]
    assert fusion.operands == ("copy-done",)
    assert fusion.called("calls") == "fused_computation.3"
    assert entry.parameters[1].name == "param"
    assert [user.name for user, _ in entry.users["param"]] == ["tuple"]
    assert entry.instructions["constant.1"].operands == ()
    assert "tables" in entry.instructions["param.1"].op_name


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[]", 4),
        ("f32[]{:T(128)}", 4),
        ("pred[]{:T(512)S(6)}", 1),
        ("f32[8,128]{1,0:T(8,128)}", 4096),
        # Rows of 16 take 128 lanes; columns of 16 fill two times 8 sublanes.
        ("f32[1000,16]{1,0:T(8,128)}", 1000 * 512),
        ("f32[1000,16]{0,1:T(8,128)}", 1024 * 16 * 4),
        ("f32[57,128]{1,0:T(8,128)}", 64 * 512),
        ("f32[32,1]{0,1:T(1,128)}", 512),
        ("s32[3071]{0:T(1024)}", 3072 * 4),
        ("bf16[512,27]{1,0:T(8,128)(2,1)}", 512 * 128 * 2),
        ("pred[3071]{0:T(1024)(128)(4,1)}", 3072),
        ("f32[4,3560,16]{1,2,0:T(8,128)}", 4 * 3584 * 16 * 4),
        ("f32[3,5]", 60),
        ("f32[3,5]{1,0}", 60),
        ("f8e4m3fn[16]{0}", 16),
        ("s4[16]{0}", 8),
        ("token[]", 0),
    ],
)
def test_bytes_include_the_padding_of_tiles(text, num_bytes):
    (shape,) = parse_shapes(text)
    assert shape.num_bytes == num_bytes


@pytest.mark.parametrize(
    ("text", "sizes", "num_bytes"),
    [
        ("f32[1000,128]{1,0:T(8,128)}", (1, 128), 512),
        ("f32[1000,16]{1,0:T(8,128)}", (1, 16), 512),
        ("f32[1000,16]{1,0:T(8,128)}", (1, 8), 32),
        ("f32[1000,16]{0,1:T(8,128)}", (1, 16), 64),
        ("f32[1000,200]{1,0:T(8,128)}", (1, 200), 1024),
        ("s32[3071]{0:T(1024)}", (1,), 4),
        ("s32[3071]{0:T(1024)}", (3071,), 3072 * 4),
    ],
)
def test_a_slice_has_the_padding_of_axes_that_it_spans(text, sizes, num_bytes):
    (shape,) = parse_shapes(text)
    assert shape.slice_bytes(sizes) == num_bytes


def test_tuples_are_flattened():
    shapes = parse_shapes("((f32[4]{0}, s32[]), (), /*index=2*/(pred[2]{0}))")
    assert [shape.dtype for shape in shapes] == ["f32", "s32", "pred"]


def test_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_module("HloModule nothing\n")
