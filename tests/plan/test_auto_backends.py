"""`kernels="auto"`: a verdict decides for each direction and kind of row."""

import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tests.verdict_files import DATE, record_of, verdict, write_records
from tpu_embedding.kernel_verdicts import (
    DIRECTORY_VARIABLE,
    KernelVerdicts,
    capability_of,
)

DIRECTIONS = ("read", "pool", "spread", "update", "write")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))


def plan_of(kernels, dim=32, optimizer=None, hardware="v5p", num_devices=1):
    table = te.TableConfig(
        vocabulary_size=200, dim=dim, name="t", initializer=te.initializers.normal(1.0)
    )
    return te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(num_devices),
        optimizer=optimizer or te.optimizers.adagrad(0.1),
        kernels=kernels,
        hardware=te.hardware.hardware_by_name(hardware),
    )


def backends_of(kernels, **options):
    backends = plan_of(kernels, **options).stacks[0].backends
    return {d: getattr(backends, d).backend for d in DIRECTIONS}


def allowing(directions, dim):
    verdicts = [
        verdict(
            d, capability_of(d, dim).dim, speed_ratio=1.5 if d in directions else 0.5
        )
        for d in DIRECTIONS
    ]
    return KernelVerdicts(backend="interpreter", verdicts=tuple(verdicts))


ONE = [(direction,) for direction in DIRECTIONS]
ALL_BUT_ONE = [tuple(d for d in DIRECTIONS if d != left) for left in DIRECTIONS]


@needs_kernels
@pytest.mark.parametrize("directions", [(), *ONE, *ALL_BUT_ONE, DIRECTIONS])
def test_kernels_run_where_their_verdict_allows_them(directions):
    chosen = backends_of(allowing(directions, 32))
    for direction, backend in chosen.items():
        assert backend == ("interpreter" if direction in directions else "xla")


REASONS = {
    # What the verdict on reading says, if a kernel reads, and the reason.
    "faster": ({}, "interpreter", f"auto: verdict of {DATE}: 1.50x the speed of XLA"),
    "slower": ({"speed_ratio": 0.7}, "xla", "0.70x the speed of XLA"),
    "hardly faster": ({"speed_ratio": 1.01}, "xla", "1.01x the speed of XLA"),
    "not timed": ({"speed_ratio": None}, "xla", "equal, but not timed"),
    "wrong": ({"problem": "wrong row 7"}, "xla", "wrong row 7"),
    "hangs": ({"problem": "hangs"}, "xla", "hangs"),
}


@needs_kernels
@pytest.mark.parametrize("case", REASONS)
def test_stored_verdicts_decide_and_are_printed(case):
    fields, backend, reason = REASONS[case]
    write_records(record_of("cpu", "interpreter", verdict("read", 32, **fields)))
    plan = plan_of("auto")
    choice = plan.stacks[0].backends.read
    assert (choice.backend, reason in choice.reason) == (backend, True)
    assert reason in str(plan)
    write = plan.stacks[0].backends.write
    assert (write.backend, write.reason) == (
        *("xla", "auto: no verdict on these rows; run tpu-embedding doctor"),
    )
