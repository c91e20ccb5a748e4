"""The plan of a run, whose kernels are the same in all processes."""

import jax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tests.distributed.jobs import make_jobs
from tests.verdict_files import record_of, verdict, write_records
from tpu_embedding.kernel_verdicts import KernelVerdicts
from tpu_embedding.tools.compile_report.topology import topology_mesh
from tpu_embedding.tools.train import apply_overrides, load_config
from tpu_embedding.tools.train.loop import run_plan
from tpu_embedding.tools.train.loop.run_plan import (
    kernel_hint,
    make_run_plan,
    of_first_process,
    resolve_kernels,
)

VERDICTS = KernelVerdicts(
    backend="interpreter",
    absence="the test has no more",
    verdicts=(verdict("read", problem="row 7 is zero", speed_ratio=None),),
)


@pytest.mark.parametrize("kernels", ["xla", "interpreter", "auto"])
def test_one_process_keeps_the_setting(kernels):
    hardware = te.hardware.hardware_by_name("v5p")
    assert resolve_kernels(kernels, jax.devices()[0], hardware) == kernels


@needs_kernels
@pytest.mark.parametrize(
    ("kernels", "hardware", "text"),
    [
        (
            "auto",
            "v5p",
            "of some kernels: no verdict for this device. Stop the run, run",
        ),
        (VERDICTS, "v5p", None),
        ("xla", "v5p", None),
        ("auto", "cpu", None),
    ],
)
def test_the_hint_at_missing_verdicts(kernels, hardware, text):
    plan = te.make_plan(
        te.FeatureConfig(table=te.TableConfig(vocabulary_size=9, dim=8, name="t")),
        mesh_of(1),
        kernels=kernels,
        hardware=te.hardware.hardware_by_name(hardware),
    )
    hint = kernel_hint(plan)
    if text is None:
        assert hint is None
    else:
        assert hint is not None and text in hint


def test_verdicts_survive_the_broadcast():
    assert of_first_process(VERDICTS) == VERDICTS


@needs_kernels
def test_several_processes_follow_the_first(monkeypatch):
    monkeypatch.setattr(run_plan, "current_job", lambda: make_jobs(2)[0])
    received = []
    monkeypatch.setattr(
        run_plan, "of_first_process", lambda own: received.append(own) or VERDICTS
    )
    device, hardware = jax.devices()[0], te.hardware.hardware_by_name("v5p")
    assert resolve_kernels("auto", device, hardware) == VERDICTS
    assert received == [KernelVerdicts(backend="interpreter")]
    assert resolve_kernels("xla", device, hardware) == "xla"
    assert (
        resolve_kernels("auto", device, te.hardware.hardware_by_name("cpu")) == "auto"
    )
    assert len(received) == 1


@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2"])
def test_a_compiled_plan_follows_the_verdicts_on_such_a_chip(
    monkeypatch, tmp_path, topology
):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path))
    mesh = topology_mesh(topology)
    table = te.TableConfig(vocabulary_size=99, dim=8, name="t")

    def choice():
        plan = te.make_plan(te.FeatureConfig(table=table), mesh, kernels="auto")
        return plan.stacks[0].backends.read

    has_kernels = topology.startswith("v5p")
    reason = "no verdict for this device" if has_kernels else "no SparseCores"
    assert choice().backend == "xla" and reason in choice().reason
    kind = mesh.devices.flat[0].device_kind
    write_records(record_of(kind, "sparse_core", verdict("read")))
    assert choice().backend == ("sparse_core" if has_kernels else "xla")


def test_table_dtype_is_that_of_all_tables():
    config = apply_overrides(
        load_config("two_tower"),
        ["table_dtype=bfloat16", "data.num_users=300", "data.num_items=200"],
    )
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, mesh_of(1))
    assert {stack.layout.dtype_name for stack in plan.stacks} == {"bfloat16"}
    # Features of one table still share it.
    names = [table.name for stack in plan.stacks for table in stack.tables]
    assert len(names) == len(set(names)) < len(plan.features)
