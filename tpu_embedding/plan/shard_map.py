"""Runs functions on a plan's devices, whether mesh axes are `Auto` or `Explicit`.

All programs are written for `Auto` axes. On `Explicit` axes, the default in
`jax.make_mesh`, the type of an array includes its sharding. Public functions then enter
a context with `Auto` axes, and return arrays with types of the user's mesh. Only this
module distinguishes the two kinds of axes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_embedding.plan.plan import EmbeddingPlan

EMBEDDING_SCOPE: Final = "embedding_layer"
"""Scope of the layer's operations in a compiled program.

On a mesh with a single device, operation names lack `shard_map`'s own scope."""


def auto_mesh(plan: EmbeddingPlan) -> Mesh:
    if not _is_explicit(plan):
        return plan.mesh
    return Mesh(plan.mesh.devices, plan.mesh.axis_names)


def on_shards(
    function: Callable[..., Any],
    plan: EmbeddingPlan,
    *,
    in_specs: Any,
    out_specs: Any,
) -> Callable[..., Any]:
    """Turns a function of shards into a function of global arrays.

    Specs are pytree prefixes. If an output spec omits a mesh axis, devices along this
    axis must return equal values. This is not checked.
    """
    mapped = jax.shard_map(
        jax.named_scope(EMBEDDING_SCOPE)(function),
        mesh=auto_mesh(plan),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )

    def run(*arguments: Any) -> Any:
        with unchecked_values():
            return mapped(*arguments)

    return in_auto_axes(run, plan, out_specs)


def on_plan_mesh(batch: Any, plan: EmbeddingPlan) -> Any:
    """Moves JAX arrays in a batch from a different `Explicit` mesh to the plan mesh."""

    def place(array: Any) -> Any:
        if not isinstance(array, jax.Array):
            return array
        mesh: Any = jax.typeof(array).sharding.mesh
        if AxisType.Explicit not in mesh.axis_types or mesh == plan.mesh.abstract_mesh:
            return array
        if isinstance(array, Tracer):
            # A program can't change the mesh of its arrays.
            raise ValueError(
                f"A batch must be on the mesh of the tables, {plan.mesh}, got an array "
                f"on {mesh}. Make the layer with te.TPUEmbedding(..., mesh=mesh) or "
                "te.make_plan(..., mesh), or under jax.set_mesh(mesh)."
            )
        divides = array.ndim > 0 and len(array) % plan.num_shards == 0
        spec = plan.sample_spec if divides else PartitionSpec()
        return jax.device_put(array, NamedSharding(plan.mesh, spec))

    return jax.tree.map(place, batch)


def replicated_type(array: jax.Array) -> jax.Array:
    """Reshards an array to a replicated type, if it has `Explicit` axes."""
    mesh: Any = jax.typeof(array).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def unchecked_values() -> Iterator[None]:
    # Outside of `jit`, these settings check each operation in a `shard_map`, and JAX
    # recurses endlessly in search of a NaN's origin. Unused parts of a backend's
    # buffers may hold NaN. The results are checked where they are used.
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def in_auto_axes(
    function: Callable[..., Any], plan: EmbeddingPlan, out_specs: Any
) -> Callable[..., Any]:
    """Makes a function of global arrays run in a context of `Auto` axes.

    `out_specs` apply to a mesh with `Explicit` axes. On other meshes, XLA chooses the
    shardings.
    """
    # Inside another such function, or under a mesh context with only `Auto` axes, the
    # function can run as it is.
    context = jax.sharding.get_abstract_mesh().axis_types
    is_in_auto_axes = context and AxisType.Explicit not in context
    if is_in_auto_axes or not _is_explicit(plan):
        return function
    out_sharding = jax.tree.map(
        lambda spec: NamedSharding(plan.mesh, spec),
        out_specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )

    def run(*arguments: Any) -> Any:
        # JAX rebuilds the pytrees of arguments with partitions as leaves. Some
        # dataclasses reject such leaves, so only the leaves of the arguments are
        # passed.
        leaves, tree = jax.tree.flatten(arguments)
        return jax.sharding.auto_axes(
            lambda *leaves: function(*tree.unflatten(leaves)),
            axes=plan.mesh.axis_names,
            out_sharding=out_sharding,
        )(*leaves)

    return run


@contextlib.contextmanager
def user_mesh(plans: Iterable[EmbeddingPlan]) -> Iterator[None]:
    """Enters the plans' `Explicit` mesh, unless the caller has entered a mesh."""
    # JAX differentiates on `Explicit` axes only in the mesh context, even outside of
    # `jit`.
    meshes = {plan.mesh for plan in plans if _is_explicit(plan)}
    # Under `jit`, even a new array is a tracer, and the context can't change.
    is_outside = jax.sharding.get_abstract_mesh().empty and not isinstance(
        jnp.zeros(()), Tracer
    )
    if is_outside and len(meshes) == 1:
        with jax.set_mesh(*meshes):
            yield
    else:
        yield


def zeros_like(shapes: Any) -> Any:
    """Makes zeros, with the shardings of `shapes` if the context is `Explicit`."""
    context = jax.sharding.get_abstract_mesh()

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.sharding is None or AxisType.Explicit not in context.axis_types:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec)

    return jax.tree.map(make, shapes)


def replicate(array: jax.Array, plan: EmbeddingPlan) -> jax.Array:
    """Copies an array to all devices, with the sharding that a step returns."""
    sharding = plan.replicated
    if _is_explicit(plan):
        # On an `Explicit` mesh, XLA writes shardings with an entry per array axis. With
        # a different form of the same sharding, programs would be compiled again.
        sharding = NamedSharding(plan.mesh, PartitionSpec(*[None] * array.ndim))
    return jax.device_put(array, sharding)


def constrain(array: jax.Array, plan: EmbeddingPlan, spec: PartitionSpec) -> jax.Array:
    """Constrains an array's partition. The context must have `Auto` axes."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(auto_mesh(plan), spec))


def constrain_samples(array: jax.Array, plan: EmbeddingPlan) -> jax.Array:
    """Constrains how samples are sharded, so that several programs agree on it.

    The array is global, and in the user's mesh context.
    """
    # On `Explicit` axes, the type includes the sharding already.
    if _is_explicit(plan):
        return array
    return constrain(array, plan, plan.sharding_of_samples(array.shape).spec)


def _is_explicit(plan: EmbeddingPlan) -> bool:
    return AxisType.Explicit in plan.mesh.axis_types
