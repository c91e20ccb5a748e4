"""Placements: where the rows of a table live on a mesh.

A placement changes memory and traffic, never results. `TableConfig.placement` sets one
for a table, `make_plan(placement=...)` one for all tables, or a function that places
each. The plan shows the placement of each stack, and its reason.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Final

from tpu_embedding.argument_checks import Rule, broken_rules, optional, raise_all


class Placement(abc.ABC):
    """Chooses the mesh axes that the rows of a table are split over."""

    @abc.abstractmethod
    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Returns the axes that split rows, in the order of the mesh.

        Args:
          mesh_axes: names of the axes of the mesh.
          owner: the setting that gives the placement, for errors.

        Raises:
          ValueError: if the placement names an axis that the mesh lacks.
        """


def _are_axes(value: Any) -> bool:
    is_names = isinstance(value, tuple) and all(isinstance(x, str) for x in value)
    return is_names and 0 < len(value) == len(set(value))


_AXES_RULE: Final = Rule(
    _are_axes,
    "a tuple of different names of mesh axes",
    "a single axis is written axes=('model',), and te.Replicated() is for no axis",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(Placement):
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

    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Returns the axes of the placement, or else of the whole mesh."""
        axes = mesh_axes if self.axes is None else self.axes
        unknown = [axis for axis in axes if axis not in mesh_axes]
        if unknown:
            raise ValueError(
                f"{owner} must name axes of the mesh, {list(mesh_axes)}, got "
                f"{unknown} in {self!r}; correct the names, or leave axes out for the "
                "whole mesh."
            )
        # Equal placements share a stack, so the order of the names must not matter.
        return tuple(axis for axis in mesh_axes if axis in axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated(Placement):
    """Copies a table to every device, for small tables.

    A lookup needs no communication. Each device all-gathers the gradients of all
    devices, and adds them up.
    """

    def shard_axes(self, mesh_axes: tuple[str, ...], owner: str) -> tuple[str, ...]:
        """Returns no axis: every device has all rows."""
        return ()


ChoosePlacement = Callable[[str, int], Placement]
"""Places one table: takes its name and its number of rows."""


def placement_of_embedding_feature(embedding_feature: Any) -> Replicated | None:
    """Returns the placement that TensorFlow's `embedding_feature` asks for.

    TensorFlow names the embedding hardware of a TPU. `"UNSUPPORTED"`, no such hardware,
    replicates all tables. `"V1"` and `"V2"` shard them, which any hardware does here.

    Args:
      embedding_feature: one of these names, TensorFlow's enum member of that name, or
        None.

    Returns:
      The placement of all tables. None leaves the choice to `make_plan`.

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
