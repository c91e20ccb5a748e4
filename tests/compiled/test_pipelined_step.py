"""The pipelined train step, compiled: nothing of table size moves; lookups overlap.

Nothing is allocated: tables are shapes only.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.compiled.test_train_step import (
    ADAGRAD,
    TOPOLOGIES,
    Model,
    check,
    make_plan,
    squared_loss,
)
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.hlo import parse_module

BATCH = 2048


def compile_step(plan, dim, mode, loss_fn=squared_loss):
    def make():
        model = Model(plan, dim, nnx.Rngs(0))
        return model, te.Optimizer(model, optax.sgd(0.1))

    step = te.PipelinedTrainStep(
        lambda model, batch: loss_fn(model, *batch),
        features_of=lambda batch: batch[0],
        mode=mode,
    )
    features = {
        "one": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
        "many": jax.ShapeDtypeStruct((BATCH, 4), jnp.int32),
    }
    labels = jax.ShapeDtypeStruct((BATCH,), jnp.float32)
    return compile_advance(step, make, (features, labels), plan)


def compile_advance(step, make, batch, plan):
    """Compiles the step between the first and the last batch."""
    graph, state = nnx.split(nnx.eval_shape(make))
    state = compile_report.abstract_arrays(state, plan)
    batch = compile_report.abstract_batch(batch, plan)
    structure = None

    def begin(state, batch):
        nonlocal structure
        in_flight, _ = step._begin(graph, state, batch)
        leaves, structure = jax.tree.flatten(in_flight)
        return leaves

    in_flight = compile_report.abstract_batch(jax.eval_shape(begin, state, batch), plan)

    def advance(state, in_flight, batch, next_batch):
        in_flight = jax.tree.unflatten(structure, in_flight)
        return step._advance(graph, state, in_flight, batch, next_batch)

    jitted = jax.jit(advance, donate_argnums=0, compiler_options=plan.compiler_options)
    return jitted.lower(state, in_flight, batch, batch).compile()


def spans_of_sparse_core(module):
    """Yields the operations on SparseCore, and the instructions that run with each."""
    instructions = list(module.entry.values())
    place_of = {each.name: place for place, each in enumerate(instructions)}
    for done in instructions:
        if done.opcode == "call-done":
            start = place_of[done.operands[0]]
            yield done, instructions[start + 1 : place_of[done.name]]


def overlaps(module, mode):
    """Returns the SparseCore work that runs with a part of the next lookup."""
    match mode:
        case "exact":  # Ids of the next batch travel while rows are written.
            return [
                done.name
                for done, beside in spans_of_sparse_core(module)
                for each in beside
                if each.opcode == "all-to-all" and "jit(_route)" in each.text
            ]
        case "stale":  # Rows of the next batch are read while the TensorCore works.
            return [
                done.name
                for done, beside in spans_of_sparse_core(module)
                for each in beside
                if each.opcode == "fusion"
                and "jit(_read_routed)" in done.text
                and "jit(_read_routed)" not in each.text
            ]


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("mode", "generation"),
    [("exact", "v5p"), ("stale", "v5p"), ("exact", "v6e"), ("stale", "v6e")],
)
def test_tpu_step_is_in_place_and_overlaps(mode, generation):
    """XLA runs a part of the next lookup with SparseCore work of this step."""
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    plan = make_plan(mesh, 128, ADAGRAD, 1)
    compiled = compile_step(plan, 128, mode)
    report = check(plan, compiled)
    # As many as in a plain step: nothing is exchanged twice.
    assert report.all_to_alls == 3 + 2 + 2
    assert overlaps(parse_module(compiled.as_text()), mode)
