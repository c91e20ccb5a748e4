"""Exchange and step of `te.HostRows`, compiled: in place, and rows on SparseCore.

Nothing is allocated: tables are shapes only, and the rows on the host are not there.
"""

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.compiled.functional_step import abstract_state, compile_functional_step
from tests.compiled.test_train_step import TOPOLOGIES, WITH_SPARSE_CORE
from tests.conftest import mesh_of
from tests.tiers import quick_cases
from tpu_embedding.host_rows.exchange import swap_program
from tpu_embedding.host_rows.messages import exchange_program
from tpu_embedding.host_rows.records import columns_of
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tools import compile_report
from tpu_embedding.update.state import slots_of

# More than the 128 MiB of VMEM of a v5e or v6e; a smaller cache XLA may move there.
CACHE_LINES = 300_000
ROWS_PER_DEVICE = 100_000_000
"""More than the elements of a cache, so that copies of the map are seen as well."""

EXCHANGE_ROWS = 8192
IDS_PER_SAMPLE = 8
BATCH_PER_DEVICE = 4096
RULES = {
    "adagrad": te.optimizers.adagrad(0.1),
    "lazy_adam": te.optimizers.lazy_adam(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "sgd": te.optimizers.sgd(0.1),
    "adagrad_bfloat16": te.optimizers.adagrad(0.1),
}


def make_plans(mesh, dim, rule, rows_per_device=ROWS_PER_DEVICE):
    """Returns the plan of a table on the host, and of one of the cache's size."""
    dtype = "bfloat16" if rule.endswith("bfloat16") else "float32"
    rows_per_line = 1 if mesh.devices.flat[0].platform == "cpu" else max(1, 128 // dim)
    if dtype == "bfloat16":
        rows_per_line *= 2
    cache_rows = CACHE_LINES * rows_per_line * mesh.size

    def plan_of(num_rows, placement):
        table = te.TableConfig(
            vocabulary_size=num_rows,
            dim=dim,
            dtype=dtype,
            combiner="sum",
            name="user",
            placement=placement,
        )
        feature = te.FeatureConfig(table=table)
        return te.make_plan(feature, mesh, optimizer=RULES[rule])

    on_host = plan_of(rows_per_device * mesh.size, te.HostRows(cache_rows=cache_rows))
    return on_host, plan_of(cache_rows, None)


def compile_exchange(plan):
    (stack,) = plan.stacks
    tables, slots = abstract_state(plan)
    table, slots = tables[stack.name], slots_of(slots[stack.name])
    words = columns_of(stack)[-1].stop
    size = plan.num_shards * EXCHANGE_ROWS
    sharding = plan.rows_sharding(stack)
    moves = jax.ShapeDtypeStruct((3 * size,), jnp.int32, sharding=sharding)
    records = jax.ShapeDtypeStruct((size, words), jnp.uint32, sharding=sharding)
    program = swap_program(plan.hardware)
    return program.lower(table, slots, moves, records, plan).compile()


def compile_step(plan):
    shape = (plan.num_shards * BATCH_PER_DEVICE, IDS_PER_SAMPLE)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    return compile_functional_step(plan, ids, jnp.tanh)


def bytes_of_rows(plan):
    """Returns the bytes per device of cache, slot variables and map."""
    trees = jax.tree.leaves(
        abstract_state(plan), is_leaf=lambda leaf: isinstance(leaf, PackedRows)
    )
    arrays = jax.tree.leaves([x for x in trees if isinstance(x, PackedRows)])
    return sum(x.size * x.dtype.itemsize for x in arrays) // plan.num_shards


def check(compiled, on_host, cache):
    """Asserts what holds for both programs on every device; returns the report."""
    # The report takes the sizes of arrays from the plan of the cache.
    report = compile_report.inspect_program(compiled, cache)
    assert report.table_sized_copies == ()
    assert report.table_sized_passes == ()
    assert report.table_sized_all_gathers == ()
    assert report.sparse_core_relayouts == 0
    assert -(2**12) <= report.alias_bytes - bytes_of_rows(on_host) < 64 * 1024
    return report


def check_exchange(on_host, cache):
    report = check(compile_exchange(on_host), on_host, cache)
    # They grow with the rows of an exchange, not with the cache or the map.
    assert report.temporary_bytes < 72e6
    assert report.all_to_alls == 0
    if on_host.hardware.name in WITH_SPARSE_CORE:
        assert report.sparse_core_gathers > 0
        assert report.sparse_core_scatters > 0


def check_step(on_host, cache):
    report = check(compile_step(on_host), on_host, cache)
    without_map = compile_report.inspect_program(compile_step(cache), cache)
    # XLA keeps at most three more buffers of rows at a time.
    lanes = max(128, on_host.stacks[0].layout.lanes_per_line)
    rows_bytes = 4 * lanes * BATCH_PER_DEVICE * IDS_PER_SAMPLE
    more_bytes = report.temporary_bytes - without_map.temporary_bytes
    assert more_bytes < 3 * rows_bytes + 4e6
    assert report.all_to_alls == without_map.all_to_alls
    assert report.sparse_core_scatters == without_map.sparse_core_scatters
    more_gathers = report.sparse_core_gathers - without_map.sparse_core_gathers
    # Lookup and update read the map once each, and once in the loops of later rounds.
    map_reads = 2 if on_host.num_shards == 1 else 4
    has_sparse_core = on_host.hardware.name in WITH_SPARSE_CORE
    assert more_gathers == (map_reads if has_sparse_core else 0)


EXCHANGES = [
    ("v6e", 32, "adagrad"),
    ("v5e", 8, "lazy_adam"),
    ("v5p", 8, "sgd"),
    ("v5p", 128, "rowwise_adagrad"),
    ("v6e", 128, "rowwise_adagrad"),
    ("v6e", 200, "adagrad"),
    ("tpu7x", 32, "lazy_adam"),
    ("v5p", 32, "adagrad_bfloat16"),
]


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("generation", "dim", "rule"),
    [*quick_cases(EXCHANGES[:3], every_case=True), *quick_cases(EXCHANGES[3:])],
)
def test_an_exchange_is_in_place_on_tpu(generation, dim, rule):
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    check_exchange(*make_plans(mesh, dim, rule))


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_a_step_on_one_chip_is_in_place():
    devices = compile_report.topology_mesh(TOPOLOGIES["v6e"])
    mesh = jax.sharding.Mesh(devices.devices.reshape(-1)[:1], devices.axis_names)
    check_step(*make_plans(mesh, 128, "sgd"))


@pytest.mark.parametrize(
    ("num_devices", "rule"),
    quick_cases(
        [(1, "lazy_adam"), (8, "rowwise_adagrad"), (3, "adagrad_bfloat16")],
    ),
)
def test_programs_for_the_cpu_are_in_place(num_devices, rule):
    on_host, cache = make_plans(mesh_of(num_devices), 16, rule)
    check_exchange(on_host, cache)
    check_step(on_host, cache)


@pytest.mark.parametrize("generation", quick_cases(TOPOLOGIES, "v6e"))
def test_messages(generation):
    """One exchange, and no more memory than what is sent and received."""
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    plan, _ = make_plans(mesh, 32, "sgd")
    num_words = 1 << 14
    words = jax.ShapeDtypeStruct(
        (mesh.size**2, num_words), jnp.int32, sharding=plan.batch_sharding
    )
    compiled = exchange_program(plan).lower(words).compile()
    assert compiled.as_text().count(" all-to-all") >= 1
    assert "all-gather" not in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 2 * 4 * mesh.size * num_words
