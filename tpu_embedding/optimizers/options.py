"""TensorFlow's common options of table optimizers, as wrappers around any optimizer.

They apply in this order: gradients are clipped, rows decay, the rule runs on the
decayed rows, rows are clipped. TensorFlow's `optimization_parameters.proto` describes
each option, but not the order; this order reproduces the recorded runs in the tests.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypedDict, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from tpu_embedding.optimizers.checks import (
    Check,
    check_hyperparameters,
    check_rule,
    finite,
    flag,
    non_negative_bound,
    not_nan,
    or_none,
)
from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.learning_rates import (
    checked_schedule,
    learning_rate_at,
)
from tpu_embedding.optimizers.modes import in_sequence
from tpu_embedding.optimizers.row_optimizer import wrap_rule
from tpu_embedding.optimizers.slot_storage import (
    SlotInitializers,
    check_slot_storage,
    with_slot_storage,
)

OptimizerFunction = TypeVar(
    "OptimizerFunction", bound=Callable[..., optax.GradientTransformation]
)
ClipValue = float | tuple[float | None, float | None]

OPTIMIZERS: Final[dict[str, Callable[..., optax.GradientTransformation]]] = {}
"""Functions that `takes_common_options` decorates, by name."""


class DecayRowsState(NamedTuple):
    """State of `decay_rows`.

    Attributes:
      count: updates so far.
      inner: state of the wrapped optimizer.
    """

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


@equal_calls_are_one
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
    """Adds TensorFlow's common options to any optimizer, under TensorFlow's names.

    The options work on every platform; TensorFlow's second version ignores or refuses
    most of them. The optimizers of this package take them as keyword arguments.

    Args:
      rule: an optimizer of this package or of optax.
      learning_rate: the optimizer's own; needed only for
        `multiply_weight_decay_factor_by_learning_rate`.
      use_gradient_accumulation: False applies the optimizer once per occurrence of an
        id; see `in_sequence`.
      clip_weight_min: smallest element of an updated row; None: no bound.
      clip_weight_max: largest element of an updated row; None: no bound.
      weight_decay_factor: fraction that touched rows lose before the rule runs; None or
        0: no decay.
      multiply_weight_decay_factor_by_learning_rate: True multiplies the fraction by the
        learning rate of the step.
      clipvalue: bounds of the elements of a row's summed gradient. A scalar `c` means
        `(-c, c)`. Either bound of a pair may be None.
      slot_dtype: dtype in which slot variables are stored; see `with_slot_storage`.
      slot_initializers: initial values of slot variables; see `with_slot_storage`.
      slot_variable_creation_fn: must be None. TensorFlow creates slot variables with
        it; `slot_initializers` and `slot_dtype` replace it. Slot variables are always
        sharded and packed like their table.
      low_dimensional_packing_status: without effect; narrow rows are always packed.

    Returns:
      The optimizer with its options.

    Raises:
      TypeError: if an option has another type.
      ValueError: if an option is out of its range, or options contradict each other.

    Example:
      >>> rule = with_options(optax.sgd(1.0), clip_weight_min=0.0)
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = rule.update(3 * rows, rule.init(rows), rows)
      >>> (rows + updates).tolist()
      [[0.0, 0.0]]
    """
    del low_dimensional_packing_status
    check_rule("with_options", rule)
    if learning_rate is not None:
        learning_rate = checked_schedule("with_options", learning_rate)
    options: CommonOptions = {
        "use_gradient_accumulation": use_gradient_accumulation,
        "clip_weight_min": clip_weight_min,
        "clip_weight_max": clip_weight_max,
        "weight_decay_factor": weight_decay_factor,
        "multiply_weight_decay_factor_by_learning_rate": (
            multiply_weight_decay_factor_by_learning_rate
        ),
        "clipvalue": clipvalue,
        "slot_dtype": slot_dtype,
        "slot_initializers": slot_initializers,
        "slot_variable_creation_fn": slot_variable_creation_fn,
    }
    _check_options("with_options", options)
    return _apply_options("with_options", rule, learning_rate, options)


def takes_common_options(make_optimizer: OptimizerFunction) -> OptimizerFunction:
    """Gives an optimizer's function the checks and options that all of them share.

    * The learning rate and the common options are checked under the optimizer's name.
    * Too many positional arguments raise an error that says how to name them.
    * The rule that the function returns gets the options, as by `with_options`.
    * The signature lists the common options one by one. `optax.inject_hyperparams` and
      `help()` need the names and defaults.
    * A table finds the optimizer by its name; see `optimizer_by_name`.

    The decorated function starts with `learning_rate` and ends in
    `**options: Unpack[CommonOptions]`. It need not read the options.
    """
    name = make_optimizer.__name__
    signature = inspect.signature(make_optimizer)
    options = inspect.signature(with_options).parameters
    own = [x for x in signature.parameters.values() if x.kind != x.VAR_KEYWORD]
    positional = [x.name for x in own if x.kind != x.KEYWORD_ONLY]
    signature = signature.replace(
        parameters=own + [options[name] for name in CommonOptions.__annotations__]
    )

    @functools.wraps(make_optimizer)
    def make(*args: Any, **arguments: Any) -> optax.GradientTransformation:
        try:
            given = signature.bind(*args, **arguments).arguments
        except TypeError as error:
            raise TypeError(
                f"{name}: {error}. Only {', '.join(positional)} may be given by "
                "position, because TensorFlow, Keras and optax order the others "
                f"differently. It takes {', '.join(signature.parameters)}."
            ) from None
        chosen = cast(CommonOptions, given)
        _check_options(name, chosen)
        rate = checked_schedule(name, given.get("learning_rate", own[0].default))
        rule = make_optimizer(**{**given, "learning_rate": rate})
        return _apply_options(name, rule, rate, chosen)

    cast(Any, make).__signature__ = signature
    OPTIMIZERS[name] = make = equal_calls_are_one(make)
    return cast(OptimizerFunction, make)


def _check_options(owner: str, options: CommonOptions) -> None:
    """Raises an error if a common option is wrong; missing options are not.

    Args:
      owner: the optimizer that takes the options, for errors.
      options: by name.
    """
    clip_min, clip_max = options.get("clip_weight_min"), options.get("clip_weight_max")
    accumulates = options.get("use_gradient_accumulation", True)
    check_hyperparameters(
        owner,
        use_gradient_accumulation=flag(accumulates),
        weight_decay_factor=or_none(finite, options.get("weight_decay_factor")),
    )
    _check_bounds(owner, "clip_weight_min", clip_min, "clip_weight_max", clip_max)
    clipvalue = options.get("clipvalue")
    if clipvalue is not None:
        _check_clipvalue(owner, clipvalue)
    if not accumulates and clipvalue is not None:
        raise ValueError(
            f"{owner}: clipvalue bounds the summed gradient of a row, so it needs "
            f"use_gradient_accumulation=True, got False and clipvalue={clipvalue}. "
            "Leave one of them out."
        )
    check_slot_storage(
        owner, options.get("slot_dtype"), options.get("slot_initializers")
    )


def _apply_options(
    owner: str,
    rule: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule | None,
    options: CommonOptions,
) -> optax.GradientTransformation:
    """Returns a rule with checked options; missing ones have their defaults."""
    if options.get("slot_variable_creation_fn") is not None:
        raise ValueError(
            f"{owner}: slot_variable_creation_fn must be None, because slot variables "
            "are always sharded and packed like their table. Choose initial values by "
            "slot_initializers, and the dtype by slot_dtype=jnp.bfloat16."
        )
    dtype, initializers = options.get("slot_dtype"), options.get("slot_initializers")
    if dtype is not None or initializers is not None:
        rule = with_slot_storage(rule, dtype, initializers)
    factor = options.get("weight_decay_factor")
    if factor is not None and (isinstance(factor, Tracer) or factor != 0):
        multiplies = options.get("multiply_weight_decay_factor_by_learning_rate")
        if multiplies and learning_rate is None:
            raise ValueError(
                "multiply_weight_decay_factor_by_learning_rate=True needs the rule's "
                "learning_rate, got None. Pass learning_rate to with_options, too."
            )
        rule = decay_rows(rule, factor, learning_rate if multiplies else None)
    clipvalue = options.get("clipvalue")
    if clipvalue is not None:
        clip = clip_gradients(clipvalue)
        rule = wrap_rule(rule, lambda inner: optax.chain(clip, inner))
    clip_min, clip_max = options.get("clip_weight_min"), options.get("clip_weight_max")
    if clip_min is not None or clip_max is not None:
        clip = clip_rows(clip_min, clip_max)
        rule = wrap_rule(rule, lambda inner: optax.chain(inner, clip))
    accumulates = options.get("use_gradient_accumulation", True)
    return rule if accumulates else in_sequence(rule)


@equal_calls_are_one
def clip_gradients(clipvalue: ClipValue) -> optax.GradientTransformation:
    """Returns a transformation that clips each element of the gradient.

    Args:
      clipvalue: a scalar `c` for `(-c, c)`, or a pair of bounds. Either bound of a pair
        may be None.

    Raises:
      TypeError: if it is neither.
      ValueError: if the lower bound is above the upper one, or one is NaN.
    """
    low, high = _check_clipvalue("clip_gradients", clipvalue)

    def clip(gradient: Any, rows: Any) -> Any:
        del rows
        return jnp.clip(gradient, low, high)

    return optax.stateless_with_tree_map(clip)


@equal_calls_are_one
def decay_rows(
    rule: optax.GradientTransformation,
    factor: float,
    learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformation:
    """Returns an optimizer that decays rows before it updates them.

    For a row `w`, the wrapped optimizer runs after::

        w -= factor * w                                   without learning_rate
        w -= factor * learning_rate * w                   with learning_rate

    Args:
      rule: the optimizer to wrap; its formula sees the decayed rows.
      factor: fraction that touched rows lose in each update.
      learning_rate: scalar, or schedule of the step counted from 0, that multiplies the
        factor; None: 1.

    Raises:
      TypeError: if an argument has another type.
      ValueError: if the factor or the learning rate is no finite scalar.
    """
    check_rule("decay_rows", rule)
    check_hyperparameters("decay_rows", factor=finite(factor))
    if learning_rate is not None:
        learning_rate = checked_schedule("decay_rows", learning_rate)

    def decay(rule: optax.GradientTransformation) -> optax.GradientTransformation:
        def init(params):
            return DecayRowsState(jnp.zeros((), jnp.int32), rule.init(params))

        def update(updates: Any, state: Any, params: Any = None):
            fraction = jnp.asarray(factor, jnp.float32)
            if learning_rate is not None:
                fraction *= learning_rate_at(learning_rate, state.count)
            lost = jax.tree.map(lambda rows: fraction * rows, params)
            decayed = jax.tree.map(jnp.subtract, params, lost)
            updates, inner = rule.update(updates, state.inner, decayed)
            updates = jax.tree.map(jnp.subtract, updates, lost)
            return updates, DecayRowsState(state.count + 1, inner)

        return optax.GradientTransformation(init, update)

    return wrap_rule(rule, decay)


@equal_calls_are_one
def clip_rows(
    minimum: float | None, maximum: float | None
) -> optax.GradientTransformation:
    """Returns a transformation that clips each element of an updated row.

    It must be the last of a chain. Rows are updated by addition, so a row that was far
    out of bounds reaches the bound only up to the rounding of its old value.

    Args:
      minimum: lower bound; None: none.
      maximum: upper bound; None: none.

    Raises:
      TypeError: if a bound is no number.
      ValueError: if the minimum is above the maximum, or one is NaN.
    """
    _check_bounds("clip_rows", "minimum", minimum, "maximum", maximum)

    def clip(update: Any, rows: Any) -> Any:
        return jnp.clip(rows + update, minimum, maximum) - rows

    return optax.stateless_with_tree_map(clip)


def _check_bounds(
    owner: str, low_name: str, low: Any, high_name: str, high: Any
) -> None:
    """Raises an error if a bound is no number, or both are in the wrong order."""
    checks: dict[str, Check] = {
        low_name: or_none(not_nan, low),
        high_name: or_none(not_nan, high),
    }
    check_hyperparameters(owner, **checks)
    is_known = not any(x is None or isinstance(x, Tracer) for x in (low, high))
    if is_known and low > high:
        raise ValueError(
            f"{owner}: {low_name} must not be above {high_name}, got {low} and {high}. "
            "Exchange them, or set one to None for no bound."
        )


def _check_clipvalue(
    owner: str, clipvalue: ClipValue
) -> tuple[float | None, float | None]:
    """Returns the pair of bounds that a `clipvalue` stands for."""
    if not isinstance(clipvalue, tuple):
        check_hyperparameters(owner, clipvalue=non_negative_bound(clipvalue))
        clipvalue = (-1.0 * clipvalue, clipvalue)
    if len(clipvalue) != 2:
        raise ValueError(
            f"{owner}: clipvalue must be a number or a pair (min, max), got "
            f"{len(clipvalue)} values {clipvalue!r}. Either bound may be None."
        )
    low, high = clipvalue
    _check_bounds(owner, "clipvalue's minimum", low, "maximum", high)
    return low, high
