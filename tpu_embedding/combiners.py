"""Combiners: the methods that pool the rows of a sample into one.

`lookup/_flatten_to_owners.py` computes the factor by which `mean` and `sqrtn` scale a
sum, and `lookup/_combine.py` the sum. `lookup/_custom_combiner.py` runs a function of
the user's.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from tpu_embedding.argument_checks import by_name
from tpu_embedding.field_checks import convert_ints, is_int, raise_all

Combiner = Literal["sum", "mean", "sqrtn"]


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomCombiner:
    """A function of your own that pools the rows of a sample.

    JAX differentiates the function, so its derivative reaches the rows. A sample
    without ids is zero, and the function has no effect on it. Duplicate ids are rows of
    their own. A sample with more than `max_valence` ids is refused: `prepare` raises,
    and so does a dense feature with more columns. Ids of the feature take no weights.

    The function has no parameters of its own. To train some, look the feature up as a
    sequence (`FeatureConfig.max_sequence_length`), and pool it in your model.
    TensorFlow instead keeps the weights of a combiner in a slot variable, and trains
    them by SGD.

    Attributes:
      function: `(valence, rows) -> row` for one sample. `valence` is an int32 scalar
        and `rows` float32 `[max_valence, dim]`, of which the first `valence` are the
        sample's in the order of its ids; the others are zero. The result is float32
        `[dim]`. Combiners are equal if their functions are the same object, so define
        it once.
      max_valence: maximum number of ids of a sample, at least 1.

    Example:
      >>> import tpu_embedding as te
      >>> def largest(valence, rows):
      ...     is_used = jnp.arange(len(rows)) < valence
      ...     return jnp.max(jnp.where(is_used[:, None], rows, -jnp.inf), axis=0)
      >>> table = te.TableConfig(
      ...     vocabulary_size=1000,
      ...     dim=16,
      ...     combiner=te.CustomCombiner(function=largest, max_valence=8),
      ... )
    """

    function: Callable[[jax.Array, jax.Array], jax.Array]
    max_valence: int

    def __post_init__(self):
        convert_ints(self, "max_valence")
        problems = []
        if not callable(self.function):
            problems.append(
                "CustomCombiner.function must be a function (valence, rows) -> row, "
                f"got {self.function!r}"
            )
        if not is_int(self.max_valence) or self.max_valence < 1:
            problems.append(
                "CustomCombiner.max_valence must be an int of at least 1, got "
                f"{self.max_valence!r}; give the maximum number of ids of a sample"
            )
        raise_all(problems)

    def problem_with(self, dim: int) -> str | None:
        """Says why the function cannot pool rows of `dim`; returns None if it can."""
        valence = jax.ShapeDtypeStruct((), jnp.int32)
        rows = jax.ShapeDtypeStruct((self.max_valence, dim), jnp.float32)
        try:
            row = jax.eval_shape(self.function, valence, rows)
        except Exception as error:  # Whatever the user's function raises.
            return f"it raised {type(error).__name__}: {error}"
        shape, dtype = getattr(row, "shape", None), getattr(row, "dtype", None)
        if shape != (dim,) or dtype != jnp.float32:
            return f"it returned {row!r}"
        return None
