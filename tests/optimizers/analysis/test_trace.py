"""Rules are traced once, and rows are told by what differs between two sizes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.optimizers import NotRowLocalError, check_row_local
from tpu_embedding.optimizers.analysis.trace import (
    UntraceableRule,
    trace_rule,
)

DIM = 8


def rule_of(operation):
    """A rule with one slot variable, whose updates are `operation(gradient, slot)`."""
    return optax.GradientTransformation(
        jnp.zeros_like,
        lambda updates, state, rows: (operation(updates, state), state + updates),
    )


def test_a_rule_is_traced_once():
    calls = []

    def operation(u, s):
        calls.append(u.shape)
        return u * s

    optimizer = rule_of(operation)
    table = te.TableConfig(vocabulary_size=10, dim=DIM, name="table")
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1), optimizer=optimizer)
    shapes = set(calls)
    assert len(calls) == len(shapes)
    te.make_plan(te.FeatureConfig(table=table), mesh_of(1), optimizer=optimizer)
    check_row_local(plan.stacks[0].optimizer, DIM)
    assert len(calls) == len(shapes)


UNTRACEABLE = {
    "arguments": (optax.lbfgs(0.1), "TypeError: .*value_fn"),
    "value of a row": (rule_of(lambda u, s: u if s[0, 0] > 0 else s), "TracerBool"),
    "parity": (
        rule_of(lambda u, s: u * 2 if u.shape[0] % 2 else u + s),
        "other operations for another number of rows",
    ),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_reason_why_a_rule_cannot_be_traced(name):
    optimizer, reason = UNTRACEABLE[name]
    trace = trace_rule(optimizer, (DIM,))
    assert isinstance(trace, UntraceableRule)
    with pytest.raises(NotRowLocalError, match=r"\[rows, 8\]") as error:
        check_row_local(optimizer, DIM)
    assert trace.reason in str(error.value)
    cause = error.value.__cause__
    assert type(cause) is type(trace.error)
    assert str(cause) == str(trace.error)
    assert trace.error.__traceback__ is None
    assert re.search(reason, trace.reason)


def test_other_operations_for_another_number_of_rows():
    optimizer = rule_of(lambda u, s: jax.lax.associative_scan(jnp.add, u))
    with pytest.raises(NotRowLocalError, match="operations become"):
        check_row_local(optimizer, DIM)


def test_a_trace_belongs_to_no_mesh():
    """It may be made within `shard_map`, and used under another mesh."""
    traces = []
    optimizer = optax.adam(0.1)

    def update(x):
        traces.append(trace_rule(optimizer, (5,)))
        return x

    spec = jax.sharding.PartitionSpec("shard")
    for num_devices in (2, 1):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), ("shard",))
        jax.jit(jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec))(
            jnp.ones(4)
        )
    assert traces[0] is traces[1] is trace_rule(optimizer, (5,))


ROW_LOCAL = {
    "cond": lambda u, s: jax.lax.cond(jnp.float32(1) > 0, jnp.sin, jnp.cos, u),
    "while": lambda u, s: jax.lax.while_loop(
        lambda x: x[1] < 3, lambda x: (x[0] * 0.5, x[1] + 1), (u, 0)
    )[0],
    "jit": lambda u, s: jax.jit(lambda x: x * 2)(u),
    "custom_jvp": lambda u, s: jax.nn.relu(u),
    "remat": lambda u, s: jax.checkpoint(jnp.sin)(u),
    "columns": lambda u, s: u * s[:, :1] + u[:, ::-1],
    "argsort of a row": lambda u, s: u * jnp.argsort(s, axis=1),
    "constants": lambda u, s: u * np.ones(u.shape, np.float32) + jnp.arange(8.0)[None],
    "iota over columns": lambda u, s: u * jax.lax.iota(jnp.float32, 8)[None],
    "pad": lambda u, s: jnp.pad(u, ((0, 0), (1, 0)))[:, 1:],
    "vmap": lambda u, s: jax.vmap(lambda x, y: x * jnp.sum(y))(u, s),
}
NOT_ROW_LOCAL = {
    "sort of rows": (lambda u, s: u * jnp.sort(s, axis=0), "sort"),
    "rows in reverse": (lambda u, s: u * jnp.flip(s, axis=0), "rev"),
    "argsort of rows": (lambda u, s: u * jnp.argsort(s, axis=0), "iota"),
    "iota over rows": (
        lambda u, s: u * jax.lax.broadcasted_iota(jnp.float32, u.shape, 0),
        "iota",
    ),
    "numbers by row": (
        lambda u, s: u * np.arange(u.shape[0], dtype=np.float32)[:, None],
        "mul",
    ),
    "row count": (lambda u, s: u / u.shape[0], "div"),
    "root of the row count": (lambda u, s: u / np.sqrt(u.shape[0]), "div"),
    "size": (lambda u, s: u * (1.0 / u.size), "mul"),
    "max in a loop": (
        lambda u, s: jax.lax.while_loop(
            lambda x: x[1] < s[0, 0], lambda x: (x[0] - jnp.max(x[0]), x[1] + 1), (u, 0)
        )[0],
        "slice",
    ),
    "max in a branch": (
        lambda u, s: jax.lax.cond(s.shape[1] > 2, lambda x: x - jnp.max(x), abs, u),
        "reduce_max",
    ),
    "max in jit": (lambda u, s: jax.jit(lambda x: x - jnp.max(x))(u), "reduce_max"),
    "one row": (lambda u, s: u.at[0].set(0.0), "scatter"),
    "rows by rows": (lambda u, s: (u @ s.T) @ u, "transpose"),
    "flat": (lambda u, s: u.reshape(-1).reshape(u.shape), "reshape"),
}


@pytest.mark.parametrize("name", ROW_LOCAL)
def test_is_row_local(name):
    check_row_local(rule_of(ROW_LOCAL[name]), DIM)


@pytest.mark.parametrize("name", NOT_ROW_LOCAL)
def test_mixes_rows(name):
    operation, found = NOT_ROW_LOCAL[name]
    with pytest.raises(NotRowLocalError, match=f"has the operation '{found}'"):
        check_row_local(rule_of(operation), DIM)
