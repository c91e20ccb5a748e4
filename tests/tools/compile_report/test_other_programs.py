"""The memory of a run's programs beside the train step, compiled for the CPU."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from tests.tools.compile_report.report_cases import REPORT
from tpu_embedding.hardware import HardwareInfo, hardware_by_name
from tpu_embedding.tools import compile_report

CPU = hardware_by_name("cpu")
FLOATS = jax.ShapeDtypeStruct((1000,), jnp.float32)
ROWS = jax.ShapeDtypeStruct((500, 8), jnp.float32)


def small_chip(capacity):
    return HardwareInfo(name="small", hbm_capacity_bytes=capacity)


def test_arrays_that_a_program_does_not_use_count():
    program = compile_report.UncompiledProgram(
        name="sum",
        resident={"tables": {"stack": ROWS}, "slots": ROWS, "dense": FLOATS},
        inputs=(FLOATS,),
        function=lambda resident, x: x + resident["dense"],
    )
    memory = compile_report.program_memory(program, CPU).memory
    sizes = (memory.tables, memory.slots, memory.dense, memory.inputs, memory.outputs)
    assert sizes == (16000, 16000, 4000, 4000, 4000)
    assert memory.padding is not None and memory.padding < 64
    assert memory.required >= sum(sizes)
    assert memory.fits


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_a_program_without_device_code_needs_what_lies_there(spare, fits):
    program = compile_report.UncompiledProgram(
        name="save", resident={"tables": ROWS, "dense": FLOATS}
    )
    found = compile_report.program_memory(program, small_chip(20000 + spare))
    assert (found.memory.required, found.memory.fits) == (20000, fits)
    assert found.memory.temporaries is None
    assert (found.compile_seconds, found.refusal) == (0.0, "")


def test_required_memory_above_capacity_does_not_fit():
    program = compile_report.UncompiledProgram(
        name="make", resident={}, function=lambda _: jnp.zeros((1000,)), note="a remark"
    )
    assert compile_report.program_memory(program, small_chip(2**20)).memory.fits
    found = compile_report.program_memory(program, small_chip(3999))
    assert not found.memory.fits
    report = dataclasses.replace(REPORT, others=(found,))
    assert REPORT.fits and report.memory.fits and not report.fits
    text = compile_report.format_report(report)
    assert "THE RUN DOES NOT FIT: make needs 3.91 KiB of 3.91 KiB HBM, " in text
    assert "make: a remark" in text
    (row,) = compile_report.format_comparison([report]).splitlines()[2:]
    assert " NO " in row
    values = json.loads(json.dumps(report.to_json()))
    assert not values["fits"]
    assert values["memory"]["fits"]
    assert values["others"][0]["name"] == "make"


def test_a_run_that_fits_says_how_many_programs_it_has():
    save = compile_report.program_memory(
        compile_report.UncompiledProgram(name="save", resident={}), CPU
    )
    text = compile_report.format_report(dataclasses.replace(REPORT, others=(save,)))
    assert "every program of the run fits (2 of them)" in text
    assert [p.name for p in REPORT.programs] == ["train step"]
    assert "every program" not in compile_report.format_report(REPORT)
