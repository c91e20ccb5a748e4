"""Activations and cotangents that share lines, as rows do on their way.

Where `k` rows of a table share a line (see `layout/row_kernels.py`), so do `k` samples
of a feature, but not neighbours: of `B` samples, each line holds those that are `B / k`
apart. Then `[B, dim]` is `k` slices of the samples side by side, which XLA:TPU moves as
they are. To put neighbours into one line, it would write each row with 128 lanes first.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten import PoolingSpec
from tpu_embedding.rows.kernels.row_kernels import ID_ALIGNMENT, read_rows
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, over_lanes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleLines:
    """How the samples of features share lines.

    Attributes:
      num_samples: of each feature.
      layout: of the rows that are looked up.
    """

    num_samples: int
    layout: RowLayout

    @property
    def distance(self) -> int:
        """What samples of a line are apart; lines of a feature."""
        return self.num_samples // self.layout.rows_per_line

    def gather(
        self,
        rows: PackedRows,
        places: Int[Array, " all_ids"],
        sizes: Sequence[int],
        valences: Sequence[int],
    ) -> list[Float[Array, "_ lanes"]]:
        """Reads the rows of ids that lie place by place, into lines of samples.

        Args:
          rows: to read from.
          places: of the rows, those of one feature after the other.
          sizes: sums of rows of each feature, a multiple of the samples.
          valences: rows of each sum, as in `gather_sums`.
        """
        assert self.layout.runner is not None
        return read_rows(
            rows.lines,
            jnp.minimum(places, rows.layout.num_rows - 1),
            self.layout.dim,
            self.layout.runner,
            sizes=sizes,
            valences=valences,
            row_stride=self.distance,
        )

    def pack(self, features: Sequence[Float[Array, "samples dim"]]) -> PackedRows:
        """Puts the samples of features into lines, one feature after the other."""
        return PackedRows(
            lines=jnp.concatenate([self.lines_of(x) for x in features]),
            layout=self.layout.buffer_layout(len(features) * self.num_samples),
        )

    def lines_of(self, feature: Float[Array, "samples dim"]) -> Float[Array, "_ lanes"]:
        """Puts the samples of a feature into lines."""
        layout = self.layout
        columns = feature.T.reshape(layout.dim, layout.rows_per_line, self.distance)
        columns = columns.swapaxes(0, 1).reshape(layout.lanes, self.distance)
        return _row_major(columns).T

    def unpack(self, lines: Float[Array, "_ lanes"]) -> Float[Array, "samples dim"]:
        """Takes the samples of a feature out of their lines."""
        layout = self.layout
        columns = lines.T.reshape(layout.rows_per_line, layout.dim, self.distance)
        columns = columns.swapaxes(0, 1).reshape(layout.dim, self.num_samples)
        return _row_major(columns).T

    def place_of(self, samples: Int[Array, " n"]) -> Int[Array, " n"]:
        """Returns the row that each sample is of the lines; samples of all features."""
        feature, sample = jnp.divmod(samples, self.num_samples)
        place, line = jnp.divmod(sample, self.distance)
        line += feature * self.distance
        return line * self.layout.rows_per_line + place

    def gains(self, gains: Float[Array, " ids"]) -> Float[Array, "_ lanes"]:
        """Gives the lanes of each row the row's gain."""
        k = self.layout.rows_per_line
        of_features = gains.reshape(-1, k, self.distance)
        columns = [of_features[:, place].reshape(-1) for place in range(k)]
        return over_lanes(columns, self.layout.lanes)


def sample_lines(bags: Sequence[PoolingSpec], layout: RowLayout) -> SampleLines | None:
    """Returns how samples share lines; None where they cannot.

    They can where rows share lines that kernels reach, and all features have equally
    many samples, as many ids in each, and enough of them to fill lines.
    """
    num_samples = bags[0].num_samples
    if (
        layout.runner is None
        or layout.rows_per_line == 1
        or any(bag.sample_ids is not None for bag in bags)
        or any(bag.num_samples != num_samples for bag in bags)
        or any(bag.valence == 0 for bag in bags)
        or num_samples % (layout.rows_per_line * ID_ALIGNMENT)
    ):
        return None
    return SampleLines(num_samples=num_samples, layout=layout)


def _row_major(array: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
    """Has XLA transpose just this.

    On its own, XLA:TPU transposes what comes before, `[dim, samples]`, and writes
    `[samples, dim]` with 128 lanes for each sample.
    """
    return with_layout_constraint(array, Layout(major_to_minor=(0, 1)))
