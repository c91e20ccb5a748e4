"""Sets tables and dense parameters of a model to their moving averages, after training.

The NNX `Optimizer` and the Linen `TrainState` share this.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tpu_embedding import functional
from tpu_embedding.optimizers import finalize_variable_values
from tpu_embedding.optimizers.final_dense_values import has_averages
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows


class FinalValues(NamedTuple):
    """The values of a model after training, and the state of its optimizers.

    Attributes:
      tables: stacked tables by layer path; layers without averages are missing.
      slots: slot variables by layer path, of all layers.
      params: dense parameters.
      opt_state: state of the dense optimizer.
    """

    tables: dict[str, dict[str, PackedRows]]
    slots: dict[str, Any]
    params: Any
    opt_state: Any


def final_model_values(
    layers: Mapping[str, tuple[dict[str, PackedRows], EmbeddingPlan]],
    slots: Mapping[str, Any],
    params: Any,
    opt_state: Any,
) -> FinalValues:
    """Returns the moving averages of a model as its values.

    Tables and dense parameters whose optimizer keeps no averages stay as they are. In
    Keras, too, the call does nothing without `use_ema`.

    Args:
      layers: stacked tables and plan by layer path.
      slots: slot variables by layer path.
      params: dense parameters.
      opt_state: state of the dense optimizer.
    """
    new_tables, new_slots = {}, dict(slots)
    for path, (tables, plan) in layers.items():
        if not has_averages(slots[path]):
            continue
        new_tables[path], new_slots[path] = functional.finalize_variable_values(
            tables, slots[path], plan
        )
    if has_averages(opt_state):
        params, opt_state = finalize_variable_values(params, opt_state)
    return FinalValues(new_tables, new_slots, params, opt_state)
