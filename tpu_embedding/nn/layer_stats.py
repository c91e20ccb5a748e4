"""Counts of lookups and of inserted ids, in the form that a layer's variables keep."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from tpu_embedding.nn.recording import replicate_on_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.types import LookupStats


def no_vocabulary_counts(plan: EmbeddingPlan) -> dict[str, Any]:
    """Returns what vocabularies count per table, before the first step."""
    counts = {}
    for stack in plan.stacks:
        counts |= stack.vocabulary.stacks.zero_counts(stack)
    return counts


def no_stats(plan: EmbeddingPlan) -> LookupStats:
    """Returns zeros for each stack and feature, before the first lookup."""
    return LookupStats(
        rounds={stack.name: jnp.int32(0) for stack in plan.stacks},
        out_of_range={feature.name: jnp.int32(0) for feature in plan.features},
        num_ids={stack.name: jnp.int32(0) for stack in plan.stacks if stack.sends_ids},
        requested_rows={
            stack.name: jnp.zeros(stack.num_shards, jnp.int32)
            for stack in plan.stacks
            if stack.sends_ids
        },
    )


def stats_of_layer(stats: LookupStats, plan: EmbeddingPlan) -> LookupStats:
    """Returns the stats with an entry per stack and feature of the plan.

    The variable keeps its structure, whatever a call looks up, so that a jitted step
    which reads it is not compiled again.
    """
    if stats.out_of_range.keys() == {feature.name for feature in plan.features}:
        return stats
    zeros = no_stats(plan)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stats)):
        # The counts of an eager lookup lie on all devices.
        zeros = replicate_on_mesh(zeros, plan)
    return LookupStats(
        **{
            field.name: {
                name: getattr(stats, field.name).get(name, zero)
                for name, zero in getattr(zeros, field.name).items()
            }
            for field in dataclasses.fields(LookupStats)
        }
    )
