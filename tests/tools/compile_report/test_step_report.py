"""Compile reports: of an own step on the CPU, and of the run configs on TPUs."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.cost import program_cost
from tpu_embedding.tools.compile_report.hlo import parse_module
from tpu_embedding.tools.train import (
    apply_overrides,
    load_config,
    make_run_plan,
)
from tpu_embedding.tools.train.feeding import prepare_batch
from tpu_embedding.tools.train.steps import abstract_step

SMALL_DLRM = (
    "batch_size=512",
    "model.bottom_sizes=16",
    "model.top_sizes=16",
    "data.num_evaluation_samples=10",
)


def report_on(name, topology, *settings, num_slices=1, **options):
    config = apply_overrides(load_config(name), settings)
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    mesh = compile_report.topology_mesh(topology, num_slices=num_slices)
    plan = make_run_plan(config, data, mesh, compiler_options=options)
    step, state, batch = abstract_step(config, data, plan)
    return compile_report.compile_report(
        *(step, state, batch, plan),
        features=batch.features,
        name=config.name,
        topology=topology,
    )


def report_on_cpu(num_rows=1000, num_devices=4):
    table = te.TableConfig(vocabulary_size=num_rows, dim=16, name="table")
    plan = te.make_plan(
        {"f": te.FeatureConfig(table=table)},
        mesh_of(num_devices),
        optimizer=te.optimizers.adagrad(0.1),
    )

    def step(state, batch):
        tables, slots = state
        result = te.functional.lookup(tables, batch, plan)
        gradients = te.functional.compute_gradients(
            result.routing, jax.tree.map(jnp.tanh, result.activations), plan
        )
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    tables = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda: te.functional.init_slots(tables_of(plan), plan))
    batch = {"f": jax.ShapeDtypeStruct((64,), jnp.int32)}
    return compile_report.compile_report(
        jax.jit(step, donate_argnums=0),
        compile_report.abstract_arrays((tables, slots), plan),
        compile_report.abstract_batch(batch, plan),
        plan,
        topology="laptop",
    )


def tables_of(plan):
    return te.functional.init_tables(plan, jax.random.key(0))


def test_an_own_step_on_the_cpu():
    report = report_on_cpu()
    assert report.memory.fits
    assert (report.memory.tables, report.memory.slots) == (250 * 64, 250 * 64)
    assert report.memory.inputs == 16 * 4
    assert report.memory.capacity is None
    assert report.num_devices == 4
    assert report.traffic.table_copies == ()
    assert report.traffic.sparse_core == ()
    assert report.traffic.total.hbm_seconds is None
    assert report.traffic.embedding.hbm_bytes > 0
    names = {row.name for row in report.traffic.classes}
    assert {"gather", "scatter", "all-to-all"} <= names
    text = compile_report.format_report(report)
    assert "fits\n" in text
    assert "laptop: 4 devices" in text
    assert "bandwidths unknown" in text


def test_the_layer_is_told_apart_on_one_device():
    traffic = report_on_cpu(num_devices=1).traffic
    assert traffic is not None
    shares = {
        row.name: row.cost.hbm_bytes / traffic.total.hbm_bytes for row in traffic.parts
    }
    # Only tanh of the activations is outside.
    assert shares["embedding"] > 0.9
    assert shares["dense"] < 0.1


def test_reports_are_values():
    report = report_on_cpu()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.name = "other"
    restored = json.loads(json.dumps(report.to_json()))
    assert restored == report.to_json()
    assert restored["memory"]["tables"] == report.memory.tables
    assert restored["hardware"]["compiler_options"] == {}
    assert restored["versions"]["jax"] == jax.__version__


def test_ratio_of_links_counts_those_between_slices_on_both_sides():
    report = report_on_cpu()
    assert report.traffic is not None
    minimum = dataclasses.replace(report.floor, ici_bytes=10.0, dcn_bytes=40.0)
    moved = dataclasses.replace(report.floor, ici_bytes=25.0, dcn_bytes=100.0)
    parts = tuple(
        dataclasses.replace(part, cost=moved) if part.name == "embedding" else part
        for part in report.traffic.parts
    )
    traffic = dataclasses.replace(report.traffic, parts=parts)
    report = dataclasses.replace(report, floor=minimum, traffic=traffic)
    (row,) = (
        line
        for line in compile_report.format_report(report).splitlines()
        if line.startswith("embedding part / minimum")
    )
    assert row.split()[-1] == "2.5x"


def check_sums(traffic):
    """Classes and parts each add up to the total."""
    for field in ("hbm_bytes", "ici_bytes", "dcn_bytes"):
        expected = pytest.approx(getattr(traffic.total, field))
        for rows in (traffic.classes, traffic.parts):
            assert sum(getattr(row.cost, field) for row in rows) == expected


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "topology", "settings"),
    [
        ("synthetic", "v5e:2x4", ()),
        pytest.param("dlrm", "tpu7x:2x2x1", SMALL_DLRM, marks=pytest.mark.full),
    ],
)
def test_run_configs(name, topology, settings):
    report = report_on(name, topology, *settings)
    memory, traffic = report.memory, report.traffic
    assert memory.fits
    parts = (memory.tables, memory.slots, memory.dense, memory.inputs, memory.padding)
    rest = (memory.outputs, memory.temporaries, memory.code)
    assert memory.required == sum(parts) + sum(rest)
    assert memory.required < memory.capacity
    check_sums(traffic)
    assert traffic.table_copies == ()
    # Everything of the layer has its origin in shard_map.
    (unattributed,) = (row for row in traffic.parts if row.name == "unattributed")
    assert unattributed.cost.hbm_bytes <= 0.01 * traffic.total.hbm_bytes
    (exchange,) = (row for row in traffic.classes if row.name == "all-to-all")
    assert exchange.num_operations == 3
    assert exchange.cost.ici_bytes <= traffic.embedding.ici_bytes
    assert 1 <= traffic.embedding.ici_bytes / report.floor.ici_bytes < 4
    # Further rounds of lookup and update, at least.
    assert len(traffic.loops) >= 2
    assert all("shard_map" in loop.op_name for loop in traffic.loops)
    text = compile_report.format_report(report)
    assert f"{name} on {topology}" in text
    assert "tables or slot variables copied within HBM: none" in text


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "kernels",
    ["xla", pytest.param("sparse_core", marks=(needs_kernels, pytest.mark.full))],
)
def test_large_tables_on_sparse_core(kernels):
    settings = (*SMALL_DLRM, "data.vocabulary_size=2000000", "model.dim=128")
    settings += (f"kernels={kernels}",)
    report = report_on("dlrm", "v5p:2x2x1", *settings)
    steady = [o for o in report.traffic.sparse_core if o.runs == "every step"]
    classes = [o.operation_class for o in steady]
    if kernels == "sparse_core":
        # Rows of ids, those of samples, cotangents to places, table and slots.
        assert classes.count("custom call") >= 4
        names = {part for o in steady for part in o.op_name.split("/")}
        assert {"read_rows", "write_rows", "update_rows"} <= names
    else:
        assert classes.count("gather") >= 2  # table and slots
        assert classes.count("scatter") >= 2
        assert any("access.py:" in o.source for o in steady)
    assert not any(o.source.startswith("/") for o in steady)
    assert report.traffic.table_copies == report.traffic.table_moves == ()
    # 13 million rows of 512 bytes a device, of which a step moves some thousand.
    assert report.traffic.total.hbm_bytes < 0.1 * report.memory.tables
    ratio = report.traffic.embedding.hbm_bytes / report.floor.hbm_bytes
    assert 1 < ratio < 20
    assert report.hardware.compiler_options[0][1] == "true"


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_layer_code_is_attributed_to_the_embedding_part():
    config = load_config("synthetic")
    data = config.data.outline(batch_size=config.batch_size, seed=0)
    plan = make_run_plan(config, data, compile_report.topology_mesh("v5e:2x2"))
    step, state, batch = abstract_step(config, data, plan)
    module = parse_module(step.lower(state, batch).compile().as_text())
    of_layer = [
        operation
        for operation in program_cost(module).operations
        if any(
            f"tpu_embedding/{package}/" in operation.source
            for package in ("lookup", "update", "rows", "optimizers")
        )
    ]
    assert len(of_layer) > 50
    assert {operation.part for operation in of_layer} == {"embedding"}


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "topology", [pytest.param("v5e:2x2", marks=pytest.mark.full), "v5p:2x2x1"]
)
def test_a_step_that_does_not_fit(topology):
    settings = (*SMALL_DLRM, "data.vocabulary_size=60000000", "model.dim=128")
    report = report_on("dlrm", topology, *settings)
    memory = report.memory
    assert not memory.fits
    assert report.traffic is None
    assert memory.temporaries is None
    assert memory.required > memory.tables + memory.slots - 2**24
    assert memory.required > memory.available
    assert 0.95 < memory.available / memory.capacity < 1.05
    assert "RESOURCE_EXHAUSTED" in report.refusal
    assert "DOES NOT FIT: needs " in compile_report.format_report(report)
    (row,) = compile_report.format_comparison([report]).splitlines()[2:]
    assert " NO " in row
    assert json.dumps(report.to_json())


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_several_slices():
    report = report_on("synthetic", "v5e:2x2", num_slices=2)
    assert (report.num_slices, report.num_devices) == (2, 8)
    check_sums(report.traffic)
    assert report.traffic.total.dcn_bytes > 0
    assert report.floor.dcn_bytes > report.floor.ici_bytes
    assert "2 slices of v5e:2x2" in compile_report.format_report(report)


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_other_compiler_options():
    usual = report_on("synthetic", "v6e:2x2")
    scatters = "xla_tpu_enable_offloading_scatter_to_sparsecore"
    without = report_on("synthetic", "v6e:2x2", **{scatters: "false"})
    assert "scatter" in {o.operation_class for o in usual.traffic.sparse_core}
    assert "scatter" not in {o.operation_class for o in without.traffic.sparse_core}
    before, after = (
        report.to_json()["hardware"]["compiler_options"] for report in (usual, without)
    )
    assert after == before | {scatters: "false"} != before


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"xla_tpu_nothing": "true"}, "No such compile option: 'xla_tpu_nothing'"),
        ({"xla_tpu_scoped_vmem_limit_kib": "much"}, "Failed to parse 'much'"),
    ],
)
def test_options_that_xla_does_not_know(option, message):
    with pytest.raises(ValueError, match=f"compiler_options must be known.*{message}"):
        report_on("synthetic", "v5e:2x2", **option)


def test_no_options_off_tpu():
    config = load_config("synthetic")
    data = config.data.outline(batch_size=config.batch_size, seed=0)
    with pytest.raises(ValueError, match="compiler_options must be empty on cpu"):
        make_run_plan(config, data, mesh_of(2), compiler_options={"a": "b"})


@pytest.mark.parametrize("name", ["synthetic", "dlrm"])
def test_an_outline_has_the_shapes_of_the_data(name):
    config = apply_overrides(load_config(name), ["batch_size=60"])
    shapes = []
    for data in (
        config.data.open(None, batch_size=60, seed=1),
        config.data.outline(batch_size=60, seed=1),
    ):
        plan = make_run_plan(config, data, mesh_of(3))
        batch = compile_report.abstract_batch(
            prepare_batch(data.train_batch(0), plan), plan
        )
        leaves, tree = jax.tree.flatten(batch)
        tables = {table.name: table.config for s in plan.stacks for table in s.tables}
        sizes = {n: (t.vocabulary_size, t.dim) for n, t in tables.items()}
        shapes.append((tree, [(x.shape, x.dtype) for x in leaves], sizes))
    assert shapes[0] == shapes[1]
