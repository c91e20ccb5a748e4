"""Placements: where the rows of a table live on a mesh.

A placement changes memory and traffic, never results. `TableConfig.placement` sets one
for a table, `make_plan(placement=...)` one for all tables, or a policy that decides per
table. The plan shows the placement of each stack, and its reason.
"""

import dataclasses
from typing import Any, Final

from tpu_embedding.field_checks import (
    Rule,
    broken_rules,
    convert_ints,
    int_rule,
    optional,
    raise_all,
)


def _are_axes(value: Any) -> bool:
    is_names = isinstance(value, tuple) and all(isinstance(x, str) for x in value)
    return is_names and 0 < len(value) == len(set(value))


_AXES_RULE: Final = Rule(
    _are_axes,
    "a tuple of different names of mesh axes",
    "a single axis is written axes=('model',), and te.Replicated() is for no axis",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded:
    """Splits the rows of a table over mesh axes, and copies them along the others.

    A device then sends ids and rows along these axes only. Devices along the other axes
    add their gradients up, so that their copies stay equal bit by bit. On GPUs, they do
    if XLA runs with `--xla_gpu_deterministic_ops=true`.

    Attributes:
      axes: names of the mesh axes; None means all axes, so that each row lives on one
        device.

    Example:
      >>> Sharded(axes=("model",)).axes
      ('model',)
    """

    axes: tuple[str, ...] | None = None

    def __post_init__(self):
        raise_all(broken_rules(self, {"axes": optional(_AXES_RULE)}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated:
    """Copies a table to every device, for small tables.

    A lookup needs no communication. The gradients of all devices are added up, by an
    all-reduce of a dense gradient or an all-gather of rows, whichever moves less.
    """


Placement = Sharded | Replicated

_SHARDED_RULE: Final = Rule(
    lambda x: isinstance(x, Sharded),
    "a te.Sharded",
    "te.Sharded() splits rows over the whole mesh",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicateSmall:
    """Copies small tables to every device, and shards the others.

    TensorFlow Recommenders' `PartialTPUEmbedding(size_threshold=...)` draws the same
    line.

    Attributes:
      max_rows: tables of at most this many rows are replicated; 0 replicates none.
      otherwise: placement of the other tables.

    Example:
      >>> ReplicateSmall(max_rows=100).max_rows
      100
    """

    max_rows: int = 10_000
    otherwise: Sharded = Sharded()

    def __post_init__(self):
        convert_ints(self, "max_rows")
        rules = {"max_rows": int_rule(0), "otherwise": _SHARDED_RULE}
        raise_all(broken_rules(self, rules))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoPlacement:
    """Copies a table to every device where that moves fewer bytes and fits in memory.

    Per device and step, let `N` be the ids that a device looks up in a table of `V`
    rows. Sharded, about `N` rows arrive, and `N` gradients leave. Replicated, an
    all-reduce of the dense gradient sends and receives about `V` rows. So a table is
    replicated if `V <= N`, smallest first, while all replicated tables and their slot
    variables fit in `max_bytes`.

    `N` counts `FeatureConfig.expected_valence` ids per sample, else
    `max_sequence_length`, else 1.

    The choice depends on the batch size and the number of devices, and with it the
    stacks. A layer on another mesh may place tables differently; a table of its own
    placement keeps it.

    Attributes:
      batch_size: samples of a global batch.
      max_bytes: memory of all replicated tables and slot variables, per device, without
        the padding of lines.
      otherwise: placement of the other tables.

    Example:
      >>> AutoPlacement(batch_size=4096).max_bytes
      67108864
    """

    batch_size: int
    max_bytes: int = 2**26  # 64 MiB
    otherwise: Sharded = Sharded()

    def __post_init__(self):
        convert_ints(self, "batch_size", "max_bytes")
        rules = {"batch_size": int_rule(1), "max_bytes": int_rule(0)}
        raise_all(broken_rules(self, rules | {"otherwise": _SHARDED_RULE}))


PlacementPolicy = Sharded | Replicated | ReplicateSmall | AutoPlacement


def placement_of_embedding_feature(embedding_feature: Any) -> Replicated | None:
    """Returns the placement that TensorFlow's `embedding_feature` asks for.

    TensorFlow names the embedding hardware of a TPU. `"UNSUPPORTED"`, no such hardware,
    replicates all tables. `"V1"` and `"V2"` shard them, which any hardware does here.

    Args:
      embedding_feature: one of these names, TensorFlow's enum member of that name, or
        None.

    Returns:
      The placement of all tables; None: the default one.

    Raises:
      ValueError: if the name is unknown.

    Example:
      >>> placement_of_embedding_feature("UNSUPPORTED")
      Replicated()
    """
    name = getattr(embedding_feature, "name", embedding_feature)
    if name not in ("UNSUPPORTED", "V1", "V2", None):
        raise ValueError(
            "embedding_feature must be 'UNSUPPORTED', 'V1', 'V2' or None, got "
            f"{embedding_feature!r}; 'UNSUPPORTED' replicates all tables."
        )
    return Replicated() if name == "UNSUPPORTED" else None
