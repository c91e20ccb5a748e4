"""The grids of chips that slices of each TPU generation have.

libtpu builds other grids, too, but for some it aborts the process.
"""

import dataclasses
import math
from typing import Final

MAX_SLICES: Final = 256
"""Maximum number of slices of a topology.

For some larger numbers libtpu does not answer, and for others it aborts the process."""

CHIP_CONFIG_NAMES: Final = {"v4": "megacore"}
"""libtpu's name of the chip configuration with one device, where it has several."""

_MAX_SIDE: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceShapes:
    """The grids of chips that a generation's slices have.

    Attributes:
      fixed: grids of slices without a rule, smallest first. Their sides have this
        order.
      cube_side: larger slices consist of cubes with this many chips per side. None:
        there are no larger slices.
      max_chips: chips of the largest slice.
    """

    fixed: tuple[tuple[int, ...], ...]
    cube_side: int | None
    max_chips: int

    def has(self, grid: tuple[int, ...]) -> bool:
        """Returns True if a slice of the generation can have this grid.

        Args:
          grid: number of chips along each dimension.
        """
        if grid in self.fixed or self.cube_side is None:
            return grid in self.fixed
        fits = len(grid) == len(self.fixed[0]) and math.prod(grid) <= self.max_chips
        return fits and all(
            side % self.cube_side == 0 and 0 < side <= _MAX_SIDE for side in grid
        )

    def describe(self) -> str:
        """Returns the rule as text, for errors."""
        fixed = ", ".join("x".join(map(str, grid)) for grid in self.fixed)
        if self.cube_side is None:
            return fixed
        return (
            f"{fixed}, or {len(self.fixed[0])} sides that are multiples of "
            f"{self.cube_side} up to {_MAX_SIDE}, with at most {self.max_chips} chips"
        )


def _cubes(num_cubes: int) -> SliceShapes:
    fixed = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return SliceShapes(fixed=fixed, cube_side=4, max_chips=4**3 * num_cubes)


_SQUARES: Final = SliceShapes(
    fixed=((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    cube_side=None,
    max_chips=256,
)

# Sources: the "Configurations" sections of Google Cloud's pages of each generation, and
# Google's tool xpk (`generate_tpu_topologies` in `system_characteristics.py`, with 64,
# 140 and 144 cubes). Slices of one chip are part of a host.
SLICE_SHAPES: Final = {
    "v4": _cubes(64),
    "v5e": _SQUARES,
    "v5p": _cubes(140),
    "v6e": _SQUARES,
    "tpu7x": _cubes(144),
}
"""Grids by the name of the generation."""

TPU_GENERATIONS: Final = tuple(SLICE_SHAPES)
