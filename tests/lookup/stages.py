"""Small stacks, single stages on each shard, and plain references, for stage tests."""

import dataclasses
import types

import jax
import optax

import tpu_embedding as te
from tests.conftest import mesh_of

PADDING = te.inputs.PADDING_ROW_ID


def plan_of(num_shards, rows_per_shard, dim=2, **options):
    """Returns a plan of one feature, whose stack fills all rows of all shards."""
    table = te.TableConfig(
        vocabulary_size=num_shards * rows_per_shard,
        dim=dim,
        combiner="sum",
        name="table",
    )
    feature = te.FeatureConfig(table=table, name="feature")
    mesh = mesh_of(num_shards)
    plan = te.make_plan(feature, mesh, optimizer=optax.sgd(1.0), **options)
    assert plan.stacks[0].rows_per_shard == rows_per_shard
    return plan


def on_shards(function, plan):
    """Compiles a function of one shard; arrays get a first axis of shards.

    Results are NumPy arrays, and dataclasses become namespaces of them: their own types
    are those of one shard.
    """

    def run(*arguments):
        results = as_dicts(function(*jax.tree.map(lambda x: x[0], arguments)))
        return jax.tree.map(lambda x: x[None], results)

    compiled = jax.jit(
        jax.shard_map(
            run,
            mesh=plan.mesh,
            in_specs=plan.sample_spec,
            out_specs=plan.sample_spec,
            check_vma=False,
        )
    )
    return lambda *arguments: as_namespaces(jax.device_get(compiled(*arguments)))


def as_dicts(results):
    """Replaces dataclasses by dicts of their arrays."""
    if dataclasses.is_dataclass(results):
        return {
            field.name: as_dicts(getattr(results, field.name))
            for field in dataclasses.fields(results)
            if not field.metadata.get("static")
        }
    if isinstance(results, tuple | list):
        return tuple(as_dicts(result) for result in results)
    return results


def as_namespaces(results):
    """Replaces dicts by namespaces."""
    if isinstance(results, dict):
        return types.SimpleNamespace(
            **{name: as_namespaces(value) for name, value in results.items()}
        )
    if isinstance(results, tuple):
        return tuple(as_namespaces(result) for result in results)
    return results
