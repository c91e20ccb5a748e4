"""Which rows a rule is applied to, and how often."""

from tpu_embedding.optimizers.row_optimizer import (
    RowOptimizer,
    TableOptimizer,
    as_row_optimizer,
)


def every_row(optimizer: TableOptimizer) -> RowOptimizer:
    """Applies a rule to every row of the table in each step, as dense optimizers do.

    Rows that were not looked up have gradient zero: their moments decay, and move
    them. The result equals that of the same optax transformation on the dense
    gradient. It costs a pass over table and slot variables in each step, in place.

    Args:
      optimizer: an elementwise optax transformation.

    Example:
      >>> import optax
      >>> every_row(optax.sgd(0.1, momentum=0.9)).rows
      'every'
    """
    wrapped = as_row_optimizer(optimizer)
    assert wrapped is not None
    return RowOptimizer(
        transformation=wrapped.transformation,
        rows="every",
        duplicates=wrapped.duplicates,
    )


def in_sequence(optimizer: TableOptimizer) -> RowOptimizer:
    """Applies a rule once per occurrence of an id, in the order of the samples.

    TensorFlow's `use_gradient_accumulation=False`, which promises no order; here it is
    the order of the features, and of the samples within each device. It is for
    comparisons: a step takes as many passes as its most frequent id has occurrences.

    Args:
      optimizer: a row-local optax transformation.

    Example:
      >>> from tpu_embedding import optimizers
      >>> in_sequence(optimizers.adagrad(0.1)).duplicates
      'sequence'
    """
    wrapped = as_row_optimizer(optimizer)
    assert wrapped is not None
    return RowOptimizer(
        transformation=wrapped.transformation,
        rows=wrapped.rows,
        duplicates="sequence",
    )
