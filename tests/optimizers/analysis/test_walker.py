"""Programs are compared, and followed, by their structure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers.analysis.rule_program import RuleProgram, read_program
from tpu_embedding.optimizers.analysis.walker import all_operations, same_program, walk

ROWS = jnp.ones((4, 3))
NUMBERS = np.arange(12.0).reshape(4, 3)


def program_of(function) -> RuleProgram:
    return read_program(jax.make_jaxpr(function)(ROWS, ROWS))


def times(constant):
    """A function that closes over a constant."""
    return lambda x, y: x * constant + y


def cond(then):
    return lambda x, y: jax.lax.cond(jnp.sum(y) > 0, then, jnp.cos, x)


def loop(stop, factor):
    return lambda x, y: jax.lax.while_loop(
        lambda state: jnp.sum(state) > stop, lambda state: state * factor, x
    )


EQUAL = {
    "other names of variables": (
        lambda x, y: jnp.sin(x) + jnp.cos(y),
        lambda a, b: jnp.add(jnp.sin(a), jnp.cos(b)),
    ),
    "equal constants": (
        times(NUMBERS),
        times(NUMBERS),
    ),
    "equal literals": (times(0.5), times(0.5)),
    "nan": (times(np.nan), times(np.nan)),
    "cond": (cond(lambda x: jnp.sin(x)), cond(lambda z: jnp.sin(z))),
    "while": (loop(0.5, 0.5), loop(0.5, 0.5)),
    "jit": (
        lambda x, y: jax.jit(lambda v: v * y)(x),
        lambda x, y: jax.jit(lambda v: v * y)(x),
    ),
    "custom_jvp": (lambda x, y: jax.nn.relu(x), lambda x, y: jax.nn.relu(x)),
    "argsort": (lambda x, y: jnp.argsort(x, 1), lambda x, y: jnp.argsort(x, 1)),
}
UNEQUAL = {
    "operands": (lambda x, y: x - y, lambda x, y: y - x),
    "operation": (lambda x, y: x - y, lambda x, y: x + y),
    "literals": (times(0.5), times(0.25)),
    "zeros": (times(0.0), times(-0.0)),
    "constants": (times(NUMBERS), times(NUMBERS[::-1].copy())),
    "closures": (times(jnp.float32(0.5)), times(jnp.float32(0.25))),
    "axis": (lambda x, y: jnp.sum(x, 0), lambda x, y: jnp.sum(x, 1)),
    "outputs": (lambda x, y: (x, y), lambda x, y: (y, x)),
    "more": (lambda x, y: x + y, lambda x, y: x + y + y),
    "branch": (cond(jnp.sin), cond(jnp.tan)),
    "condition of a loop": (loop(0.5, 0.5), loop(0.25, 0.5)),
    "body of a loop": (loop(0.5, 0.5), loop(0.5, 0.25)),
    "types": (lambda x, y: x.astype(jnp.int8), lambda x, y: x.astype(jnp.int16)),
    "callbacks": (
        lambda x, y: jax.pure_callback(lambda v: v, x, x),
        lambda x, y: jax.pure_callback(lambda v: -v, x, x),
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_same_programs(name):
    first, second = map(program_of, EQUAL[name])
    assert same_program(first, second)


@pytest.mark.parametrize("name", UNEQUAL)
def test_different_programs(name):
    first, second = map(program_of, UNEQUAL[name])
    assert not same_program(first, second)
    assert not same_program(second, first)


def test_all_operations_are_those_of_called_programs_too():
    program = program_of(lambda x, y: jax.nn.relu(cond(jnp.sin)(x, y)))
    names = [operation.name for operation in all_operations(program)]
    assert {"sin", "cos", "max"} <= set(names)
    assert names.index("cond") < names.index("sin")
    names = [x.name for x in all_operations(program_of(loop(0.5, 0.5)))]
    assert {"while", "gt", "mul"} <= set(names)


@pytest.mark.parametrize("name", EQUAL)
def test_walk_runs_a_program(name):
    function, _ = EQUAL[name]
    results = walk(
        program_of(function), [ROWS, 2 * ROWS], lambda operation, x: operation.bind(x)
    )
    np.testing.assert_array_equal(results[0], function(ROWS, 2 * ROWS))
