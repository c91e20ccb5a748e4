"""Rules as kernels run them, against the rules; and what TPUs' compiler takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tests.optimizers.rule_cases import (
    OPTIMIZERS,
    initial_state,
    one_table_plan,
    update,
)
from tests.tiers import full_cases, quick_cases
from tpu_embedding.optimizers.analysis.kernel_lowering import (
    LoweredRule,
    Refusal,
    lower_to_kernel,
)
from tpu_embedding.rows.kernels.row_kernels import update_rows
from tpu_embedding.tools import compile_report

DIM = 8
IN_KERNELS = """sgd adagrad adam momentum ftrl rmsprop proximal_adagrad adadelta lion
    bounded_adagrad proximal_yogi online_yogi user_defined options schedule inject
    optax.sgd optax.adam optax.adamw optax.lion optax.yogi optax.rmsprop optax.adagrad
    optax.adabelief chain""".split()
ALONG_ROWS = """rowwise_adagrad rowwise_adagrad_decays rowwise_adagrad_decoupled lamb
    partial_rowwise_lamb partial_rowwise_adam rowwise_rmsprop""".split()
BY_XLA = {
    "adagrad_momentum": "operation 'pow' does not run on SparseCores",
    "clippy_adagrad": "it takes totals over the rows of a table",
    "adafactor": "it takes totals over the rows of a table",
    "norm": "operation 'reduce_sum' mixes rows",
    "frequency_aware_adagrad": "slot variable '.counters' is int32",
}


HALF = jnp.float32(0.5)
SCHEDULE = optax.linear_schedule(0.5, 0.1, 10)


def reset(updates, state, rows):
    """Its count is a constant from the first step on, a slot the gradient."""
    del rows
    return updates * state[0], (jnp.float32(2), updates)


ODD = {
    "array": optax.sgd(HALF),
    "array and schedule": optax.chain(optax.scale(HALF), optax.sgd(SCHEDULE)),
    "array and injected": optax.chain(
        optax.scale(HALF), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    ),
    "decay by array": optax.adamw(SCHEDULE, weight_decay=jnp.float32(0.3)),
    "clip by array": optax.chain(optax.clip(HALF), te.optimizers.adagrad(HALF)),
    "optimistic": optax.optimistic_gradient_descent(0.1),
    "constant state": optax.GradientTransformation(
        lambda rows: (jnp.float32(1), jnp.zeros_like(rows)), reset
    ),
    "loop of numbers": te.optimizers.adagrad(
        lambda count: jax.lax.fori_loop(0, 3, lambda _, x: x * 0.9, 1.0 + count)
    ),
    "cond of numbers": optax.sgd(
        lambda count: jax.lax.cond(count > 1, lambda: 0.1, lambda: 0.2)
    ),
    "literals": optax.stateless(lambda u, _: jax.lax.clamp(-0.5, u, 0.5) * -0.1),
    "called with a literal": optax.stateless(
        lambda u, _: jax.jit(lambda x, y: x * y)(u, -0.25)
    ),
}


@pytest.mark.parametrize(
    "name",
    full_cases(
        [*IN_KERNELS, *ALONG_ROWS, *ODD],
        "sgd",
        "adagrad",
        "proximal_adagrad",
        "user_defined",
        "schedule",
        "rowwise_adagrad",
        "lamb",
    ),
)
def test_equals_the_rule(name):
    optimizer = (OPTIMIZERS | ODD)[name]
    rule = lower_to_kernel(optimizer, DIM)
    assert isinstance(rule, LoweredRule)
    rows = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)
    state = optimizer.init(jnp.asarray(rows))
    for seed in range(1, 4):
        gradient = np.random.default_rng(seed).normal(size=rows.shape)
        gradient = jnp.asarray(gradient, jnp.float32)
        updates, expected = optimizer.update(gradient, state, rows)
        leaves, tree = jax.tree.flatten(state)
        is_array = [x.shape == rows.shape for x in leaves]
        is_row_scalar = [x.shape == rows.shape[:1] for x in leaves]
        is_slot = np.logical_or(is_array, is_row_scalar)
        outline = [
            None if of_slot else x for x, of_slot in zip(leaves, is_slot, strict=True)
        ]
        scalars, new = rule.prepare(outline)
        assert all(x.shape == () and x.dtype == jnp.float32 for x in scalars)
        vectors = [
            *(x.reshape(-1) for x in (gradient, rows, *pick(leaves, is_array))),
            *(jnp.repeat(x, DIM) for x in pick(leaves, is_row_scalar)),
            *(jnp.full(rows.size, x) for x in scalars),
        ]
        sums = []
        for _ in range(rule.kernel_body.num_sums):
            summands = rule.kernel_body.run(sums, *vectors)
            sums.append(jnp.repeat(summands.reshape(rows.shape).sum(axis=1), DIM))
        row, *new_slots = rule.kernel_body.run(sums, *vectors)
        new_slots = [x.reshape(rows.shape) for x in new_slots]
        arrays, row_scalars = iter(new_slots), iter(new_slots[sum(is_array) :])
        new = [
            next(arrays) if of_array else next(row_scalars)[:, 0] if of_row else x
            for x, of_array, of_row in zip(new, is_array, is_row_scalar, strict=True)
        ]
        check = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
        check(row.reshape(rows.shape), rows + updates)
        jax.tree.map(check, tree.unflatten(new), expected)
        state, rows = expected, np.asarray(rows + updates)


def pick(leaves, are_wanted):
    return [x for x, is_wanted in zip(leaves, are_wanted, strict=True) if is_wanted]


@pytest.mark.parametrize("name", BY_XLA)
def test_leaves_other_rules_to_xla(name):
    assert lower_to_kernel(OPTIMIZERS[name], DIM) == Refusal(BY_XLA[name])


def one_operation(operation):
    """A rule that does one thing to the gradient, for the table and a slot."""
    return optax.GradientTransformation(
        lambda rows: jnp.ones_like(rows),
        lambda updates, state, rows: (
            operation(updates, state).astype(jnp.float32),
            state + updates,
        ),
    )


OPERATIONS = {
    "abs": lambda x, y: abs(x),
    "add mul sub": lambda x, y: x * y + x - y,
    "and or not": lambda x, y: jnp.where((x > 0) & ~(y > 0) | (x < y), x, y),
    "clamp": lambda x, y: jnp.clip(x, -1, 1),
    "convert": lambda x, y: (x > 0).astype(jnp.float32),
    "div": lambda x, y: x / y,
    "eq ne ge le": lambda x, y: (x == y) ^ (x != 0) ^ (x >= y) ^ (x <= y),
    "exp": lambda x, y: jnp.exp(x),
    "integer_pow": lambda x, y: x**3 + y**-2,
    "log": lambda x, y: jnp.log(y),
    "max min": lambda x, y: jnp.maximum(x, 0) + jnp.minimum(y, x),
    "neg sign": lambda x, y: -jnp.sign(x),
    "rsqrt": lambda x, y: jax.lax.rsqrt(y),
    "reduce_sum": lambda x, y: (
        x / jnp.mean(x * y, axis=1)[:, None] + jnp.sum(y, 1)[:, None]
    ),
    "sum by vmap": lambda x, y: jax.vmap(lambda a, b: a * jnp.sum(b))(x, y),
    "sqrt square": lambda x, y: jnp.sqrt(jnp.square(x) + y),
    "tanh": lambda x, y: jnp.tanh(x),
}
REFUSED = {
    "erf": (lambda x, y: jax.lax.erf(x), "'erf' does not run"),
    "int": (
        lambda x, y: (x.astype(jnp.int32) + 1).astype(jnp.float32),
        "'convert_element_type' of int32 does not run",
    ),
    "pow": (lambda x, y: jnp.power(y, 0.3), "'pow' does not run"),
    "integer_pow": (lambda x, y: x**20, "'integer_pow' does not run"),
    "no power": (
        lambda x, y: x * jax.lax.integer_pow(y, 0),
        "'integer_pow' does not run",
    ),
    "barrier of two": (
        lambda x, y: sum(jax.lax.optimization_barrier((x, y))),
        "'optimization_barrier' does not run",
    ),
    "greatest bool": (
        lambda x, y: jnp.maximum(x > 0, y > 0) * x,
        "'max' of bool does not run",
    ),
    "by column": (
        lambda x, y: jnp.where(x > 0, jnp.arange(x.shape[1])[None, :] * y, x),
        "'mul' takes float32[1, 8], not a float32 scalar",
    ),
    "by row": (
        lambda x, y: x * jnp.arange(x.shape[0], dtype=jnp.float32)[:, None] + y,
        "'iota' does not run",
    ),
    "cond": (lambda x, y: jax.lax.cond(True, jnp.sin, jnp.cos, x), "'sin' does not"),
    "int of a row": (
        lambda x, y: x * jnp.sum(y, 1).astype(jnp.int32)[:, None],
        "'convert_element_type' of int32 does not run",
    ),
    "max of a row": (
        lambda x, y: x * jnp.max(y, axis=1, keepdims=True),
        "'reduce_max' does not run",
    ),
    "sum of all": (lambda x, y: x * jnp.sum(y), "'reduce_sum' mixes rows"),
    "sum of a column": (
        lambda x, y: x * jnp.sum(y, axis=0)[None],
        "'reduce_sum' mixes rows",
    ),
    "sum of values": (
        lambda x, y: x * jnp.sum(jnp.sum(y, axis=1)),
        "'reduce_sum' mixes rows",
    ),
    "turned": (
        lambda x, y: x * jnp.sum(y.T, axis=0)[:, None],
        "'transpose' mixes rows",
    ),
}


def test_counts_sums_over_rows():
    rule = lower_to_kernel(one_operation(OPERATIONS["sum by vmap"]), DIM)
    assert isinstance(rule, LoweredRule) and rule.kernel_body.num_sums == 1


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_operations(name):
    operation, reason = REFUSED[name]
    refusal = lower_to_kernel(one_operation(operation), DIM)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(f"operation {reason}")


NOT_LOWERED = {
    "other arguments": (optax.lbfgs(0.1), "it cannot be traced: "),
    "bfloat16": (
        te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16),
        "slot variable '[0].momenta' is bfloat16",
    ),
    "asks about rows": (
        optax.stateless(
            lambda u, _: u * te.optimizers.table_rows(u).is_touched[:, None]
        ),
        "it asks which rows are used or looked up",
    ),
}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_says_why_a_rule_is_not_lowered(name):
    optimizer, reason = NOT_LOWERED[name]
    refusal = lower_to_kernel(optimizer, DIM)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith(reason)


def compile_kernels(optimizers, topology, dim):
    """All in one program, a kernel for each; asserts that it works in place."""
    mesh = compile_report.topology_mesh(topology)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("shard"))

    def shaped(rows, *dims, dtype=jnp.float32):
        shape = (rows * mesh.size, *dims)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    arrays, row_scalars, num_bytes = [], [], 0
    for optimizer in optimizers:
        table = jax.ShapeDtypeStruct((4096 * 128 // dim, dim), jnp.float32)
        state = jax.eval_shape(optimizer.init, table)
        leaves = [x for x in jax.tree.leaves(state) if x.ndim > 0]
        of_elements = [x for x in [table, *leaves] if x.ndim == 2]
        arrays.append([shaped(4096, 128) for _ in of_elements])
        row_scalars.append([shaped(256) for x in leaves if x.ndim == 1])
        num_bytes += len(of_elements) * 4096 * 128 * 4

    def update_all(arrays, row_scalars, row_ids, gradients):
        changed = []
        for optimizer, of_rule, scalars_of_rule in zip(
            optimizers, arrays, row_scalars, strict=True
        ):
            rule = lower_to_kernel(optimizer, dim)
            assert isinstance(rule, LoweredRule)
            state = jax.eval_shape(optimizer.init, jnp.zeros((2, dim)))
            outline = [
                None if x.ndim > 0 else jnp.zeros(x.shape, x.dtype)
                for x in jax.tree.leaves(state)
            ]
            scalars, _ = rule.prepare(outline)
            changed.append(
                update_rows(
                    *(rule.kernel_body, of_rule, row_ids, gradients, dim, scalars),
                    "sparse_core",
                    row_scalars=scalars_of_rule,
                )
            )
        return changed

    compiled = (
        jax.jit(
            jax.shard_map(
                update_all,
                mesh=mesh,
                in_specs=split.spec,
                out_specs=split.spec,
                check_vma=False,
            ),
            donate_argnums=(0,),
        )
        .lower(
            *(arrays, row_scalars, shaped(256, dtype=jnp.int32)),
            shaped(256 * dim // 128, 128),
        )
        .compile()
    )
    assert compiled.memory_analysis().alias_size_in_bytes == num_bytes


@pytest.mark.full
@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    "topology",
    [
        "v5p:2x2x1",
        pytest.param("v6e:2x2", marks=pytest.mark.full),
        pytest.param("tpu7x:2x2x1", marks=pytest.mark.full),
    ],
)
def test_every_operation_compiles(topology):
    compile_kernels([one_operation(x) for x in OPERATIONS.values()], topology, 128)


@pytest.mark.full
@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "dim"),
    [
        pytest.param("v5p:2x2x1", 8, marks=pytest.mark.full),
        pytest.param("tpu7x:2x2x1", 8, marks=pytest.mark.full),
        ("tpu7x:2x2x1", 64),
    ],
)
def test_every_rule_compiles(topology, dim):
    """Rows of a vector, vectors of a row, and several rows of a vector."""
    names = [*IN_KERNELS, *ALONG_ROWS] if dim == 64 else ALONG_ROWS
    compile_kernels([OPTIMIZERS[name] for name in names], topology, dim)


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize(
    "name",
    quick_cases(["cond of numbers", "loop of numbers", "array"], "loop of numbers"),
)
def test_on_one_mesh_after_another(name):
    """The scalars of a rule are computed under any mesh."""
    ids = np.arange(16, dtype=np.int32)
    gradient = np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)
    results = []
    for num_devices, kernels in ((1, "interpreter"), (2, "interpreter"), (2, "xla")):
        plan = one_table_plan(
            *(ODD[name], 20, DIM, mesh_of(num_devices)),
            hardware=te.hardware.hardware_by_name("v5p"),
            kernels=kernels,
        )
        tables, slots = initial_state(plan, np.ones((20, DIM), np.float32))
        for _ in range(3):
            tables, slots = update(tables, slots, ids, gradient, plan)
        results.append(te.functional.unstack_tables(tables, plan)["table"])
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-6)


def test_scalars_of_a_schedule():
    """A learning rate that falls with the step is computed outside; steps count on."""
    optimizer = te.optimizers.adam(optax.linear_schedule(1.0, 0.0, 4))
    rule = lower_to_kernel(optimizer, DIM)
    assert isinstance(rule, LoweredRule)
    state = jax.tree.leaves(optimizer.init(jnp.ones((2, DIM))))
    outline = [None if x.shape else x for x in state]
    _, new = rule.prepare(outline)
    counts = [int(x) for x in new if x is not None]
    assert counts and set(counts) == {1}
