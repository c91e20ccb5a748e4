"""The whole train step, compiled for every TPU generation and for the CPU.

The contract: table and slots are updated in place, nothing of their size is copied or
gathered, dims that pack exactly take no more than the logical bytes, and rows move on
SparseCore where there is one. Nothing is allocated: tables are shapes only.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.compiled.functional_step import compile_functional_step
from tests.conftest import mesh_of
from tests.tiers import full_cases, matrix, quick_cases, with_ids
from tpu_embedding.tools import compile_report

TOPOLOGIES = {
    "v5e": "v5e:2x4",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x4",
    "tpu7x": "tpu7x:2x2x1",
}
WITH_SPARSE_CORE = ("v5p", "v6e", "tpu7x")
DIMS = (1, 16, 100, 128, 200, 256)

# More than the 128 MiB of VMEM of a v5e or v6e; a smaller table XLA may move there.
LINES_PER_DEVICE = 300_000
BATCH = 2048


ADAGRAD = te.optimizers.adagrad(0.1)
REPRESENTATIVE = {
    "adagrad": ADAGRAD,
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adam": te.optimizers.adam(0.1),
    "every_row": te.optimizers.every_row(te.optimizers.adam(0.1)),
    "adafactor": te.optimizers.adafactor(0.1),
}
# One with slots of each kind: tests/optimizers has the others.
OTHERS = {
    "rowwise_every_row": te.optimizers.every_row(te.optimizers.rowwise_adagrad(0.1)),
    "adafactor_of_four_steps": te.optimizers.adafactor(
        0.1, gradient_accumulation_steps=4
    ),
    "adafactor_averages": te.optimizers.adafactor(0.1, use_ema=True),
    "clippy_adagrad": te.optimizers.clippy_adagrad(0.1),
    "adafactor_exact": te.optimizers.adafactor(0.1, mode="exact"),
    "bfloat16_slots": te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16),
    "lazy_adam": te.optimizers.lazy_adam(0.1, skipped_steps="catch_up"),
    "frequency_aware_adagrad": te.optimizers.frequency_aware_adagrad(0.1),
    "partial_rowwise_adam": te.optimizers.partial_rowwise_adam(0.1),
    "lamb": te.optimizers.lamb(0.1),
    "adagrad_momentum": te.optimizers.adagrad_momentum(0.1, momentum=0.9),
}


class Model(nnx.Module):
    """Two tables in one stack, looked up one-hot and multi-hot, and a linear layer."""

    def __init__(self, plan, dim, rngs):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.linear = nnx.Linear(2 * dim, 1, rngs=rngs)

    def __call__(self, features):
        activations = self.embedding(features)
        joined = jnp.concatenate([activations["one"], activations["many"]], axis=1)
        return self.linear(joined)[:, 0]


def squared_loss(model, features, labels):
    return jnp.mean((model(features) - labels) ** 2)


def linear_loss(model, features, labels):
    """Its derivative needs no activation: nothing orders update after lookup."""
    del labels
    return jnp.sum(sum(jax.tree.leaves(model.embedding(features))))


def make_plan(mesh, dim, optimizer, rows_per_line, **options):
    rows = LINES_PER_DEVICE * rows_per_line * mesh.size
    big = te.TableConfig(vocabulary_size=rows, dim=dim, combiner="sum", name="big")
    small = te.TableConfig(vocabulary_size=1000, dim=dim, combiner="mean", name="small")
    config = {"one": te.FeatureConfig(table=big), "many": te.FeatureConfig(table=small)}
    return te.make_plan(config, mesh, optimizer=optimizer, **options)


SKIPPED_STEPS = ["update_if", "apply_if_finite"]


def compile_step(plan, dim, loss_fn=squared_loss, batch_size=BATCH, skips="nothing"):
    def make():
        model, tx = Model(plan, dim, nnx.Rngs(0)), optax.sgd(0.1)
        if skips == "apply_if_finite":
            tx = optax.apply_if_finite(tx, 5)
        return model, te.Optimizer(model, tx)

    graph, state = nnx.split(nnx.eval_shape(make))
    features = {
        "one": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        "many": jax.ShapeDtypeStruct((batch_size, 4), jnp.int32),
    }
    labels = jax.ShapeDtypeStruct((batch_size,), jnp.float32)

    def step(state, features, labels):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = te.value_and_grad(loss_fn)(model, features, labels)

        def update(state):
            model, optimizer = nnx.merge(graph, state)
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer))

        if skips == "update_if":
            return te.gradients.update_if(
                te.gradients.all_finite(gradients), update, state
            ), loss
        return update(state), loss

    jitted = jax.jit(step, donate_argnums=0, compiler_options=plan.compiler_options)
    return jitted.lower(
        compile_report.abstract_arrays(state, plan),
        *compile_report.abstract_batch((features, labels), plan),
    ).compile()


def check(plan, compiled):
    """Asserts what holds for every device and dim; returns the report."""
    report = compile_report.inspect_program(compiled, plan)
    state_bytes = plan.table_bytes_per_device + plan.slot_bytes_per_device
    assert report.table_sized_copies == ()
    if not any(stack.optimizer.moves_every_row for stack in plan.trained_stacks):
        assert report.table_sized_passes == ()
    assert report.table_sized_all_gathers == ()
    assert report.sparse_core_relayouts == 0
    # The dense parameters are donated too; they are a few kilobytes. A flat array of
    # few values takes less than the whole tile that the plan counts.
    assert -(2**12) <= report.alias_bytes - state_bytes < 64 * 1024
    # Buffers grow with ids * dim, not with the table; a line has at least 128 lanes.
    ids_per_device = BATCH * 5 // plan.num_shards
    line_bytes = sum(4 * max(128, stack.layout.lanes_per_line) for stack in plan.stacks)
    assert report.temporary_bytes < 40 * ids_per_device * line_bytes + 2**24
    assert report.temporary_bytes < plan.table_bytes_per_device / 2
    return report


def steps():
    """Each dim on one generation; narrow and whole rows on the others."""
    for dim in DIMS:
        yield dim, "v5p"
    for dim in (16, 128):
        for generation in ("v5e", "v6e", "tpu7x"):
            yield dim, generation


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("dim", "generation"),
    quick_cases([pytest.param(*case) for case in steps()], "16-v5e", "16-v6e"),
)
def test_tpu_step_is_in_place(dim, generation):
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    plan = make_plan(mesh, dim, ADAGRAD, max(1, 128 // dim))
    compiled = compile_step(plan, dim)
    report, text = check(plan, compiled), compiled.as_text()
    cycles = compile_report.count_cycles(text)
    assert 0 < cycles.total < 700_000 and cycles.num_operations < 450
    # Ids and rows, gradients back; and the same in the loops of further rounds.
    assert report.all_to_alls == 3 + 2 + 2
    # The ends of the ranges of a round, also in both loops; all counts of the lookup.
    assert len(re.findall(r"= \(?s32.* all-reduce\(", text)) == 3 + 1
    if generation in WITH_SPARSE_CORE:
        assert report.sparse_core_scatters > 0
    assert (report.sparse_core_gathers > 0) == (generation in WITH_SPARSE_CORE)
    if 128 % dim == 0:
        rows = plan.stacks[0].num_rows / plan.num_shards
        logical_bytes = 2 * 4 * dim * rows
        assert report.argument_bytes < 1.02 * logical_bytes


WAYS_TO_UPDATE = [
    # So many rows that a slot of one value per row is larger than VMEM.
    ("rowwise_adagrad", "tpu7x", 128),
    # These differ in the loop of further rounds: on one device.
    ("adafactor", "v5p", 1),
    ("every_row", "v5p", 1),
    ("clippy_adagrad", "v5p", 1),
]


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "generation", "rows_per_line"), quick_cases(WAYS_TO_UPDATE)
)
def test_every_way_to_update_is_in_place_on_tpu(name, generation, rows_per_line):
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    plan = make_plan(mesh, 128, (REPRESENTATIVE | OTHERS)[name], rows_per_line)
    report = check(plan, compile_step(plan, 128))
    if name == "rowwise_adagrad":
        full = make_plan(mesh, 128, ADAGRAD, rows_per_line)
        full_bytes = full.table_bytes_per_device + full.slot_bytes_per_device
        assert report.argument_bytes < 0.51 * full_bytes


@pytest.mark.tpu_compiler
@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_is_in_place_on_tpu(name):
    """On one device and few ids, compiled in seconds: no exchange, one round."""
    devices = compile_report.topology_mesh(TOPOLOGIES["v5p"])
    mesh = jax.sharding.Mesh(devices.devices.reshape(-1)[:1], devices.axis_names)
    plan = make_plan(mesh, 128, OTHERS[name], 1)
    check(plan, compile_step(plan, 128, batch_size=256))


# One of each way to update a table.
ON_CPU = {
    **REPRESENTATIVE,
    "adafactor_exact": OTHERS["adafactor_exact"],
    "adafactor_of_four_steps": OTHERS["adafactor_of_four_steps"],
    "adafactor_averages": OTHERS["adafactor_averages"],
    "clippy_adagrad": OTHERS["clippy_adagrad"],
    "rowwise_every_row": OTHERS["rowwise_every_row"],
    "sequence": te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
}


@pytest.mark.parametrize(
    ("name", "num_devices", "capacity", "loss_fn"),
    quick_cases(
        matrix(
            ON_CPU,
            with_ids(
                {"one": (1, None, linear_loss), "eight_in_rounds": (8, 4, squared_loss)}
            ),
        ),
    ),
)
def test_cpu_step_is_in_place(name, num_devices, capacity, loss_fn):
    plan = make_plan(mesh_of(num_devices), 16, ON_CPU[name], 1, capacity=capacity)
    check(plan, compile_step(plan, 16, loss_fn))


@pytest.mark.full
@pytest.mark.parametrize("skips", SKIPPED_STEPS)
@pytest.mark.parametrize(
    "name", full_cases(["adagrad", "every_row", "adafactor"], "adafactor", "every_row")
)
def test_a_step_that_may_be_skipped_is_in_place(name, skips):
    plan = make_plan(mesh_of(3), 16, REPRESENTATIVE[name], 1)
    check(plan, compile_step(plan, 16, skips=skips))


WITHOUT_A_GRADIENT = {
    "adam": te.optimizers.adam(optax.cosine_decay_schedule(0.1, 9)),
    "adafactor_exact": OTHERS["adafactor_exact"],
    "sequence": te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
    "every_row": REPRESENTATIVE["every_row"],
    "adafactor_of_four_steps": OTHERS["adafactor_of_four_steps"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", quick_cases(WITHOUT_A_GRADIENT))
def test_a_step_without_a_table_copies_nothing_of_it(name):
    """It looks up the small table only, in a stack of its own."""
    mesh = mesh_of(3)
    big = te.TableConfig(
        vocabulary_size=8 * LINES_PER_DEVICE * mesh.size, dim=16, name="big"
    )
    small = te.TableConfig(vocabulary_size=1000, dim=8, name="small")
    config = {"one": te.FeatureConfig(table=big), "many": te.FeatureConfig(table=small)}
    plan = te.make_plan(config, mesh, optimizer=WITHOUT_A_GRADIENT[name])
    assert len(plan.stacks) == 2
    features = {"many": jax.ShapeDtypeStruct((BATCH, 4), jnp.int32)}
    compiled = compile_functional_step(plan, features, jnp.ones_like)
    check(plan, compiled)


def test_a_copy_is_seen():
    """The check above can fail: a step that reads the table after writing it."""
    plan = make_plan(mesh_of(1), 16, None, 1)
    layout = plan.stacks[0].layout
    table = jax.ShapeDtypeStruct((layout.num_lines, layout.lanes_per_line), jnp.float32)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)

    def step(table, ids):
        return table.at[ids].add(1.0), table[ids].sum() + table.sum()

    compiled = jax.jit(step, donate_argnums=0).lower(table, ids).compile()
    report = compile_report.inspect_program(compiled, plan)
    assert report.table_sized_copies + report.table_sized_passes
