"""The traffic model, on programs whose traffic is known by hand.

Small programs are compiled for real topologies, and pieces of HLO text cover what a
compiler does only now and then.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.conftest import needs_kernels
from tests.tiers import matrix, quick_cases
from tpu_embedding.plan.shard_map import DENSE_SCOPE
from tpu_embedding.rows.kernels.row_kernels import add_rows, read_rows
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.cost import program_cost, total
from tpu_embedding.tools.compile_report.hlo import parse_module

ROWS = 400_000  # 200 MB: too much for VMEM
IDS = 8192
ROW_BYTES = 4 * 128
MEBIBYTE = 2**20

OFFLOAD_GATHERS = {"xla_tpu_offload_gather_to_sparsecore": "true"}
OFFLOAD_SCATTERS = {"xla_tpu_enable_offloading_scatter_to_sparsecore": "true"}
SHARDED = PartitionSpec("shard")
WHOLE = PartitionSpec()


def cost_of(function, *arguments, topology="v5e:2x2", donate=(), mesh=None, **options):
    """Compiles for a topology; arguments are (shape, dtype) or (shape, dtype, spec)."""
    mesh = mesh or compile_report.topology_mesh(topology)
    structs = [
        jax.ShapeDtypeStruct(
            shape, dtype, sharding=NamedSharding(mesh, spec[0] if spec else WHOLE)
        )
        for shape, dtype, *spec in arguments
    ]
    jitted = jax.jit(function, donate_argnums=donate, **options)
    text = jitted.lower(*structs).compile().as_text()
    return program_cost(parse_module(text))


def over_shards(function, mesh, in_spec=SHARDED, out_spec=SHARDED):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False
    )


def of_class(cost, name):
    return [o for o in cost.operations if o.operation_class == name]


def bytes_of_class(cost, name):
    return total(of_class(cost, name)).hbm_bytes


def gather(table, ids):
    return table.at[ids].get(mode="promise_in_bounds")


def add(table, ids, rows):
    return table.at[ids].add(rows, mode="drop")


def put(table, ids, rows):
    return table.at[ids].set(rows, mode="drop", unique_indices=True)


TABLE = ((ROWS, 128), jnp.float32)
ID_ARRAY = ((IDS,), jnp.int32)
ROW_ARRAY = ((IDS, 128), jnp.float32)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v5e:2x2", {}),
        ("v5p:2x2x1", OFFLOAD_GATHERS),
        pytest.param("tpu7x:2x2x1", OFFLOAD_GATHERS, marks=pytest.mark.full),
    ],
)
def test_gather_moves_the_rows_asked_for(topology, options):
    cost = cost_of(gather, TABLE, ID_ARRAY, topology=topology, compiler_options=options)
    rows = IDS * ROW_BYTES
    # Read, written, and at most the ids beside it.
    assert 2 * rows <= bytes_of_class(cost, "gather") <= 2 * rows + 4 * IDS
    assert total(cost.operations).hbm_bytes < 2.1 * rows
    unit = "SparseCore" if options else "TensorCore"
    assert {o.unit for o in of_class(cost, "gather")} == {unit}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v5e:2x2", {}),
        pytest.param("v5p:2x2x1", {}, marks=pytest.mark.full),
        ("v5p:2x2x1", OFFLOAD_SCATTERS),
    ],
)
def test_scatter_add_reads_and_writes(topology, options):
    cost = cost_of(
        *(add, TABLE, ID_ARRAY, ROW_ARRAY),
        topology=topology,
        donate=0,
        compiler_options=options,
    )
    rows = IDS * ROW_BYTES
    # Values in, rows in and out, and at most two arrays of ids.
    assert 3 * rows <= bytes_of_class(cost, "scatter") <= 3 * rows + 8 * IDS
    assert total(cost.operations).hbm_bytes < 3.2 * rows
    unit = "SparseCore" if options else "TensorCore"
    assert {o.unit for o in of_class(cost, "scatter")} == {unit}


@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "dim"),
    quick_cases(
        matrix(["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"], [8, 32, 128, 256]),
        "v5p:2x2x1-256",
        "v6e:2x2-32",
    ),
)
def test_kernels_move_rows_and_no_lines(topology, dim):
    def read_and_add(lines, ids, additions):
        (rows,) = read_rows(lines, ids, dim, "sparse_core")
        # All reading comes before any writing.
        lines, rows = jax.lax.optimization_barrier((lines, rows))
        return add_rows(lines, ids, additions, dim, "sparse_core"), rows

    mesh = compile_report.topology_mesh(topology)
    lanes = max(128, dim)
    cost = cost_of(
        over_shards(read_and_add, mesh),
        ((mesh.size * ROWS, lanes), jnp.float32, SHARDED),
        ((mesh.size * IDS,), jnp.int32, SHARDED),
        ((mesh.size * IDS * dim // lanes, lanes), jnp.float32, SHARDED),
        mesh=mesh,
        donate=0,
    )
    of_row, anywhere = 4 * dim, max(4 * dim, 64)
    of_id = 4 * lanes // 128
    read, added = of_class(cost, "custom call")
    assert read.traffic.hbm_bytes == IDS * (of_id + anywhere + of_row)
    assert added.traffic.hbm_bytes == IDS * (of_id + of_row + 2 * anywhere)
    assert {read.unit, added.unit} == {"SparseCore"}
    # Nothing else moves: lines are rows as they lie in memory, and are changed there.
    # (But a vector of zeros is made, and for wide rows the ids of their parts.)
    moved = read.traffic.hbm_bytes + added.traffic.hbm_bytes
    made = total(cost.operations).hbm_bytes - moved
    assert made < (1000 if dim <= 128 else 0.2 * IDS * of_row)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "topology", ["v5p:2x2x1", pytest.param("tpu7x:2x2x1", marks=pytest.mark.full)]
)
def test_single_values_count_as_what_memory_moves_at_once(topology):
    def add_sorted(table, ids, values):
        return table.at[ids].add(values, mode="drop", indices_are_sorted=True)

    table = ((ROWS * 128,), jnp.float32)
    values = ((IDS,), jnp.float32)
    read = cost_of(
        gather, table, ID_ARRAY, topology=topology, compiler_options=OFFLOAD_GATHERS
    )
    added = cost_of(
        *(add_sorted, table, ID_ARRAY, values),
        topology=topology,
        donate=0,
        compiler_options=OFFLOAD_SCATTERS,
    )
    # 64 bytes for each id, in or in and out, beside 4 of each id and value.
    assert 68 * IDS <= bytes_of_class(read, "gather") <= 72 * IDS
    assert 132 * IDS <= bytes_of_class(added, "scatter") <= 136 * IDS
    for cost, name in ((read, "gather"), (added, "scatter")):
        assert {o.unit for o in of_class(cost, name)} == {"SparseCore"}
    assert not of_class(added, "sort")


@pytest.mark.tpu_compiler
def test_overwriting_scatter_reads_no_old_rows():
    cost = cost_of(put, TABLE, ID_ARRAY, ROW_ARRAY, donate=0)
    rows = IDS * ROW_BYTES
    assert 2 * rows <= bytes_of_class(cost, "scatter") <= 2 * rows + 4 * IDS


@pytest.mark.tpu_compiler
def test_without_donation_the_table_is_copied():
    cost = cost_of(add, TABLE, ID_ARRAY, ROW_ARRAY)
    copied = [o for o in of_class(cost, "copy") if o.dims == (ROWS, 128)]
    assert total(copied).hbm_bytes == 2 * ROWS * ROW_BYTES


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "topology", [pytest.param("v5e:2x2", marks=pytest.mark.full), "v5p:2x2x1"]
)
def test_a_narrow_table_is_copied_for_its_layout(topology):
    """It lies by columns; by rows, as a gather wants it, it takes twice the bytes."""
    dims = (2_000_000, 64)
    cost = cost_of(gather, (dims, jnp.float32), ID_ARRAY, topology=topology)
    copied = [o for o in of_class(cost, "copy") if o.dims == dims]
    assert total(copied).hbm_bytes == (1 + 2) * 4 * 2_000_000 * 64


@pytest.mark.tpu_compiler
def test_slices_of_a_donated_array():
    def update(table, i):
        rows = jax.lax.dynamic_slice(table, (i, 0), (64, 128))
        return jax.lax.dynamic_update_slice(table, jnp.sin(rows), (i, 0))

    cost = cost_of(update, TABLE, ((), jnp.int32), donate=0)
    assert 2 * 64 * ROW_BYTES <= total(cost.operations).hbm_bytes < 4 * 64 * ROW_BYTES


ROWS_PER_DEVICE = 2**18
LOCAL_BYTES = ROWS_PER_DEVICE * ROW_BYTES
LOCAL = ((4 * ROWS_PER_DEVICE, 128), jnp.float32, SHARDED)

COLLECTIVES = {
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x, "shard", 0, 0, tiled=True),
        SHARDED,
        "all-to-all",
        3 / 4,
    ),
    "psum": (lambda x: jax.lax.psum(x, "shard"), WHOLE, "all-reduce", 2 * 3 / 4),
    "all-gather": (
        lambda x: jax.lax.all_gather(x, "shard", tiled=True),
        WHOLE,
        "other collective",
        3,
    ),
    "permute": (
        lambda x: jax.lax.ppermute(x, "shard", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        SHARDED,
        "other collective",
        1,
    ),
}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    function, out_spec, operation_class, factor = COLLECTIVES[name]
    mesh = compile_report.topology_mesh("v5p:2x2x1")
    cost = cost_of(over_shards(function, mesh, out_spec=out_spec), LOCAL, mesh=mesh)
    operations = of_class(cost, operation_class)
    assert total(operations).ici_bytes == factor * LOCAL_BYTES
    assert total(cost.operations).ici_bytes == factor * LOCAL_BYTES
    results = 4 if name == "all-gather" else 1
    assert total(operations).hbm_bytes == (1 + results) * LOCAL_BYTES


@pytest.mark.tpu_compiler
def test_reduce_scatter():
    mesh = compile_report.topology_mesh("v5p:2x2x1")
    function = over_shards(lambda x: jax.lax.psum_scatter(x, "shard", tiled=True), mesh)
    cost = cost_of(function, LOCAL, mesh=mesh)
    # XLA pads the parts, and passes the padding on to the neighbour.
    expected = pytest.approx(3 / 4 * LOCAL_BYTES, rel=0.01)
    assert total(cost.operations).ici_bytes == expected


@pytest.mark.tpu_compiler
def test_a_group_is_a_part_of_the_mesh():
    mesh = compile_report.topology_mesh("v5p:2x2x1", ("a", "b"), (2, 2))
    spec = PartitionSpec(("a", "b"))
    function = over_shards(
        lambda x: jax.lax.psum(x, "b"), mesh, spec, PartitionSpec("a")
    )
    cost = cost_of(function, (*LOCAL[:2], spec), mesh=mesh)
    assert total(cost.operations).ici_bytes == 2 * 1 / 2 * LOCAL_BYTES


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_sort():
    num_keys = 2**24
    array = ((num_keys,), jnp.int32)

    def sort(keys, values):
        return jax.lax.sort((keys, values), num_keys=1, is_stable=False)

    cost = cost_of(sort, array, array, topology="v5p:2x2x1")
    assert bytes_of_class(cost, "sort") == 2 * 2 * 4 * num_keys


@pytest.mark.tpu_compiler
def test_matmul():
    a, b = ((16384, 8192), jnp.bfloat16), ((8192, 32768), jnp.bfloat16)
    cost = cost_of(jnp.matmul, a, b)
    expected = 2 * (16384 * 8192 + 8192 * 32768 + 16384 * 32768)
    assert bytes_of_class(cost, "matmul") == expected
    assert total(cost.operations).hbm_bytes == expected


@pytest.mark.tpu_compiler
def test_elementwise_addition():
    array = ((2**20, 128), jnp.float32)
    cost = cost_of(jnp.add, array, array)
    assert bytes_of_class(cost, "elementwise") == 3 * 512 * MEBIBYTE
    assert total(cost.operations).hbm_bytes == 3 * 512 * MEBIBYTE


@pytest.mark.tpu_compiler
def test_a_loop_counts_its_turns():
    def run(x):
        return jax.lax.fori_loop(0, 10, lambda i, x: jnp.sin(x) * x, x)

    cost = cost_of(run, ((2**20, 128), jnp.float32), donate=0)
    assert bytes_of_class(cost, "elementwise") == pytest.approx(
        10 * 2 * 512 * MEBIBYTE, rel=1e-6
    )
    assert cost.loops == ()


@pytest.mark.tpu_compiler
def test_a_loop_that_data_decide_on_is_listed_only():
    def run(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.sin(x) * x, x)

    cost = cost_of(run, ((2**20, 128), jnp.float32), donate=0)
    assert total(cost.operations).hbm_bytes < MEBIBYTE
    (loop,) = cost.loops
    assert total(loop.operations).hbm_bytes == pytest.approx(
        2 * 512 * MEBIBYTE, rel=1e-4
    )
    assert loop.source.startswith(__file__)
    assert "while" in loop.op_name


# Pieces of text. An array of [1024, 128] float32 is 512 KiB.
ARRAY = "f32[1024,128]{1,0:T(8,128)}"
ARRAY_BYTES = 1024 * 512


def program(body, before=""):
    return program_cost(
        parse_module(
            f"""{before}
ENTRY %main (a: f32[1024,128], i: s32[64]) -> f32[] {{
  %a = {ARRAY} parameter(0), metadata={{op_name="state['tables']"}}
  %i = s32[64]{{0:T(128)}} parameter(1)
  %zero = s32[] constant(0)
  {body}
}}
"""
        )
    )


TEXTS = {
    "in HBM": (f"ROOT %r = {ARRAY} negate(%a)", 2),
    "to VMEM": ("ROOT %r = f32[1024,128]{1,0:T(8,128)S(1)} negate(%a)", 1),
    "copy": (f"ROOT %r = {ARRAY} copy(%a)", 2),
    "copy to VMEM counts once": (
        "%s = (f32[1024,128]{1,0:T(8,128)S(1)}, f32[1024,128]{1,0:T(8,128)}, "
        "u32[]{:S(2)}) copy-start(%a)\n"
        "  ROOT %r = f32[1024,128]{1,0:T(8,128)S(1)} copy-done(%s)",
        1,
    ),
    "from the host counts once": (
        "%h = f32[1024,128]{1,0:T(8,128)S(5)} bitcast(%a)\n"
        f"  ROOT %r = {ARRAY} negate(%h)",
        1,
    ),
    "slice to VMEM": (
        "%s = ((f32[1024,128]{1,0:T(8,128)}), f32[256,128]{1,0:T(8,128)S(1)}, "
        "s32[]{:S(2)}) slice-start(%a), slice={[0:256], [0:128]}\n"
        "  ROOT %r = f32[256,128]{1,0:T(8,128)S(1)} slice-done(%s)",
        1 / 4,
    ),
    "bitcast": (f"ROOT %r = {ARRAY} bitcast(%a)", 0),
    "buffer": (
        f'ROOT %r = {ARRAY} custom-call(), custom_call_target="AllocateBuffer"',
        0,
    ),
    "kernel": (
        f'ROOT %r = {ARRAY} custom-call(%a, %a), custom_call_target="mine"',
        3,
    ),
    "kernel that declares what it moves": (
        f'ROOT %r = {ARRAY} custom-call(%a), custom_call_target="tpu_custom_call", '
        'backend_config={"custom_call_config":{"body":"TUz=","cost_estimate":'
        '{"flops":"0","bytes_accessed":"131072"}}}',
        1 / 4,
    ),
    "update of a slice": (
        "%u = f32[8,128]{1,0:T(8,128)} bitcast(%a)\n"
        f"  ROOT %r = {ARRAY} dynamic-update-slice(%a, %u, %zero, %zero)",
        2 / 128,
    ),
    "call": (f"ROOT %r = {ARRAY} call(%a), to_apply=%negated", 2),
    "async call": (
        f"%s = (({ARRAY}), {ARRAY}, u32[]) async-start(%a), calls=%negated\n"
        f"  ROOT %r = {ARRAY} async-done(%s)",
        2,
    ),
    "the branch that moves most": (
        f"ROOT %r = {ARRAY} conditional(%zero, %a, %a), "
        "branch_computations={%negated, %twice}",
        4,
    ),
    "true and false": (
        f"ROOT %r = {ARRAY} conditional(%zero, %a, %a), "
        "true_computation=%twice, false_computation=%negated",
        4,
    ),
}

COMPUTATIONS = f"""
%negated (x: f32[1024,128]) -> f32[1024,128] {{
  %x = {ARRAY} parameter(0)
  ROOT %y = {ARRAY} negate(%x)
}}

%twice (x.1: f32[1024,128]) -> f32[1024,128] {{
  %x.1 = {ARRAY} parameter(0)
  %y.1 = {ARRAY} negate(%x.1)
  ROOT %z.1 = {ARRAY} negate(%y.1)
}}
"""


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    body, arrays = TEXTS[name]
    cost = program(body, COMPUTATIONS)
    assert total(cost.operations).hbm_bytes == pytest.approx(
        arrays * ARRAY_BYTES, abs=16
    )
    assert total(cost.operations).ici_bytes == 0


FUSIONS = {
    # Of each: what the fusion does with an operand of 1024 rows, and rows moved.
    "uses all": ([f"ROOT %r = {ARRAY} negate(%p)"], ARRAY, 2048),
    "gathers": (
        [
            "%rows = f32[64,128]{1,0:T(8,128)} gather(%p, %q), offset_dims={1}, "
            "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
            "slice_sizes={1,128}",
            "ROOT %r = f32[64,128]{1,0:T(8,128)} negate(%rows)",
        ],
        "f32[64,128]{1,0:T(8,128)}",
        128,
    ),
    "gathers through a bitcast": (
        [
            f"%b = {ARRAY} bitcast(%p)",
            "ROOT %rows = f32[64,128]{1,0:T(8,128)} gather(%b, %q), offset_dims={1}, "
            "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
            "slice_sizes={1,128}",
        ],
        "f32[64,128]{1,0:T(8,128)}",
        128,
    ),
    "gathers, and uses all": (
        [
            "%rows = f32[64,128]{1,0:T(8,128)} gather(%p, %q), offset_dims={1}, "
            "collapsed_slice_dims={0}, start_index_map={0}, index_vector_dim=1, "
            "slice_sizes={1,128}",
            "%sum = f32[64,128]{1,0:T(8,128)} reduce(%p), to_apply=%add",
            "ROOT %r = f32[64,128]{1,0:T(8,128)} add(%rows, %sum)",
        ],
        "f32[64,128]{1,0:T(8,128)}",
        1024 + 64,
    ),
    "takes overlapping slices": (
        [
            "%s = f32[768,128]{1,0:T(8,128)} slice(%p), slice={[0:768], [0:128]}",
            "%t = f32[768,128]{1,0:T(8,128)} slice(%p), slice={[256:1024], [0:128]}",
            "ROOT %r = f32[768,128]{1,0:T(8,128)} add(%s, %t)",
        ],
        "f32[768,128]{1,0:T(8,128)}",
        1024 + 768,
    ),
    "adds rows": (
        [
            "%zero.1 = f32[] constant(0)",
            "%u = f32[64,128]{1,0:T(8,128)} broadcast(%zero.1), dimensions={}",
            f"ROOT %r = {ARRAY} scatter(%p, %q, %u), update_window_dims={{1}}, "
            "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
            "index_vector_dim=1, to_apply=%add",
        ],
        ARRAY,
        128,
    ),
    "puts rows": (
        [
            "%zero.1 = f32[] constant(0)",
            "%u = f32[64,128]{1,0:T(8,128)} broadcast(%zero.1), dimensions={}",
            f"ROOT %r = {ARRAY} scatter(%p, %q, %u), update_window_dims={{1}}, "
            "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
            "index_vector_dim=1, to_apply=%second",
        ],
        ARRAY,
        64,
    ),
    "adds to a new array": (
        [
            "%zero.1 = f32[] constant(0)",
            f"%new = {ARRAY} broadcast(%zero.1), dimensions={{}}",
            "%u = f32[64,128]{1,0:T(8,128)} slice(%p), slice={[0:64], [0:128]}",
            f"ROOT %r = {ARRAY} scatter(%new, %q, %u), update_window_dims={{1}}, "
            "inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
            "index_vector_dim=1, to_apply=%add",
        ],
        ARRAY,
        1024 + 64,
    ),
    "replaces a slice": (
        [
            "%zero.1 = s32[] constant(0)",
            "%old = f32[8,128]{1,0:T(8,128)} dynamic-slice(%p, %zero.1, %zero.1), "
            "dynamic_slice_sizes={8,128}",
            "%u = f32[8,128]{1,0:T(8,128)} negate(%old)",
            f"ROOT %r = {ARRAY} dynamic-update-slice(%p, %u, %zero.1, %zero.1)",
        ],
        ARRAY,
        16,
    ),
    "contains a fusion": (
        ["ROOT %r = f32[64,128]{1,0:T(8,128)} fusion(%p, %q), calls=%inner"],
        "f32[64,128]{1,0:T(8,128)}",
        128,
    ),
}

COMBINERS = f"""
%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum.1 = f32[] add(%x, %y)
}}

%second (x.2: f32[], y.2: f32[]) -> f32[] {{
  %x.2 = f32[] parameter(0)
  ROOT %y.2 = f32[] parameter(1)
}}

%inner (v: f32[1024,128], w: s32[64]) -> f32[64,128] {{
  %v = {ARRAY} parameter(0)
  %w = s32[64]{{0:T(128)}} parameter(1)
  ROOT %g = f32[64,128]{{1,0:T(8,128)}} gather(%v, %w), offset_dims={{1}}, \
collapsed_slice_dims={{0}}, start_index_map={{0}}, index_vector_dim=1, \
slice_sizes={{1,128}}
}}
"""


@pytest.mark.parametrize("name", FUSIONS)
def test_fusions(name):
    lines, result, rows = FUSIONS[name]
    inside = "\n  ".join(lines)
    fused = f"""{COMBINERS}
%fused (p: f32[1024,128], q: s32[64]) -> f32[] {{
  %p = {ARRAY} parameter(0)
  %q = s32[64]{{0:T(128)}} parameter(1)
  {inside}
}}
"""
    cost = program(
        f"ROOT %f = {result} fusion(%a, %i), kind=kLoop, calls=%fused", fused
    )
    uses_ids = any("%q" in line for line in lines)
    id_bytes = 4 * 128 if uses_ids else 0  # 64 of them, in a tile of 128
    assert total(cost.operations).hbm_bytes == rows * ROW_BYTES + id_bytes


def test_a_fusion_with_several_results():
    fused = f"""
%fused (p: f32[1024,128]) -> (f32[1024,128], f32[8,128]) {{
  %p = {ARRAY} parameter(0)
  %zero.1 = s32[] constant(0)
  %u = f32[8,128]{{1,0:T(8,128)}} slice(%p), slice={{[0:8], [0:128]}}
  %put = {ARRAY} dynamic-update-slice(%p, %u, %zero.1, %zero.1)
  ROOT %t = ({ARRAY}, f32[8,128]{{1,0:T(8,128)}}) tuple(%put, %u)
}}
"""
    cost = program(
        f"ROOT %f = ({ARRAY}, f32[8,128]{{1,0:T(8,128)}}) fusion(%a), calls=%fused",
        fused,
    )
    assert total(cost.operations).hbm_bytes == 3 * 8 * ROW_BYTES


GROUPS = {
    "{{0,1,2,3,4,5,6,7}}": 8,
    "{{0,1},{2,3}}": 2,
    "[2,4]<=[8]": 4,
    "[4,2]<=[2,4]T(1,0)": 2,
    "mesh['x'=8] {'x'}": 8,
    "mesh['a'=2,'b'=4] {'b'}": 4,
    "mesh['a'=2,'b'=4] {'a','b'}": 8,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups):
    cost = program(
        f"ROOT %r = {ARRAY} all-to-all(%a), channel_id=1, replica_groups={groups}, "
        "dimensions={0}"
    )
    n = GROUPS[groups]
    assert total(cost.operations).ici_bytes == (n - 1) / n * ARRAY_BYTES


def test_transfers_between_slices():
    cost = program(
        "%t = token[] after-all()\n"
        f"  %s = ({ARRAY}, u32[]{{:S(2)}}, token[]) send(%a, %t), channel_id=1\n"
        f"  %r = ({ARRAY}, u32[]{{:S(2)}}, token[]) recv(%t), channel_id=2\n"
        "  %d = token[] send-done(%s)\n"
        f"  ROOT %e = ({ARRAY}, token[]) recv-done(%r)"
    )
    moved = total(of_class(cost, "between slices"))
    assert (moved.dcn_bytes, moved.ici_bytes) == (ARRAY_BYTES, 0)
    assert moved.hbm_bytes == 2 * ARRAY_BYTES


def test_parts():
    name = 'metadata={op_name="jit(step)/jit(apply_gradients)/shard_map/add"}'
    dense = 'metadata={op_name="jit(step)/jvp()/dot_general"}'
    model = f'metadata={{op_name="jit(step)/jvp({DENSE_SCOPE})/shard_map/while"}}'
    cost = program(
        f"%before = {ARRAY} copy(%a)\n"
        f"  %n = {ARRAY} negate(%before), {name}\n"
        f"  %after = {ARRAY} copy(%n)\n"
        f"  %d = {ARRAY} negate(%a), {dense}\n"
        f"  %m = {ARRAY} negate(%a), {model}\n"
        f'  %word = {ARRAY} negate(%a), metadata={{op_name="broadcast.1"}}\n'
        f"  ROOT %t = ({ARRAY}, {ARRAY}) tuple(%after, %d)"
    )
    assert {o.name: o.part for o in cost.operations} == {
        "before": "embedding",
        "n": "embedding",
        "after": "embedding",
        "d": "dense",
        "m": "dense",
        "word": "unattributed",
    }


def test_work_of_the_sparse_core_has_the_origin_of_its_caller():
    called = f"""
%moved (x: f32[1024,128]) -> f32[1024,128] {{
  %x = {ARRAY} parameter(0)
  ROOT %y = {ARRAY} copy(%x)
}}, execution_thread="sparsecore"
"""
    cost = program(
        f"%s = (({ARRAY}), {ARRAY}, u32[]) call-start(%a), "
        'async_execution_thread="sparsecore", to_apply=%moved, '
        'metadata={op_name="jit(step)/shard_map/gather" source_file="a.py" '
        "source_line=3}\n"
        f"  ROOT %r = {ARRAY} call-done(%s)",
        called,
    )
    (operation,) = cost.operations
    assert (operation.unit, operation.part) == ("SparseCore", "embedding")
    assert (operation.operation_class, operation.source) == ("copy", "a.py:3")
