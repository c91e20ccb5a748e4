"""Small stacks, single stages on each shard, and plain references, for stage tests."""

import dataclasses
import types

import jax
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.plan.capacity import RoundSize

PADDING = te.inputs.PADDING_ROW_ID


def full(*values):
    """Moves one case of a test to the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


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


def round_size_of(kind, capacity, rows_per_line=1, received_rows=0, num_shards=1):
    """Returns a `RoundSize` whose buckets have one unused entry or more."""
    bucket_size = -(-(capacity + 1) // rows_per_line) * rows_per_line
    rows = num_shards * bucket_size
    return RoundSize(
        kind=kind,
        capacity=capacity,
        bucket_size=bucket_size,
        rows_per_line=rows_per_line,
        sent_rows=rows if kind == "padded" else rows + 2 * rows_per_line,
        received_rows=rows if kind == "padded" else received_rows,
        unique_rows=rows,
        holds_all=False,
    )


def lines_of(num_rows, size):
    """Returns the lines that hold so many rows."""
    return -(-num_rows // size.rows_per_line)


def rounds_of(rows, size, rows_per_shard):
    """Splits requests into rounds.

    Args:
      rows: `rows[source][owner]`: the local rows that a source requests, as a set.
      size: of each round.
      rows_per_shard: rows of each owner.

    Returns:
      Per round, `sent[source][owner]`, a list of rows, and the end row of each owner.
    """
    shards = range(len(rows))
    pending = [[sorted(rows[source][owner]) for owner in shards] for source in shards]
    rounds = []
    while True:
        ends = []
        for owner in shards:
            requests = [pending[source][owner] for source in shards]
            capacity = size.capacity
            if size.kind == "ragged":
                num_lines = sum(lines_of(len(x), size) for x in requests)
                available = (size.received_rows - 1) // size.rows_per_line
                if num_lines > available:
                    share = available // len(rows) * size.rows_per_line
                    capacity = min(capacity, share)
            too_many = [x[capacity] for x in requests if len(x) > capacity]
            ends.append(min(too_many, default=rows_per_shard))
        sent = [
            [[row for row in pending[s][d] if row < ends[d]] for d in shards]
            for s in shards
        ]
        pending = [
            [[row for row in pending[s][d] if row >= ends[d]] for d in shards]
            for s in shards
        ]
        rounds.append((sent, ends))
        if all(end == rows_per_shard for end in ends):
            return rounds


def place_at_source(sent_by_source, owner, size):
    """Returns where the bucket of an owner begins in the row buffer of its source."""
    if size.kind == "padded":
        return owner * size.bucket_size
    before = [lines_of(len(rows), size) for rows in sent_by_source[:owner]]
    return sum(before) * size.rows_per_line


def buckets_of(sent_by_source, size):
    """Returns the rows that a source sends, in one padded bucket per owner."""
    buckets = np.full((len(sent_by_source), size.bucket_size), PADDING, np.int32)
    for bucket, rows in zip(buckets, sent_by_source, strict=True):
        bucket[: len(rows)] = rows
    return buckets.reshape(-1)


def rows_by_owner(keys, num_shards, rows_per_shard):
    """Returns `rows[source][owner]`, sets of local rows, of keys `[source, ids]`."""
    rows = [[set() for _ in range(num_shards)] for _ in range(num_shards)]
    for source, of_source in enumerate(keys):
        for key in of_source:
            if key != PADDING:
                owner, row = divmod(int(key), rows_per_shard)
                rows[source][owner].add(row)
    return rows
