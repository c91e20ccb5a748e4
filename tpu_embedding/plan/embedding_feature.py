"""Maps TensorFlow's `embedding_feature` to a placement.

TensorFlow names the embedding hardware of a TPU: `"V1"`, that of early generations,
`"V2"`, the SparseCores, or `"UNSUPPORTED"`, none. It refuses a version that the chip
lacks. `"UNSUPPORTED"` works on every device: each has a copy of every table, and plain
TensorCore operations look up.
"""

from typing import Any, Final

from tpu_embedding.hardware import EMBEDDING_FEATURES, HardwareInfo
from tpu_embedding.placement import PlacementPolicy, Replicated

_UNSUPPORTED: Final = "UNSUPPORTED"


def resolve_embedding_feature(
    feature: Any,
    placement: PlacementPolicy | None,
    hardware: HardwareInfo,
) -> PlacementPolicy | None:
    """Returns the placement that a version of embedding hardware asks for.

    Args:
      feature: one of `EMBEDDING_FEATURES`, TensorFlow's enum member of that name, or
        None.
      placement: the user's, or None.
      hardware: hardware of the plan.

    Returns:
      The user's placement, or replication for `"UNSUPPORTED"`.

    Raises:
      TypeError: if the version is no string and no enum member.
      ValueError: if it is unknown, the hardware has another, or it contradicts another
        option.
    """
    if feature is None:
        return placement
    name = getattr(feature, "name", feature)
    if not isinstance(name, str):
        raise TypeError(
            f"embedding_feature must be one of {EMBEDDING_FEATURES} or None, got "
            f"{feature!r}; None takes what the hardware has."
        )
    if name not in EMBEDDING_FEATURES:
        raise ValueError(
            f"embedding_feature must be one of {EMBEDDING_FEATURES} or None, got "
            f"{name!r}; None takes what the hardware has."
        )
    if name != _UNSUPPORTED:
        return _with_hardware(name, placement, hardware)
    if not isinstance(placement, Replicated | None):
        raise ValueError(
            f"embedding_feature='UNSUPPORTED' replicates tables, got {placement=} "
            "beside it; leave out one of them."
        )
    return Replicated()


def _with_hardware(
    name: str, placement: PlacementPolicy | None, hardware: HardwareInfo
) -> PlacementPolicy | None:
    if name != hardware.embedding_feature:
        raise ValueError(
            "embedding_feature must be 'UNSUPPORTED' or that of the hardware, "
            f"{hardware.embedding_feature!r} on {hardware.name}, got {name!r}; "
            "leave it out, and tables are sharded over any hardware."
        )
    if isinstance(placement, Replicated):
        raise ValueError(
            f"embedding_feature={name!r} shards tables, got placement={placement!r} "
            "beside it; leave out one of them."
        )
    return placement
