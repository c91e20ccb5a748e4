"""The embedding part of a train step, and its compilation without a TPU slice.

Shared by the benchmarks that time it, and by those that read figures off the compiled
program.
"""

from typing import Any

import jax
import jax.numpy as jnp

import tpu_embedding as te
from tpu_embedding.tools import compile_report


def make_plan(
    mesh: Any,
    *,
    num_tables: int,
    vocabulary_size: int,
    dim: int,
    optimizer: Any,
    backend: Any = None,
) -> te.EmbeddingPlan:
    """Plans equal tables with one feature each."""
    tables = [
        te.TableConfig(
            vocabulary_size=vocabulary_size,
            dim=dim,
            combiner="sum",
            name=f"t{i:02d}",
        )
        for i in range(num_tables)
    ]
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(features, mesh, optimizer=optimizer, backend=backend)


def abstract_ids(plan: te.EmbeddingPlan, batch_size: int) -> Any:
    """Returns the shapes of a batch, `[batch]` per feature."""
    ids = {
        f.name: jax.ShapeDtypeStruct((batch_size,), jnp.int32) for f in plan.features
    }
    return compile_report.abstract_batch(ids, plan)


def train_step(
    tables: Any, slots: Any, ids: Any, cotangents: Any, plan: te.EmbeddingPlan
) -> Any:
    """Looks up and updates: activations leave, cotangents enter.

    As in a model, no cotangent is there before the activations are.

    Returns:
      New tables, new slots, and the activations.
    """
    result = te.functional.lookup(tables, ids, plan)
    cotangents, activations = jax.lax.optimization_barrier(
        (cotangents, result.activations)
    )
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    return *te.functional.apply_gradients(tables, slots, gradients, plan), activations


def jit_step(plan: te.EmbeddingPlan) -> Any:
    """Returns `train_step` under `jax.jit`, which donates tables and slots."""
    return jax.jit(
        train_step,
        static_argnums=4,
        donate_argnums=(0, 1),
        compiler_options=plan.compiler_options,
    )


def compile_step(plan: te.EmbeddingPlan, ids: Any) -> Any:
    """Compiles `train_step`; see `lower_step`."""
    return lower_step(plan, ids).compile()


def lower_step(plan: te.EmbeddingPlan, ids: Any) -> Any:
    """Traces `train_step` on abstract tables and ids; touches no device.

    Args:
      plan: from `make_plan`.
      ids: from `abstract_ids`.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    tables = jax.eval_shape(lambda key: te.functional.init_tables(plan, key), key)
    tables = compile_report.abstract_arrays(tables, plan)
    slots = jax.eval_shape(
        lambda tables: te.functional.init_slots(tables, plan), tables
    )
    slots = compile_report.abstract_arrays(slots, plan)
    cotangents = compile_report.abstract_batch(
        te.functional.activation_shapes(ids, plan), plan
    )

    return jit_step(plan).lower(tables, slots, ids, cotangents, plan)
