"""The gradient of a stacked table, as `lookup/` passes it to `update/`.

It arrives at the owners of rows as `Parts`: one `RowGradients` per round. No row is in
two rounds, so an update may apply rounds one by one.

A `jax.tree.map` over a sparse gradient would silently add or scale row ids, and change
the wrong rows. So `seal` hides integers in an opaque dtype, on which JAX rejects
arithmetic. Compiled programs are the same with and without `seal`.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.rows.access import Parts
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates


def _reject(*args: Any) -> Any:
    raise TypeError("Row ids of a gradient are not a random key.")


_ROW_IDS: Final = define_prng_impl(
    key_shape=(1,),
    seed=_reject,
    split=_reject,
    random_bits=_reject,
    fold_in=_reject,
    name="row_ids",
    tag="row ids; see te.gradients.global_norm, te.gradients.add, te.gradients.scale",
)
"""The opaque dtype of sealed integers."""


def _reject_arithmetic(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(
        "Table gradients do not support arithmetic on their leaves, because some "
        "leaves are row ids. Use te.gradients.global_norm(gradients), "
        "te.gradients.clip_by_global_norm, te.gradients.scale or te.gradients.add."
    )


class WithoutOperators:
    """Rejects Python operators with an error that names the right functions."""

    __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _reject_arithmetic
    __mul__ = __rmul__ = __truediv__ = __pow__ = _reject_arithmetic


class _Guard(np.ndarray):
    """A leaf ahead of the sealed leaves. Outside `jax.jit`, arithmetic on it raises."""

    # To compute a norm, optax first takes `real` or `conj`, which random keys lack.
    # Without the guard, the error would not mention gradients.

    real = imag = property(_reject_arithmetic)  # pyright: ignore
    conj = __array_ufunc__ = _reject_arithmetic  # pyright: ignore


GUARD: Final = np.zeros((), bool).view(_Guard)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sealed:
    """A pytree whose row ids and weights are protected from arithmetic.

    After `jnp.zeros_like` on every leaf, it is a gradient without rows. `dtypes` has a
    None for each leaf that is not sealed.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    dtypes: tuple[str | None, ...] = dataclasses.field(metadata={"static": True})

    def open(self) -> Any:
        """Restores plain arrays."""
        leaves = []
        for leaf, dtype in zip(self.leaves, self.dtypes, strict=True):
            if dtype is not None:
                words = jax.random.key_data(leaf)[..., 0]
                leaf = jax.lax.bitcast_convert_type(words, jnp.dtype(dtype))
                leaf = leaf ^ PADDING_ROW_ID if dtype == "int32" else leaf
            leaves.append(leaf)
        return jax.tree.unflatten(self.structure, leaves)


def seal(tree: Any, linear_fields: Collection[str]) -> Sealed:
    """Converts int32 and float32 arrays to an opaque dtype.

    Float32 arrays in `linear_fields` scale with the gradient, and are not converted.
    """
    with_paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves, dtypes = [], []
    for path, leaf in with_paths:
        is_linear = any(getattr(key, "name", None) in linear_fields for key in path)
        # Mapping over such floats, for example to divide by a loss scale, is correct.
        is_open = leaf.dtype == bool or (is_linear and leaf.dtype == jnp.float32)
        dtypes.append(None if is_open else leaf.dtype.name)
        if not is_open:
            if leaf.dtype == jnp.int32:
                # A sealed zero means padding, so zeros are a gradient without rows.
                leaf = leaf ^ PADDING_ROW_ID
            words = jax.lax.bitcast_convert_type(leaf, jnp.uint32)
            leaf = jax.random.wrap_key_data(words[..., None], impl=_ROW_IDS)
        leaves.append(leaf)
    return Sealed(leaves, structure, tuple(dtypes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGradients:
    """The gradients of one shard's rows in one round.

    Attributes:
      row_ids: local rows, each at most once. For optimizers that see occurrences, a row
        appears once per occurrence. Unused positions hold `PADDING_ROW_ID`.
      values: gradients, undefined in unused positions.
      occurrences: one gradient per occurrence of an id, if the optimizer needs the norm
        of these gradients; else None.
      covered: range of local rows in this round, touched or not. None if the round has
        all rows, or if the rule runs only on touched rows.
    """

    row_ids: Int[Array, " rows"]
    values: Float[Array, "rows dim"]
    occurrences: RowUpdates | None = None
    covered: RowRange | None = None

    def as_row_updates(self, places: Array | None = None) -> RowUpdates:
        """Sets gradients in unused positions to 0.

        If you pass `places`, they replace the row ids.
        """
        is_used = self.row_ids != PADDING_ROW_ID
        values = jnp.where(is_used[:, None], self.values, 0)
        row_ids = self.row_ids if places is None else places
        return RowUpdates(row_ids=row_ids, values=values)

    def scaled(self, factor: Float[Array, ""]) -> "RowGradients":
        occurrences = self.occurrences
        if occurrences is not None:
            values = occurrences.values * factor
            occurrences = dataclasses.replace(occurrences, values=values)
        return dataclasses.replace(
            self, values=self.values * factor, occurrences=occurrences
        )

    def only_if(self, condition: Bool[Array, ""]) -> "RowGradients":
        """Removes all rows unless a condition holds."""

        def kept(row_ids: Array) -> Array:
            return jnp.where(condition, row_ids, PADDING_ROW_ID)

        occurrences = self.occurrences
        if occurrences is not None:
            row_ids = kept(occurrences.row_ids)
            occurrences = dataclasses.replace(occurrences, row_ids=row_ids)
        first, end = self.covered or (jnp.int32(0), jnp.int32(PADDING_ROW_ID))
        return RowGradients(
            row_ids=kept(self.row_ids),
            values=self.values,
            occurrences=occurrences,
            covered=RowRange(first, jnp.where(condition, end, 0)),
        )


def empty_gradient(dim: int) -> Parts:
    """Makes one shard's gradient for a step that touched no rows."""
    row_ids = jnp.full((1,), PADDING_ROW_ID, jnp.int32)
    values = jnp.zeros((1, dim), jnp.float32)
    return Parts(RowGradients(row_ids=row_ids, values=values))
