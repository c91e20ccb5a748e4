"""Activations and cotangents of narrow tables, packed so that samples share lines.

Where `k` rows of a table share a line, `k` samples of a feature do, too. Neighbouring
samples do not share one: each line holds samples that are `batch / k` apart. Then
`[batch, dim]` is `k` slices of samples side by side, which XLA:TPU moves as they are.
With neighbours in one line, it would first write each sample with 128 lanes.

    samples 0 .. B-1, k = 4:   line i = [ i | i + B/4 | i + 2B/4 | i + 3B/4 ]
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from tpu_embedding.plan.backends import BatchBackends
from tpu_embedding.rows.kernels.kernel_access import KernelBackend
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, broadcast_to_lanes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleLines:
    """The packing of the samples of features into lines.

    Attributes:
      num_samples: samples of each feature.
      layout: packing of the exchange buffer.
    """

    num_samples: int
    layout: RowLayout

    @property
    def lines_per_feature(self) -> int:
        """Lines of a feature; also the stride between samples that share a line."""
        return self.num_samples // self.layout.rows_per_line

    def gather(
        self,
        rows: PackedRows,
        places: Int[Array, " all_ids"],
        sizes: Sequence[int],
        valences: Sequence[int],
        backend: KernelBackend,
    ) -> list[Float[Array, "_ lanes"]]:
        """Reads rows into lines of samples; sums them where a sample has several ids.

        Args:
          rows: rows in the exchange buffer.
          places: places of the rows, one feature after the other. Within a feature come
            the first ids of all samples, then the second ids, and so on.
          sizes: sums of rows of each feature, a multiple of its samples.
          valences: rows of each sum.
          backend: runs the kernel.
        """
        from tpu_embedding.rows.kernels.row_kernels import read_rows

        return read_rows(
            rows.lines,
            jnp.minimum(places, rows.layout.num_rows - 1),
            self.layout.dim,
            backend,
            sizes=sizes,
            valences=valences,
            row_stride=self.lines_per_feature,
        )

    def pack(self, features: Sequence[Float[Array, "samples dim"]]) -> PackedRows:
        """Puts the samples of features into lines, one feature after the other."""
        return PackedRows(
            lines=jnp.concatenate([self.lines_of(x) for x in features]),
            layout=self.layout.resized(len(features) * self.num_samples),
        )

    def lines_of(self, feature: Float[Array, "samples dim"]) -> Float[Array, "_ lanes"]:
        """Puts the samples of a feature into lines."""
        layout = self.layout
        columns = feature.T.reshape(
            layout.dim, layout.rows_per_line, self.lines_per_feature
        )
        columns = columns.swapaxes(0, 1).reshape(layout.lanes, self.lines_per_feature)
        return _row_major(columns).T

    def unpack(self, lines: Float[Array, "_ lanes"]) -> Float[Array, "samples dim"]:
        """Returns the samples of a feature, in order; the inverse of `lines_of`."""
        layout = self.layout
        columns = lines.T.reshape(
            layout.rows_per_line, layout.dim, self.lines_per_feature
        )
        columns = columns.swapaxes(0, 1).reshape(layout.dim, self.num_samples)
        return _row_major(columns).T

    def place_of(self, samples: Int[Array, " n"]) -> Int[Array, " n"]:
        """Returns the row of each sample within the lines of `pack`."""
        feature, sample = jnp.divmod(samples, self.num_samples)
        place, line = jnp.divmod(sample, self.lines_per_feature)
        line += feature * self.lines_per_feature
        return line * self.layout.rows_per_line + place

    def gains(self, gains: Float[Array, " ids"]) -> Float[Array, "_ lanes"]:
        """Repeats the gain of each row over its lanes."""
        k = self.layout.rows_per_line
        by_place = gains.reshape(-1, k, self.lines_per_feature)
        columns = [by_place[:, place].reshape(-1) for place in range(k)]
        return broadcast_to_lanes(columns, self.layout)


def sample_lines(backends: BatchBackends, layout: RowLayout) -> SampleLines | None:
    """Returns the packing that the batch's backends chose; None: no lines are shared.

    Args:
      backends: the choice for this batch.
      layout: packing of the exchange buffer.
    """
    if backends.samples_per_feature is None:
        return None
    return SampleLines(num_samples=backends.samples_per_feature, layout=layout)


def _row_major(array: Float[Array, "_ _"]) -> Float[Array, "_ _"]:
    """Makes XLA transpose exactly this array.

    Without the constraint XLA:TPU transposes its `[dim, samples]` input instead, and
    writes `[samples, dim]` with 128 lanes for each sample.
    """
    return with_layout_constraint(array, Layout(major_to_minor=(0, 1)))
