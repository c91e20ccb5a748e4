"""Train steps of whole layers with SparseCore operations, compiled for TPUs.

The operation and the exchange are in one conditional, over the same donated lines:
in place, without a copy of a table, in no more than the logical bytes. Nothing is
allocated: tables are shapes only.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.compiled.functional_step import compile_functional_step
from tests.compiled.test_pipelined_step import compile_step as compile_pipelined_step
from tests.compiled.test_pipelined_step import spans_of_sparse_core
from tests.compiled.test_train_step import (
    ADAGRAD,
    REPRESENTATIVE,
    TOPOLOGIES,
    check,
    compile_step,
    make_plan,
)
from tests.tiers import quick_cases
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.hlo import parse_module

RULES = {
    "adagrad": ADAGRAD,
    "adam": REPRESENTATIVE["adam"],
    "sgd": te.optimizers.sgd(0.1),
    "ftrl": te.optimizers.ftrl(0.1),
    "momentum": te.optimizers.momentum(0.1),
    "chain": optax.chain(optax.clip(1.0), optax.scale_by_adam(), optax.scale(-0.1)),
}
CASES = [
    ("v5p", 16, "adagrad"),
    ("v5p", 1, "sgd"),
    ("v5p", 128, "adam"),
    ("v6e", 200, "ftrl"),
    ("v6e", 64, "chain"),
    ("tpu7x", 8, "momentum"),
    ("tpu7x", 512, "adagrad"),
    ("v6e:8x8", 32, "adagrad"),
]


def plan_of(topology, dim, optimizer):
    mesh = compile_report.topology_mesh(TOPOLOGIES.get(topology, topology))
    plan = make_plan(mesh, dim, optimizer, max(1, 128 // dim), backend="sparse_core")
    assert plan.stacks[0].backend.lookups == "sparse_core"
    return plan


def check_in_place(plan, compiled, dim):
    report = check(plan, compiled)
    assert report.temporary_bytes < 2**24
    assert report.sparse_core_operations == 2
    stack = plan.stacks[0]
    if stack.layout.lanes_per_row == dim:
        rows = stack.num_rows / plan.num_shards
        logical_bytes = (1 + len(stack.slots)) * 4 * dim * rows
        assert report.argument_bytes < 1.02 * logical_bytes


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "dim", "name"),
    quick_cases([pytest.param(*case) for case in CASES]),
)
def test_a_step_is_in_place(topology, dim, name):
    plan = plan_of(topology, dim, RULES[name])
    assert plan.stacks[0].backend.updates == "sparse_core"
    check_in_place(plan, compile_step(plan, dim), dim)


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("mode", ["exact", "stale"])
def test_a_pipelined_step_is_in_place(mode):
    plan = plan_of("v5p", 16, ADAGRAD)
    check_in_place(plan, compile_pipelined_step(plan, 16, mode), 16)


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", quick_cases(["v5p", "v6e"]))
def test_the_next_ids_are_sorted_while_sparse_cores_update_rows(generation):
    """In a conditional, which the exchange needs, XLA cannot run them side by side."""
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    backend = te.SparseCore(exchange=False)
    plan = make_plan(mesh, 128, ADAGRAD, 1, backend=backend)
    compiled = compile_pipelined_step(plan, 128, "exact")
    check_in_place(plan, compiled, 128)
    module = parse_module(compiled.as_text())
    num_beside = [
        sum("partition_ids" in instruction.text for instruction in beside)
        for done, beside in spans_of_sparse_core(module)
        if "apply_gradients" in done.text
    ]
    num_all = sum("partition_ids" in x.text for x in module.entry.values())
    assert max(num_beside) > 0.8 * num_all > 0


@pytest.mark.full
@pytest.mark.tpu_compiler
def test_without_compiler_options_a_step_is_in_place():
    """As under `nnx.jit`, which takes none."""
    plan = plan_of("v6e", 16, ADAGRAD)
    features = {
        "one": jax.ShapeDtypeStruct((2048,), jnp.int32),
        "many": jax.ShapeDtypeStruct((2048, 4), jnp.int32),
    }
    compiled = compile_functional_step(plan, features, options={})
    check_in_place(plan, compiled, 16)
