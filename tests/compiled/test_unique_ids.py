"""A step of a sequence model with unique ids, compiled for TPUs and the CPU.

No float32 array in memory has a row per event, and no table is copied.
"""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.compiled.test_train_step import TOPOLOGIES, WITH_SPARSE_CORE
from tests.conftest import mesh_of
from tests.tiers import quick_cases
from tpu_embedding.tools import compile_report

BATCH, LENGTH, UNIQUE, DIM = 128, 4096, 4096, 256
"""Samples, events of a sample, and unique ids of a device."""


class Model(nnx.Module):
    """An MLP of unique items, expanded in bfloat16, and a sum over each history."""

    def __init__(self, plan):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.content = nnx.Linear(DIM, DIM, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def __call__(self, features):
        items = self.embedding({"items": features["items"]})["items"]
        events = self.embedding.expand(self.content(items), features["index"])
        scores = jnp.einsum("bld,bd->bl", events["history"], events["candidate"])
        return jnp.mean(jax.nn.silu(scores.astype(jnp.float32)))


def compile_step(mesh, **options):
    table = te.TableConfig(vocabulary_size=1_000_000 * mesh.size, dim=DIM, name="item")
    config = {"items": te.FeatureConfig(table=table, output_shape=(-1,))}
    optimizer = te.optimizers.adagrad(0.1)
    plan = te.make_plan(config, mesh, optimizer=optimizer, **options)

    def make():
        model = Model(plan)
        return model, te.Optimizer(model, optax.sgd(0.1))

    graph, state = nnx.split(nnx.eval_shape(make))
    index = {
        "history": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),
        "candidate": jax.ShapeDtypeStruct((BATCH,), jnp.int32),
    }
    ids = jax.ShapeDtypeStruct((mesh.size * UNIQUE,), jnp.int32)
    features = {"items": ids, "index": index}

    def step(state, features):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = te.value_and_grad(Model.__call__)(model, features)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    jitted = jax.jit(step, donate_argnums=0, compiler_options=plan.compiler_options)
    state = compile_report.abstract_arrays(state, plan)
    features = compile_report.abstract_batch(features, plan)
    return plan, jitted.lower(state, features).compile()


def check(plan, compiled):
    """Asserts what holds on every device; returns the report."""
    report = compile_report.inspect_program(compiled, plan)
    assert report.table_sized_copies == ()
    assert report.table_sized_passes == ()
    assert report.table_sized_all_gathers == ()
    return report


def shapes_in_memory(compiled):
    """Returns the types of all arrays with rows of `DIM`, outside of fusions."""
    computations = compiled.as_text().split("\n\n")
    kept = [text for text in computations if not text.lstrip().startswith("%fused")]
    found = re.findall(rf"\b(\w+)\[([\d,]+),{DIM}\]", "\n\n".join(kept))
    return {(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in found}


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", quick_cases(list(TOPOLOGIES)))
def test_a_tpu_step_has_no_row_per_event_in_float32(generation):
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    plan, compiled = compile_step(mesh)
    report = check(plan, compiled)
    num_events = BATCH * LENGTH // mesh.size
    shapes = shapes_in_memory(compiled)
    assert ("bf16", num_events) in shapes
    assert ("f32", num_events) not in shapes
    assert (report.sparse_core_gathers > 0) == (generation in WITH_SPARSE_CORE)


@pytest.mark.parametrize("num_devices", quick_cases([1, 8]))
def test_a_cpu_step_copies_no_table(num_devices):
    check(*compile_step(mesh_of(num_devices)))
