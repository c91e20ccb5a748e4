"""The TPU compiler takes raw ids into the SparseCore operations, without a copy.

No TPU is needed: libtpu compiles for a described topology. The step looks up, and
updates table and slot variables, each under `cond` next to another path over the same
lines. A child compiles what the compiler rejects, for libtpu may abort its process.
"""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core.primitives import add_jaxvals_p

from tests.compiled.sparse_core_step import compile_step
from tests.tiers import quick_cases
from tpu_embedding.hardware import hardware_by_name
from tpu_embedding.sparse_core.limits import Limits, choose_limits
from tpu_embedding.sparse_core.row_rule import _ELEMENTWISE

pytestmark = pytest.mark.tpu_compiler


SMALL = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


GENERATIONS = quick_cases(SMALL)


def _compiles(topology, dim, limits):
    """Compiles in a child; returns True, or the message of the compiler."""
    program = (
        "import sys; import optax; "
        "from tests.compiled.sparse_core_step import compile_step; "
        "from tpu_embedding.sparse_core.limits import Limits; "
        f"compile_step({topology!r}, optax.sgd(0.1), dim={dim}, "
        f"limits={limits!r})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[2],
    )
    return result.returncode == 0 or result.stderr


@pytest.mark.parametrize("dim", [pytest.param(8, marks=pytest.mark.exhaustive), 512])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_largest_limits_compile_and_more_do_not(generation, dim):
    hardware, topology = hardware_by_name(generation), SMALL[generation]
    partitions = {"v5p": 16, "v6e": 8, "tpu7x": 16}[generation]
    most = choose_limits(
        10**7,
        device_ids=10**7,
        num_samples=10**6,
        num_partitions=partitions,
        cores=hardware.cores_per_device,
        memory_bytes=hardware.subcore_memory_bytes,
    )
    room = 2 * most.max_ids  # More ids than a region has places take no memory.
    limits = Limits(max_ids=most.max_ids, max_unique=most.max_unique, room=room)
    assert _compiles(topology, dim, limits) is True
    beyond = most.max_unique * 7 // 6 // 8 * 8
    limits = Limits(max_ids=most.max_ids, max_unique=beyond, room=room)
    assert "No viable logical replica count" in str(_compiles(topology, dim, limits))


def _all_operations(gradient, state, rows=None):
    """A rule that has each operation on elements that rules may have."""
    g, half = gradient, jnp.full_like(gradient, 0.5)
    lax = jax.lax
    floats = [lax.abs(g), lax.cbrt(g), lax.ceil(g), lax.clamp(-1.0, g, 1.0), lax.cos(g)]
    floats += [half / g, lax.exp(g), lax.exp2(g), lax.expm1(g), lax.floor(g)]
    floats += [lax.integer_pow(g, 3), lax.log(g), lax.log1p(g), lax.logistic(g)]
    floats += [lax.max(g, half), lax.min(g, half), -g, lax.pow(g, half)]
    floats += [lax.rem(g, half)]
    floats += [lax.round(g), lax.rsqrt(g), lax.sign(g), lax.sin(g), lax.sqrt(g)]
    floats += [lax.square(g), g - half, lax.tan(g), lax.tanh(g), g * half]
    floats += [add_jaxvals_p.bind(g, half)]
    bools = [g == half, g >= half, g > half, g <= half, g < half, g != half]
    bools += [bools[0] & bools[1], bools[0] | bools[1], bools[0] ^ bools[1], ~bools[2]]
    total = sum(floats[1:], floats[0])
    for condition in bools:
        total = jnp.where(condition, total, half)
    return total + g.astype(jnp.bfloat16).astype(jnp.float32), state


@pytest.mark.parametrize("generation", GENERATIONS)
def test_each_operation_of_rules_compiles(generation):
    optimizer = optax.GradientTransformation(lambda rows: (), _all_operations)
    shape = jnp.ones((2, 8))
    used = {x.primitive.name for x in jax.make_jaxpr(_all_operations)(shape, ()).eqns}
    used |= {"select_n"}  # within jnp.where
    assert _ELEMENTWISE <= used
    copies = compile_step(SMALL[generation], optimizer, dim=8)
    assert copies == []
