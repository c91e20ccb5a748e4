"""Options that TensorFlow has on every table optimizer, as pieces around any rule.

In the order of application: gradients are clipped, rows decay, the rule runs on the
decayed rows, rows are clipped. That order is the reading of TensorFlow's
`optimization_parameters.proto` on which its recorded runs in the tests are made.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tpu_embedding.optimizers.modes import in_sequence
from tpu_embedding.optimizers.rules._rates import learning_rate_at
from tpu_embedding.optimizers.slot_storage import SlotInitializers, with_slot_storage

Recipe = TypeVar("Recipe", bound=Callable[..., optax.GradientTransformation])
ClipValue = float | tuple[float | None, float | None]


class DecayRowsState(NamedTuple):
    """State of the rule inside, and the number of updates so far."""

    count: jax.Array
    inner: optax.OptState


class CommonOptions(TypedDict, total=False):
    """Options that every optimizer of this package takes; see `with_options`."""

    use_gradient_accumulation: bool
    clip_weight_min: float | None
    clip_weight_max: float | None
    weight_decay_factor: float | None
    multiply_weight_decay_factor_by_learning_rate: bool | None
    clipvalue: ClipValue | None
    slot_dtype: Any
    slot_initializers: SlotInitializers | None
    slot_variable_creation_fn: None
    low_dimensional_packing_status: bool


def with_options(
    rule: optax.GradientTransformation,
    *,
    learning_rate: optax.ScalarOrSchedule | None = None,
    use_gradient_accumulation: bool = True,
    clip_weight_min: float | None = None,
    clip_weight_max: float | None = None,
    weight_decay_factor: float | None = None,
    multiply_weight_decay_factor_by_learning_rate: bool | None = None,
    clipvalue: ClipValue | None = None,
    slot_dtype: Any = None,
    slot_initializers: SlotInitializers | None = None,
    slot_variable_creation_fn: None = None,
    low_dimensional_packing_status: bool = False,
) -> optax.GradientTransformation:
    """Adds TensorFlow's common options to any rule, with TensorFlow's names.

    They hold on every platform; TensorFlow's second version ignores or refuses most.
    The optimizers of this package take them as arguments.

    Args:
      rule: of this package or of optax.
      learning_rate: of the rule; needed only where the decay is multiplied by it.
      use_gradient_accumulation: False applies the rule once per occurrence of an id;
        see `in_sequence`.
      clip_weight_min: smallest value of an updated row; None: none.
      clip_weight_max: largest value of an updated row; None: none.
      weight_decay_factor: touched rows lose this part before the rule runs; None or 0:
        none.
      multiply_weight_decay_factor_by_learning_rate: True: the part is the factor times
        the learning rate of the step.
      clipvalue: bounds of the elements of a row's summed gradient; one number c means
        (-c, c), and either bound of a pair may be None.
      slot_dtype: see `with_slot_storage`.
      slot_initializers: see `with_slot_storage`.
      slot_variable_creation_fn: must be None. What it is for in TensorFlow is chosen
        by `slot_initializers` and `slot_dtype`; slot variables are always sharded and
        packed like their table.
      low_dimensional_packing_status: without effect; narrow rows are always packed.

    Returns:
      The rule with its options.

    Raises:
      ValueError: if options contradict each other.

    Example:
      >>> rule = with_options(optax.sgd(1.0), clip_weight_min=0.0)
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = rule.update(3 * rows, rule.init(rows), rows)
      >>> (rows + updates).tolist()
      [[0.0, 0.0]]
    """
    del low_dimensional_packing_status
    if not use_gradient_accumulation and clipvalue is not None:
        raise ValueError(
            "clipvalue bounds the summed gradient of a row, so it needs "
            f"use_gradient_accumulation=True, got clipvalue={clipvalue} without it."
        )
    if slot_variable_creation_fn is not None:
        raise ValueError(
            "slot_variable_creation_fn must be None: slot variables are made with "
            "their table, sharded and packed like it. Choose their values by "
            "slot_initializers={'accumulators': 0.5} and their type by slot_dtype."
        )
    if slot_dtype is not None or slot_initializers is not None:
        rule = with_slot_storage(rule, slot_dtype, slot_initializers)
    has_decay = weight_decay_factor is not None
    if has_decay and not _is_zero(weight_decay_factor):
        multiplies = bool(multiply_weight_decay_factor_by_learning_rate)
        if multiplies and learning_rate is None:
            raise ValueError(
                "multiply_weight_decay_factor_by_learning_rate needs the rule's "
                "learning_rate; give it to with_options too."
            )
        rule = decay_rows(
            rule, weight_decay_factor, learning_rate if multiplies else None
        )
    pieces = [rule]
    if clipvalue is not None:
        pieces.insert(0, clip_gradients(clipvalue))
    if clip_weight_min is not None or clip_weight_max is not None:
        pieces.append(clip_rows(clip_weight_min, clip_weight_max))
    if len(pieces) > 1:
        rule = optax.chain(*pieces)
    return rule if use_gradient_accumulation else in_sequence(rule)


def takes_common_options(recipe: Recipe) -> Recipe:
    """Names the common options one by one in the signature of a recipe.

    A recipe ends in `**options: Unpack[CommonOptions]`. `optax.inject_hyperparams` and
    readers of `help()` need the names and defaults.
    """
    signature = inspect.signature(recipe)
    of_options = inspect.signature(with_options).parameters
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind != inspect.Parameter.VAR_KEYWORD
    ]
    parameters += [of_options[name] for name in CommonOptions.__annotations__]
    cast(Any, recipe).__signature__ = signature.replace(parameters=parameters)
    return recipe


def clip_gradients(clipvalue: ClipValue) -> optax.GradientTransformation:
    """Bounds each element of the gradient.

    Args:
      clipvalue: a number c for (-c, c), or a pair of bounds, either of which may be
        None.

    Raises:
      ValueError: if it is neither.
    """
    low, high = _bounds(clipvalue)
    _check_bounds("clipvalue's minimum", low, "maximum", high)

    def clip(gradient: Any, rows: Any) -> Any:
        del rows
        return jnp.clip(gradient, low, high)

    return optax.stateless_with_tree_map(clip)


def decay_rows(
    rule: optax.GradientTransformation,
    factor: float,
    learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformation:
    """Lets a rule work on rows that have lost a part: `w -= factor * w` before it.

    Args:
      rule: the rule; its formula sees the decayed rows.
      factor: the part.
      learning_rate: where the part is to be multiplied by the rate of the step.
    """

    def init(params):
        return DecayRowsState(jnp.zeros((), jnp.int32), rule.init(params))

    def update(updates: Any, state: Any, params: Any = None):
        part = jnp.asarray(factor, jnp.float32)
        if learning_rate is not None:
            part *= learning_rate_at(learning_rate, state.count)
        lost = jax.tree.map(lambda rows: part * rows, params)
        decayed = jax.tree.map(jnp.subtract, params, lost)
        updates, inner = rule.update(updates, state.inner, decayed)
        updates = jax.tree.map(jnp.subtract, updates, lost)
        return updates, DecayRowsState(state.count + 1, inner)

    return optax.GradientTransformation(init, update)


def clip_rows(
    minimum: float | None, maximum: float | None
) -> optax.GradientTransformation:
    """Bounds each element of an updated row; the last piece of a chain.

    Rows are updated by adding, so a row that was far outside comes to the bound up to
    the rounding of its old value.

    Raises:
      ValueError: if the bounds are the wrong way round.
    """
    _check_bounds("clip_weight_min", minimum, "clip_weight_max", maximum)

    def clip(update: Any, rows: Any) -> Any:
        return jnp.clip(rows + update, minimum, maximum) - rows

    return optax.stateless_with_tree_map(clip)


def _check_bounds(low_name: str, low: Any, high_name: str, high: Any) -> None:
    is_known = not any(x is None or isinstance(x, Tracer) for x in (low, high))
    if is_known and not low <= high:
        raise ValueError(
            f"{low_name} must not be above {high_name}, got {low} and {high}."
        )


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tracer) and value == 0


def _bounds(clipvalue: ClipValue) -> tuple[float | None, float | None]:
    if isinstance(clipvalue, tuple) and len(clipvalue) == 2:
        return clipvalue
    if isinstance(clipvalue, int | float | np.generic | jax.Array):
        return -1.0 * clipvalue, clipvalue
    raise ValueError(
        "clipvalue must be a number or a pair (min, max), either of which may be None, "
        f"got {clipvalue!r}."
    )
