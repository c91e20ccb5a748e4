"""Checks hyper-parameters, and makes equal optimizer calls return the same rule.

A hyper-parameter is a real scalar: a Python or NumPy number, or an array of shape `()`.
Under `optax.inject_hyperparams` it is traced, so only its shape and dtype are checked.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tpu_embedding.argument_checks import about, describe_value, invalid


class Check(NamedTuple):
    """The result of checking one hyper-parameter.

    `problem` is None for a valid value. In errors, `problem` follows "must be".
    """

    problem: str | None
    error: type[Exception] = ValueError


PASSED = Check(None)

_SMALLEST: Final = float(np.finfo(np.float32).tiny)
"""Smallest positive float32 that XLA does not round to 0."""

DENSE_EXAMPLE: Final = "optax.adam(0.1)"


def check_hyperparameters(owner: str | None = None, /, **checks: Check) -> None:
    """Raises one error that names every invalid hyper-parameter.

    The error starts with `owner`. Pass None if the caller adds the owner's name.
    """
    failed = {name: check for name, check in checks.items() if check.problem}
    if not failed:
        return
    prefix = "" if owner is None else f"{owner}: "
    text = "; ".join(f"{name} must be {x.problem}" for name, x in failed.items())
    is_type = any(x.error is TypeError for x in failed.values())
    error = (TypeError if is_type else ValueError)(f"{prefix}{text}.")
    raise about(error, f"{prefix}{next(iter(failed))}")


def real_scalar(value: Any) -> Check:
    """Checks for a real number, or a scalar array with a real dtype."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return PASSED
        is_complex = isinstance(value, complex)
        kind = "a real number" if is_complex else "a number"
        return Check(f"{kind}, got {describe_value(value)}", TypeError)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        return Check(f"a real number, got {value!r} of dtype {dtype}", TypeError)
    if getattr(value, "shape", ()) != ():
        return Check(f"a scalar, got an array of shape {value.shape}")
    return PASSED


def _in_range(
    text: str, is_in_range: Callable[[float], bool]
) -> Callable[[Any], Check]:
    """Makes a check for the float32 number that a step will use. Tracers pass."""

    def check(value: Any) -> Check:
        result = real_scalar(value)
        if result.problem or isinstance(value, Tracer):
            return result
        try:
            number = float(value)
        except OverflowError:
            return Check(f"within float32's range, got {str(value)[:9]}...")
        if 0 < abs(number) < _SMALLEST:
            # XLA rounds subnormal numbers to 0, and a rule might divide by them.
            zero = "0 or " if is_in_range(0.0) else ""
            return Check(f"{zero}at least {_SMALLEST:.3g} in size, got {value}")
        with np.errstate(over="ignore"):
            rounded = float(np.float32(number))
        if is_in_range(rounded):
            return PASSED
        rule = "finite" if math.isinf(rounded) else text
        # The note explains a number that is in range until it is rounded to float32.
        note = f", {rounded:g} in float32" if is_in_range(number) else ""
        return Check(f"{rule}, got {value}{note}")

    return check


# Each function maps a value to its `Check`. Functions whose names end in `_bound` also
# accept infinity, which means unbounded.
finite = _in_range("finite", math.isfinite)
not_nan = _in_range("a number", lambda x: not math.isnan(x))
positive = _in_range("positive", lambda x: 0 < x < math.inf)
positive_bound = _in_range("positive", lambda x: x > 0)
non_negative = _in_range("non-negative", lambda x: 0 <= x < math.inf)
non_negative_bound = _in_range("non-negative", lambda x: x >= 0)
non_positive = _in_range("non-positive", lambda x: -math.inf < x <= 0)
fraction = _in_range("in [0, 1]", lambda x: 0 <= x <= 1)
fraction_below_one = _in_range("in [0, 1)", lambda x: 0 <= x < 1)
open_fraction = _in_range("in (0, 1)", lambda x: 0 < x < 1)
step_size = _in_range(
    "at least 0 (negate the loss to ascend the gradient)", lambda x: 0 <= x < math.inf
)


def may_be_positive(value: Any) -> bool:
    """Tells if a value is a positive number, or traced."""
    return not positive(value).problem


def int_from(minimum: int, value: Any) -> Check:
    """Checks for an integer of at least `minimum`. It may be traced."""
    text = f"an int of at least {minimum}"
    if isinstance(value, Tracer):
        is_int = jnp.issubdtype(value.dtype, jnp.integer) and not value.shape
        return PASSED if is_int else Check(f"{text}, got {value}", TypeError)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return Check(f"{text}, got {value!r}", TypeError)
    try:
        number = value.__index__()
    except TypeError:
        return Check(f"{text}, got {value!r}", TypeError)
    return PASSED if number >= minimum else Check(f"{text}, got {value}")


def _steps_per_update(value: Any) -> Check:
    # As in Keras, 0 turns accumulation off, and 1 is an error.
    is_off = value == 0 and not isinstance(value, bool)
    return PASSED if is_off else int_from(2, value)


def flag(value: Any) -> Check:
    is_flag = isinstance(value, bool) or getattr(value, "dtype", None) == jnp.bool_
    return PASSED if is_flag else Check(f"True or False, got {value!r}", TypeError)


def one_of(value: Any, choices: Any) -> Check:
    """Checks a value against the choices in a `Literal`."""
    allowed = get_args(choices)
    if isinstance(value, str) and value in allowed:
        return PASSED
    return Check(f"one of {list(allowed)}, got {value!r}")


def or_none(check: Callable[[Any], Check], value: Any) -> Check:
    return PASSED if value is None else check(value)


RANGES: Final[Mapping[str, Callable[[Any], Check]]] = {
    "absolute_threshold": non_negative_bound,
    "accumulator_decay": fraction,
    "accumulator_relative_threshold": non_negative,
    "beta": non_negative,
    "beta2": fraction,
    "beta_1": fraction_below_one,
    "beta_2": fraction_below_one,
    "beta_2_decay": non_positive,
    "clip_threshold": positive_bound,
    "clipnorm": positive_bound,
    "ema_momentum": fraction,
    "ema_overwrite_frequency": functools.partial(int_from, 1),
    "epsilon": positive,
    "epsilon_1": non_negative,
    "epsilon_2": non_negative,
    "exponent": positive,
    "global_clipnorm": positive_bound,
    "gradient_accumulation_steps": _steps_per_update,
    "initial_accumulator_value": positive,
    "initial_ms": non_negative,
    "l1": non_negative,
    "l1_regularization_strength": non_negative,
    "l2": non_negative,
    "l2_regularization_strength": non_negative,
    "l2_shrinkage_regularization_strength": non_negative,
    "learning_rate_power": non_positive,
    "loss_scale_factor": positive,
    "max_accumulator": non_negative_bound,
    "max_delta": positive,
    "max_lr_multiplier": positive_bound,
    "max_var_update": non_negative_bound,
    "momentum": fraction,
    "outlier_threshold": positive_bound,
    "probability_exponent": non_negative,
    "rho": fraction,
    "tau": open_fraction,
    "variable_relative_threshold": non_negative,
    "weight_decay": non_negative,
    "weight_exponent": finite,
}
"""Ranges of the optimizers' arguments, by name. A rule may override them."""


def checks_of(
    function: Callable[..., Any], own: Mapping[str, Callable[[Any], Check]]
) -> dict[str, Callable[[Any], Check]]:
    """Derives a check for each argument in a signature except the learning rate.

    An argument with a bool default must be a flag. An argument with a `Literal`
    annotation must be one of its choices. The remaining arguments get their range from
    `own` or `RANGES`, by name. If the default is None, None is valid.

    Example:
      >>> checks = checks_of(lambda learning_rate, beta_1=0.9: None, {})
      >>> check_hyperparameters("lion", beta_1=checks["beta_1"](2.0))
      Traceback (most recent call last):
      ValueError: lion: beta_1 must be in [0, 1), got 2.0.
    """
    checks: dict[str, Callable[[Any], Check]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "learning_rate" or parameter.kind == parameter.VAR_KEYWORD:
            continue
        if isinstance(parameter.default, bool):
            checks[name] = flag
        elif get_origin(parameter.annotation) is Literal:
            checks[name] = functools.partial(one_of, choices=parameter.annotation)
        else:
            check = own.get(name) or RANGES[name]
            is_optional = parameter.default is None
            checks[name] = functools.partial(or_none, check) if is_optional else check
    return checks


def check_rule(
    owner: str | None,
    rule: Any,
    argument: str = "rule",
    example: str = "te.optimizers.adagrad(0.1)",
) -> None:
    functions = (getattr(rule, "init", None), getattr(rule, "update", None))
    if not all(map(callable, functions)):
        raise invalid(
            argument if owner is None else f"{owner}: {argument}",
            f"be an optax transformation such as {example}",
            rule,
            "Call a function such as optax.adam with its learning rate; convert Keras "
            "optimizers with te.optimizers.from_keras_config.",
            TypeError,
        )


MakeRule = TypeVar("MakeRule", bound=Callable[..., Any])


def equal_calls_are_one(make: MakeRule) -> MakeRule:
    """Makes a function return the same rule for equal, hashable arguments.

    Example:
      >>> import tpu_embedding as te
      >>> te.optimizers.adagrad(0.1) is te.optimizers.adagrad(learning_rate=0.1)
      True
    """
    # optax transformations are equal only if their functions are the same objects, and
    # tables share a stack only if their rules are equal.
    signature = inspect.signature(make)

    @functools.lru_cache(maxsize=4096)
    def result_of(call: _Call) -> Any:
        return call.run()

    @functools.wraps(make)
    def make_once(*args: Any, **arguments: Any) -> Any:
        run = functools.partial(make, *args, **arguments)
        try:
            bound = signature.bind(*args, **arguments)
            bound.apply_defaults()
            call = _Call(_hashable(bound.arguments), run)
            hash(call)
        except TypeError:
            # The arguments cannot be hashed, or they are wrong. If they are wrong,
            # `make` says why.
            return run()
        return result_of(call)

    return cast(MakeRule, make_once)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A cache key that carries the call to run."""

    arguments: Any
    run: Callable[[], Any] = dataclasses.field(compare=False)


def _hashable(value: Any) -> Any:
    """Converts a value to tuples that include types, to tell 1, 1.0 and True apart."""
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_hashable, value))
    return type(value), value
