"""The kernels of a run: the same in all processes."""

import jax
import pytest

import tpu_embedding as te
from tests.conftest import needs_kernels
from tpu_embedding.kernel_verdicts import KernelVerdicts, Verdict
from tpu_embedding.training import kernel_choice
from tpu_embedding.training.kernel_choice import of_first_process, resolve_kernels

VERDICTS = KernelVerdicts(
    backend="interpreter",
    verdicts=(
        Verdict(
            capability="read, dim 8",
            is_equal=False,
            problem="row 7 is zero, not 1.5",
            speed_ratio=None,
            num_cases=1,
            date="2026-01-31",
        ),
    ),
)


@pytest.mark.parametrize("kernels", ["xla", "interpreter", "auto"])
def test_one_process_keeps_the_setting(kernels):
    hardware = te.hardware_by_name("v5p")
    assert resolve_kernels(kernels, jax.devices()[0], hardware) == kernels


def test_verdicts_survive_the_broadcast():
    assert of_first_process(VERDICTS) == VERDICTS


@needs_kernels
def test_several_processes_follow_the_first(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    received = []
    monkeypatch.setattr(
        kernel_choice, "of_first_process", lambda own: received.append(own) or VERDICTS
    )
    device, hardware = jax.devices()[0], te.hardware_by_name("v5p")
    assert resolve_kernels("auto", device, hardware) == VERDICTS
    assert received == [KernelVerdicts(backend="interpreter")]
    assert resolve_kernels("xla", device, hardware) == "xla"
    assert resolve_kernels("auto", device, te.hardware_by_name("cpu")) == "auto"
    assert len(received) == 1
