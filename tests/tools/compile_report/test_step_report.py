"""Compile reports: of an own step on the CPU, and of configs by the command."""

import re
import types

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tools.train.runs import set_options
from tpu_embedding.hardware import hardware_by_name
from tpu_embedding.tools import cli, compile_report
from tpu_embedding.tools.compile_report.hlo import temporary_bytes
from tpu_embedding.tools.compile_report.step_report import refused_memory


def report_of_step(num_rows=1000, placement=None):
    """Returns the report of a step on two CPU devices."""
    table = te.TableConfig(
        vocabulary_size=num_rows, dim=16, name="table", placement=placement
    )
    config = {"f": te.FeatureConfig(table=table)}
    plan = te.make_plan(config, mesh_of(2), optimizer="adagrad")

    def step(state, batch):
        result = te.functional.lookup(state[0], batch, plan)
        gradients = te.functional.compute_gradients(
            result.routing, result.activations, plan
        )
        return te.functional.apply_gradients(*state, gradients, plan)

    tables = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda x: te.functional.init_slots(x, plan), tables)
    batch = {"f": jax.ShapeDtypeStruct((64,), jnp.int32)}
    arguments = (
        compile_report.abstract_arrays((tables, slots), plan),
        compile_report.abstract_batch(batch, plan),
    )
    step = jax.jit(step, donate_argnums=0)
    return compile_report.compile_report(step, arguments, plan, topology="laptop")


def test_an_own_step_on_the_cpu():
    report = report_of_step()
    assert report.memory.arguments >= 2 * 500 * 64 + 32 * 4
    assert report.memory.capacity is None and report.memory.fits
    assert report.accesses.table_sized_copies == ()
    assert report.accesses.sparse_core_gathers == 0
    assert report.accesses.all_to_alls >= 3
    assert "laptop: 2 devices" in compile_report.format_report(report)


@pytest.mark.full
def test_rows_on_the_host():
    """The cache and its map are counted, and updated without a copy."""
    report = report_of_step(200_000, te.HostRows(cache_rows=20_000))
    plan = report.plan
    cache, cached_map = 64 * 10_000, 4 * 100_000
    assert plan.table_bytes_per_device == cache + cached_map
    assert plan.slot_bytes_per_device == cache
    assert 0 <= report.memory.arguments - 2 * cache - cached_map < 1000
    assert 0 <= report.memory.arguments - report.memory.aliased < 1000
    assert report.accesses is not None
    assert report.accesses.table_sized_copies == ()
    text = compile_report.format_report(report)
    assert "24.41 MiB" in text and text.count("390.62 KiB") == 2


@pytest.mark.parametrize(
    ("temp", "peak", "expected"),
    [(700, 1500, 700), (100, 3000, 3000 - 1000 - (600 - 400)), (0, 0, 0)],
    ids=["temporaries", "peak: what SparseCores write", "nothing"],
)
def test_the_larger_of_temporaries_and_peak(temp, peak, expected):
    sizes = types.SimpleNamespace(
        temp_size_in_bytes=temp,
        peak_memory_in_bytes=peak,
        argument_size_in_bytes=1000,
        output_size_in_bytes=600,
        alias_size_in_bytes=400,
    )
    assert temporary_bytes(sizes) == expected


def test_rejections():
    v5e = hardware_by_name("v5e")
    text = "RESOURCE_EXHAUSTED: Program hbm requirement 20G: (20.00G) exceeds available"
    memory = refused_memory(f"{text} HBM (15.75G)", v5e)
    assert memory is not None and not memory.fits
    assert memory.required is None and memory.capacity == 16 * 2**30
    assert refused_memory("INVALID_ARGUMENT: HBM", v5e) is None


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_the_command(capsys):
    options = ["--topology", "v5e:2x2", "--slices", "2", "--set", "batch_size=64"]
    assert cli.main(["compile", "synthetic", *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"table-sized copies +0\n", out)


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
def test_a_step_that_does_not_fit(capsys):
    """Tables of 31 GB on one device of 16 GiB."""
    settings = ["data.num_users=60000000", "data.num_items=100", "batch_size=64"]
    settings += ["model.dim=128", "model.hidden_sizes=16", "model.output_dim=8"]
    options = ["--topology", "v5e:1x1", *set_options(settings)]
    assert cli.main(["compile", "two_tower", *options]) == 1
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().out
