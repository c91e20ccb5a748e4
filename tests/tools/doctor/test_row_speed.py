"""Timings: their figures, and a kernel that has become slower."""

import jax
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.tools.compile_report.floor import embedding_floor
from tpu_embedding.tools.doctor.child import ChildOptions, run_case
from tpu_embedding.tools.doctor.faults import parse_fault, planted
from tpu_embedding.tools.doctor.row_batches import size_of
from tpu_embedding.tools.doctor.row_inputs import make_inputs
from tpu_embedding.tools.doctor.row_programs import row_program

OPTIONS = ChildOptions(backend="interpreter", part="speed", tier="quick", seeds=(0,))
CASES = {case.name: case for case in OPTIONS.cases(jax.devices())}
FIGURES = {
    *("seconds_per_call", "spread", "xla_seconds_per_call", "speed_ratio"),
    *("bytes", "model_bytes"),
}


def figures_of(name, options=OPTIONS):
    _, ended = run_case(CASES[name], options, jax.devices())
    assert ended.ok and ended.problem is None
    assert set(ended.figures) == FIGURES
    return ended.figures


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize("name", ["read, dim 32", "update, dim 32"])
def test_figures(name):
    figures = figures_of(name)
    assert figures["seconds_per_call"] > 0 and figures["xla_seconds_per_call"] > 0
    assert figures["speed_ratio"] > 0 and figures["spread"] >= 0
    assert figures["model_bytes"] is None  # This is no TPU.
    case = CASES[name]
    size = size_of(case, floats=9 * 2**11, many_rows=0, num_devices=1)
    program = row_program(case, size, "interpreter", jax.devices()[:1])
    floor = embedding_floor(program.plan, make_inputs(program, 0).arguments[2])
    is_lookup = case.rule is None
    expected = floor.forward_hbm_bytes if is_lookup else floor.hbm_bytes
    assert figures["bytes"] == expected


def test_xla_alone():
    options = ChildOptions(backend="xla", part="speed", tier="quick", seeds=(0,))
    figures = figures_of("step, dim 32", options)
    assert figures["speed_ratio"] == 1
    assert figures["seconds_per_call"] == figures["xla_seconds_per_call"]


@needs_kernels
@pytest.mark.full
def test_a_slower_kernel_is_seen():
    """The fault computes for tens of milliseconds; the kernel takes a few."""
    ratio = figures_of("read, dim 32")["speed_ratio"]
    with planted(parse_fault("slower:read")):
        assert figures_of("read, dim 32")["speed_ratio"] < ratio / 2
