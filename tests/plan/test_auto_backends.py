"""`kernels="auto"`: a verdict decides for each direction and kind of row."""

import jax
import jax.numpy as jnp
import numpy as np
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


@needs_kernels
def test_each_kind_of_row_and_of_rule_has_its_verdict():
    allowed = KernelVerdicts(
        backend="interpreter",
        verdicts=(
            verdict("update", 32),
            verdict("update", 512, "row sums"),
        ),
    )
    by_row = te.optimizers.rowwise_adagrad(0.1)
    assert backends_of(allowed, dim=32)["update"] == "interpreter"
    assert backends_of(allowed, dim=64)["update"] == "xla"
    assert backends_of(allowed, dim=32, optimizer=by_row)["update"] == "xla"
    assert backends_of(allowed, dim=256, optimizer=by_row)["update"] == "interpreter"


@needs_kernels
def test_rows_that_no_kernel_reaches_keep_their_reason():
    choice = plan_of(allowing(DIRECTIONS, 100), dim=100).stacks[0].backends.read
    assert choice.backend == "xla" and "dim 100" in choice.reason


@needs_kernels
def test_no_verdict():
    plan = plan_of("auto")
    reason = "auto: no verdict for this device; run tpu-embedding doctor"
    assert {(c.backend, c.reason) for c in plan.stacks[0].backends} == {("xla", reason)}
    assert plan.stacks[0].layout == plan_of("xla").stacks[0].layout


@needs_kernels
def test_stale_verdicts():
    record = record_of("cpu", "interpreter", verdict("read", 32), jax="0.1.0")
    write_records(record)
    read = plan_of("auto").stacks[0].backends.read
    assert read.backend == "xla"
    assert f"verdict is stale: jax 0.1.0 then, {jax.__version__} now" in read.reason


@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
def test_devices_without_kernels_run_xla_in_its_usual_forms(hardware):
    plan, usual = (plan_of(k, hardware=hardware) for k in ("auto", "xla"))
    for choice, of_xla in zip(
        plan.stacks[0].backends, usual.stacks[0].backends, strict=True
    ):
        assert (choice.name, choice.reason) == (
            of_xla.name,
            f"auto: {hardware} runs XLA",
        )


def test_unknown_choices_are_refused():
    with pytest.raises(ValueError, match="kernels must be one of .*'auto'"):
        plan_of("automatic")


def train(plan):
    """Returns activations, table and slots of two steps with repeated ids."""
    ids = np.random.default_rng(0).integers(0, 40, (64, 3)).astype(np.int32)

    @jax.jit
    def step(tables, slots, ids):
        result = te.functional.lookup(tables, ids, plan)
        cotangents = jnp.cos(result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
        return tables, slots, result.activations

    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    outputs = []
    for shift in (0, 7):
        tables, slots, activations = step(tables, slots, ids + shift)
        outputs.append(activations)
    accumulators = te.functional.slot_values(slots, plan)["t"].values()
    return *outputs, te.functional.unstack_tables(tables, plan)["t"], *accumulators


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize(
    ("dim", "directions"),
    [
        (32, ("update",)),
        *(
            pytest.param(dim, directions, marks=pytest.mark.full)
            for dim, sets in [(32, ONE), (256, ALL_BUT_ONE)]
            for directions in sets
        ),
    ],
)
def test_mixed_backends_train_as_xla_does(dim, directions):
    results = []
    for kernels in ("xla", allowing(directions, dim)):
        results.append(train(plan_of(kernels, dim, num_devices=2)))
    for by_xla, mixed in zip(*results, strict=True):
        # Sums in another order: float32 rounding of a few terms.
        np.testing.assert_allclose(mixed, by_xla, rtol=1e-5, atol=1e-6)
