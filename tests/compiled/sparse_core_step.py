"""Compiles a step of raw ids with the SparseCore operations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpu_embedding.hardware import hardware_of_device
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.sparse_core import operations
from tpu_embedding.sparse_core.limits import OperationSizes, choose_limits
from tpu_embedding.sparse_core.partitioned_ids import partition_ids
from tpu_embedding.sparse_core.row_rule import row_rule

LANES = 128


def compile_step(topology, optimizer, *, dim, limits=None):
    """Compiles lookup, gradient and update under `cond`, over lines `[n, 128]`.

    Args:
      topology: libtpu's name of a slice.
      optimizer: the rule.
      dim: columns of the table, which is stored in rows of a fitting width.
      limits: limits of the operations. They default to the chosen ones.

    Returns:
      The types of arrays of the table's size that the program copies.
    """
    description = topologies.get_topology_desc(topology_name=topology, platform="tpu")
    devices = np.asarray(description.devices)
    mesh, count = Mesh(devices, ("shard",)), devices.size
    hardware = hardware_of_device(description.devices[0])
    cores = hardware.cores_per_device
    width = next((w for w in (8, 16, 32, 64) if dim <= w), -(-dim // LANES) * LANES)
    rule = row_rule(row_optimizer_of(optimizer), dim, width)
    others = [
        x for x in jax.tree.leaves(optimizer.init(jnp.ones((3, dim)))) if x.ndim == 0
    ]
    num_samples = 512
    num_lines = 32 * 2**20 // (4 * LANES)
    num_rows = num_lines * LANES // width
    limits = limits or choose_limits(
        num_samples // cores,
        device_ids=num_samples,
        cores=cores,
        num_samples=num_samples // cores,
        num_partitions=cores * count,
        memory_bytes=hardware.subcore_memory_bytes,
        sends_rows_once=hardware.sends_rows_once,
    )
    sizes = OperationSizes(num_samples, limits, cores, ("shard",))

    def step(lines, others, ids, cotangents):
        flat = ids.reshape(-1)
        placed, fits = partition_ids(
            flat % (cores * count),
            flat // (cores * count),
            lambda positions: positions,
            None,
            sizes,
            rows_per_partition=num_rows // cores,
            devices=count,
            may_repeat=False,
        )
        hyperparameters, others = rule.values(others)

        def look_up(lines):
            table = lines[0].reshape(-1, width)
            return operations.lookup(placed, table, sizes)

        def update(lines):
            arrays = [x.reshape(-1, width) for x in lines]
            new = operations.update(
                placed, gradients, arrays, hyperparameters, rule, sizes
            )
            return [x.reshape(-1, LANES) for x in new]

        # Stands for another path over the same lines.
        def read_lines(lines):
            some = jnp.tile(lines[0][flat[:8]], (1, -(-width // LANES)))[:, :width]
            return jnp.tile(some, (num_samples // 8, 1))

        def add_to_lines(lines):
            return [x.at[flat[:8]].add(gradients[0, 0]) for x in lines]

        activations = jax.lax.cond(fits, look_up, read_lines, lines)
        gradients = activations * cotangents
        lines = jax.lax.cond(fits, update, add_to_lines, lines)
        return lines, others, activations[:, :dim]

    split, whole = NamedSharding(mesh, P("shard")), NamedSharding(mesh, P())
    arrays = [
        jax.ShapeDtypeStruct((num_lines * count, LANES), jnp.float32, sharding=split)
    ] * (1 + rule.num_slots)
    others = [jax.ShapeDtypeStruct((), x.dtype, sharding=whole) for x in others]
    ids = jax.ShapeDtypeStruct((count * num_samples, 1), jnp.int32, sharding=split)
    cotangents = jax.ShapeDtypeStruct(
        (count * num_samples, width), jnp.float32, sharding=split
    )
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P("shard"), P(), P("shard"), P("shard")),
        out_specs=(P("shard"), P(), P("shard")),
        check_vma=False,
    )
    program = jax.jit(mapped, donate_argnums=0).lower(arrays, others, ids, cotangents)
    compiled = program.compile()
    table_bytes = num_lines * LANES * 4
    copies = re.findall(r"= (\S+) copy\(", compiled.as_text())
    return [x for x in copies if _bytes(x) >= table_bytes]


def _bytes(shape):
    dims = re.match(r"\w+\[([\d,]*)\]", shape)
    sizes = [int(x) for x in dims.group(1).split(",") if x] if dims else [0]
    return 4 * int(np.prod(sizes))
