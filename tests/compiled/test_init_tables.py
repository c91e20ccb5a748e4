"""Initial values compiled for TPUs: temporaries are slabs, and nothing is copied."""

import jax
import optax
import pytest

import tpu_embedding as te
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.hlo import inspect_program
from tpu_embedding.tools.compile_report.topology import abstract_arrays, topology_mesh
from tpu_embedding.tools.train import load_config
from tpu_embedding.tools.train.run_steps import make_run_plan

pytestmark = pytest.mark.tpu_compiler

FEW_BYTES = 2**20
"""Temporaries that the smallest slabs need, however small the tables are."""


def compiled_init(plan):
    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=plan.replicated)
    compiled = jax.jit(te.functional.init_tables).lower(plan, key).compile()
    tables = jax.eval_shape(te.functional.init_tables, plan, key)
    slots = (
        jax.jit(te.functional.init_slots)
        .lower(abstract_arrays(tables, plan), plan)
        .compile()
    )
    return compiled, slots


KEY = jax.random.key(0)
SLOTS = slice(1, None)
"""Of `compiled_init`. XLA stages a table of 20 MB in VMEM, which is no copy in HBM."""


def assert_bounded(plan, programs=slice(None), share=0.02):
    for compiled in compiled_init(plan)[programs]:
        report = inspect_program(compiled, plan)
        allowed = max(FEW_BYTES, min(2**28, share * plan.table_bytes_per_device))
        assert report.temporary_bytes <= allowed
        assert not report.table_sized_copies
        assert not report.table_sized_all_gathers


def plan_of(topology, vocabulary_size, dim, dtype="float32", optimizer=None, **options):
    table = te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, dtype=dtype, name="t"
    )
    return te.make_plan(
        te.FeatureConfig(table=table),
        topology_mesh(topology),
        optimizer=optimizer or te.optimizers.adagrad(0.1),
        **options,
    )


@pytest.mark.full
@pytest.mark.parametrize(("dim", "share"), [(32, 0.02), (200, 0.04)])
def test_a_table_that_is_dealt_to_sparse_cores_is_written_in_place(dim, share):
    """Slabs of rows that take two lines are held twice."""
    plan = plan_of("v6e:2x4", 20_000_000, dim, backend="sparse_core")
    assert plan.stacks[0].layout.banks == 2
    assert_bounded(plan, share=share)


CASES = {
    "4,096 chips, dim 8": ("v5p:16x16x16", 1_000_000_000, 8, "float32"),
    "narrow": ("v6e:2x2", 20_000_000, 32),
    "bfloat16": ("v5e:4x4", 40_000_000, 64, "bfloat16"),
    "one column": ("v5p:2x2x4", 400_000_000, 1, "float32"),
    "200 columns": ("v6e:4x4", 40_000_000, 200, "float32"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_temporaries_are_slabs(case):
    assert_bounded(plan_of(*CASES[case]))


@pytest.mark.full
@pytest.mark.parametrize("dim", [1, 32, 100])
def test_slots_of_rows_that_leave_the_last_line_unfilled(dim):
    plan = plan_of("v6e:2x2", 20_000_001, dim, optimizer=optax.adam(0.1))
    assert_bounded(plan, SLOTS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "topology"), [("two_tower", "v6e:4x4"), ("dlrm_dcnv2", "v5p:2x2x4")]
)
def test_the_big_configs_start_where_their_step_fits(name, topology):
    config = load_config(name)
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    assert_bounded(make_run_plan(config, data, compile_report.topology_mesh(topology)))
