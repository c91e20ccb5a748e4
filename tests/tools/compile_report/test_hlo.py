"""The parser of HLO text."""

from tests.rejections import rejects
from tpu_embedding.tools.compile_report.hlo import parse_module

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%fused_computation.3 (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(%param_0), metadata={op_name="jit(step)/neg"}
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
  %copy-start = (f32[8]{0:T(1024)S(1)}, f32[8]{0}, u32[]{:S(2)}) copy-start(%param.1)
  %copy-done = f32[8]{0:T(1024)S(1)} copy-done(%copy-start)
  %fusion = f32[8]{0} fusion(%copy-done), calls=%fused_computation.3, config={"(%b"}
  ROOT %tuple = (f32[8]{0}, /*index=1*/s32[]) tuple(%fusion, /*index=1*/%param)
}
"""


def test_module():
    module = parse_module(TEXT)
    assert list(module.computations) == [
        "fused_computation.3",
        "reducer",
        "main.7_spmd",
    ]
    entry = module.entry
    assert entry is module.computations["main.7_spmd"]
    assert entry["tuple"].operands == ("fusion", "param")
    assert entry["constant.1"].operands == ()
    assert module.computations["reducer"]["sum"].operands == ("a", "b")
    unfused = [i.name for i in module.unfused_instructions()]
    assert "neg" not in unfused
    assert {"sum", "copy-done", "tuple"} <= set(unfused)


def test_instructions():
    entry = parse_module(TEXT).entry
    start = entry["copy-start"]
    assert (start.opcode, start.base_opcode) == ("copy-start", "copy")
    assert start.dims == ((8,), (8,), ())
    assert start.sizes == (8, 8, 1)
    assert start.is_on_chip and not entry["fusion"].is_on_chip
    assert entry["fusion"].operands == ("copy-done",)
    assert entry["fusion"].called("calls") == "fused_computation.3"


def test_no_program():
    with rejects(fix="compiled.as_text()"):
        parse_module("HloModule nothing\n")
