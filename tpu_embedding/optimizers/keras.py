"""Translates Keras optimizers and learning rate schedules, without importing Keras.

The formulas are from `keras/src/optimizers` in Keras 3.15 and `tf_keras/src/optimizers`
in `tf_keras` 2.21. Both packages have the same schedules. Optimizers from before Keras
2.11 have different formulas. They are recognized by their fields and rejected.
"""

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.optimizers.averages import EMAStart, with_ema
from tpu_embedding.optimizers.checks import (
    RANGES,
    check_hyperparameters,
    equal_calls_are_one,
    flag,
    positive,
    step_size,
)
from tpu_embedding.optimizers.learning_rates import check_takes_a_step
from tpu_embedding.optimizers.options import with_options
from tpu_embedding.optimizers.row_optimizer import KerasOptimizer, every_row
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad
from tpu_embedding.optimizers.rules.adam import adadelta, adam, rmsprop
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.sgd import lion, sgd


def is_keras_optimizer(value: Any) -> TypeGuard[KerasOptimizer]:
    """Detects Keras optimizers, including instances of user subclasses."""
    has_config = callable(getattr(value, "get_config", None))
    is_instance = has_config and not isinstance(value, type)
    classes = inspect.getmro(type(value))
    return is_instance and any(_is_of_keras(cls.__module__) for cls in classes)


def _is_of_keras(module: str) -> bool:
    return module.partition(".")[0] in ("keras", "tf_keras", "tensorflow")


def _serialized_schedule(value: Any) -> Mapping[str, Any] | None:
    """Serializes a Keras schedule, or accepts one that is already serialized.

    A value that is not a Keras schedule gives None.
    """
    # A user class may have the name of a Keras schedule, but a different formula.
    cls = type(value)
    if cls.__name__ in _FORMULAS and _is_of_keras(cls.__module__):
        return {"class_name": cls.__name__, "config": value.get_config()}
    if not isinstance(value, Mapping) or str(value.get("class_name")) not in _FORMULAS:
        return None
    # Keras writes a registered name only for user classes.
    if value.get("registered_name") or not _is_of_keras(value.get("module") or "keras"):
        return None
    return {"class_name": value["class_name"], "config": value.get("config")}


def _keras_schedule(serialized: Mapping[str, Any]) -> optax.Schedule:
    """Translates a serialized schedule to an optax schedule.

    Example:
      >>> config = {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 1.0}
      >>> schedule = _keras_schedule(
      ...     {"class_name": "InverseTimeDecay", "config": config}
      ... )
      >>> float(schedule(2))
      0.25
    """
    name, fields = serialized["class_name"], dict(serialized.get("config") or {})
    fields = {
        x: y.item() if isinstance(y, np.generic) else y for x, y in fields.items()
    }
    fields.pop("name", None)
    # optax has schedules with the same names, but they differ at boundaries, past the
    # end, and in how they clip.
    formula = _FORMULAS[name]

    def schedule(count: Any) -> jax.Array:
        # Boundaries need exact steps, and float32 is exact only up to 2**24.
        is_exact = name == "PiecewiseConstantDecay"
        step = jnp.asarray(count, None if is_exact else jnp.float32)
        return jnp.asarray(formula(step, **fields), jnp.float32)

    try:
        check_hyperparameters(
            **{x: _CHECKS[x](y) for x, y in fields.items() if x in _CHECKS}
        )
        # Calling the formula finds fields that are missing or unknown.
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error).rstrip('.')}") from error
    return schedule


def _periods(step, decay_steps, is_staircase):
    # XLA divides by multiplying with the inverse, so the floor of a quotient could be
    # one too low.
    return jnp.floor_divide(step, decay_steps) if is_staircase else step / decay_steps


def _exponential(step, initial_learning_rate, decay_steps, decay_rate, staircase=False):
    periods = _periods(step, decay_steps, staircase)
    return initial_learning_rate * jnp.power(decay_rate, periods)


def _inverse(step, initial_learning_rate, decay_steps, decay_rate, staircase=False):
    periods = _periods(step, decay_steps, staircase)
    return initial_learning_rate / (1 + decay_rate * periods)


def _piecewise(step, boundaries, values):
    if len(boundaries) != len(values) - 1 or sorted(boundaries) != list(boundaries):
        raise ValueError(
            "boundaries must increase and be one fewer than values, got "
            f"{boundaries} and {values}"
        )
    # A boundary is the last (integer) step that uses its value.
    num_passed = sum((step > math.floor(x)).astype(jnp.int32) for x in boundaries)
    return jnp.asarray(values, jnp.float32)[num_passed]


def _polynomial(
    step,
    initial_learning_rate,
    decay_steps,
    end_learning_rate=1e-4,
    power=1,
    cycle=False,
):
    period = decay_steps
    if cycle:
        period *= jnp.maximum(-jnp.floor_divide(-step, decay_steps), 1)
    # `remaining` is exactly 0 at the end. XLA may round `step / period` above 1, and a
    # root of `1 - step / period` would then be NaN.
    remaining = (period - jnp.minimum(step, period)) / period
    span = initial_learning_rate - end_learning_rate
    return span * jnp.power(remaining, power) + end_learning_rate


def _cosine(
    step,
    initial_learning_rate,
    decay_steps,
    alpha=0,
    warmup_target=None,
    warmup_steps=0,
):
    start, num_before = initial_learning_rate, 0
    if warmup_target is not None:
        start, num_before = warmup_target, warmup_steps
    passed = jnp.clip(step - num_before, 0, decay_steps) / decay_steps
    rate = start * ((1 - alpha) * _half_cosine(passed) + alpha)
    rise = (start - initial_learning_rate) * (step / (num_before or 1))
    return jnp.where(step < num_before, initial_learning_rate + rise, rate)


def _restarts(
    step, initial_learning_rate, first_decay_steps, t_mul=2, m_mul=1, alpha=0
):
    passed, length = step / first_decay_steps, 1
    if t_mul == 1:
        restarts = start = jnp.floor_divide(step, first_decay_steps)
    else:
        # Periods form a geometric series: period i is t_mul**i times as long as the
        # first. The factor 1 + 1e-6 prevents a rounded logarithm from delaying a
        # restart by a step.
        restarts = jnp.log(1 - passed * (1 - t_mul)) / math.log(t_mul)
        restarts = jnp.floor(restarts * (1 + 1e-6))
        length = jnp.power(t_mul, restarts)
        start = (1 - length) / (1 - t_mul)
    cosine = jnp.power(m_mul, restarts) * _half_cosine((passed - start) / length)
    return initial_learning_rate * ((1 - alpha) * cosine + alpha)


def _half_cosine(passed):
    """Falls from 1 to 0 as `passed` rises from 0 to 1."""
    return 0.5 * (1 + jnp.cos(math.pi * passed))


_FORMULAS: Final[Mapping[str, Callable[..., Any]]] = {
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
_CHECKS: Final = {
    "initial_learning_rate": step_size,
    "decay_steps": positive,
    "first_decay_steps": positive,
    "t_mul": positive,
    "staircase": flag,
    "cycle": flag,
}


KerasRows = Literal["every", "touched"]

_COMMON_FIELDS: Final[Mapping[str, Any]] = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}
"""Fields that all Keras optimizers share, with Keras' defaults."""

_OWN_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sgd": {"momentum": 0.0, "nesterov": False},
    "adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
    "adam": {
        "beta_1": 0.9,
        "beta_2": 0.999,
        "epsilon": 1e-7,
        "amsgrad": False,
        "adaptive_epsilon": False,
    },
    "adamw": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
    "adadelta": {"rho": 0.95, "epsilon": 1e-7},
    "lion": {"beta_1": 0.9, "beta_2": 0.99},
    "rmsprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
    "ftrl": {
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l2_shrinkage_regularization_strength": 0.0,
        "beta": 0.0,
    },
    "adafactor": {
        "beta_2_decay": -0.8,
        "epsilon_1": 1e-30,
        "epsilon_2": 1e-3,
        "clip_threshold": 1.0,
        "relative_step": True,
    },
}
"""Each class's own fields, with Keras' defaults."""

_OF_TF_KERAS: Final = {"jit_compile", "is_legacy_optimizer"}
"""Fields that only `tf_keras` has. They do not affect the numbers."""

_CLIP_THE_MODEL: Final = (
    "set it to None, and clip in the step: gradients = "
    "te.gradients.clip_by_global_norm(gradients, {value}); or bound the elements with "
    "clipvalue"
)
_WITHOUT_EQUIVALENT: Final[Mapping[str, str]] = {
    "amsgrad": "set it to False, or use optax.amsgrad, which corrects the bias before "
    "the maximum",
    "adaptive_epsilon": "set it to False, or use optax.adam, which scales epsilon so",
    "clipnorm": _CLIP_THE_MODEL,
    "global_clipnorm": _CLIP_THE_MODEL,
}
"""The fix for each field without an equivalent. In Adafactor, the last two fields have
an equivalent."""


def from_keras_config(
    config: Mapping[str, Any] | KerasOptimizer,
    *,
    class_name: str | None = None,
    rows: KerasRows = "every",
) -> optax.GradientTransformation:
    """Translates a Keras optimizer, or raises an error that lists every problem.

    You get these equivalents:

    * `SGD`: `sgd`, with `optax.trace` for momentum.
    * `Adagrad`: `adagrad` with an epsilon.
    * `Adam`, `AdamW`: `adam(sum_inside_sqrt=False, bias_correction=True)`.
    * `RMSprop`, `Adadelta`, `Lion`, `Ftrl`, `Adafactor`: the optimizer with that name.

    Keras optimizers update every table row in each step: moments and weights decay, and
    Ftrl recomputes each row from its slot variables. The translated optimizer updates
    the whole table only if the Keras class and its fields require it. Pass
    `rows="touched"` for the lazy algorithm, which is usual on TPUs. Then a row and its
    slot variables change only in steps that look up the row. Gradients are summed over
    all occurrences of an id before clipping.

    However, `tf_keras` clips lookup gradients (`tf.IndexedSlices`) before summing. So
    `clipnorm` in `tf_keras`' Adafactor becomes a norm over all occurrences. If the
    gradient is dense in `tf_keras`, call `adafactor` with `clipnorm_of="sum"`. The
    translated `clipvalue` and `global_clipnorm` clip sums, so the numbers differ from
    `tf_keras` if an id repeats within a step.

    All six `keras.optimizers.schedules` are translated from their configurations,
    whichever backend Keras uses. However, if you wrote your own schedule class, it is
    called inside the compiled step, so JAX must be able to trace it.

    Fields with an equivalent are `weight_decay`, `clipvalue`, `loss_scale_factor`,
    `gradient_accumulation_steps`, and `use_ema`, which becomes `with_ema`. Fields
    without an equivalent are `amsgrad` and `adaptive_epsilon`. `clipnorm` and
    `global_clipnorm` have an equivalent only in Adafactor. `name`, `jit_compile` and
    `is_legacy_optimizer` do not affect the numbers. As in Keras, multiply the loss by
    `loss_scale_factor` yourself. With `gradient_accumulation_steps`, the layer averages
    the gradients of several steps, as `every_row` describes. Outside the layer, only
    Adafactor averages gradients.

    Args:
      config: the Keras optimizer or the result of its `get_config()`. Missing fields
        get Keras' defaults, but `learning_rate` is required. Three kinds of rate are
        valid: a number, a Keras schedule (serialized or not), or a function of the
        step counted from 0.
      class_name: name of the class in Keras, such as `"Adam"`. Defaults to the class of
        the optimizer you pass. If you pass a mapping, it defaults to the field `name`,
        which Keras derives from the class by default.
      rows: `"every"` or `"touched"`, see above. Keras updates every row.

    Raises:
      ValueError: if the class is unknown, or if fields cannot be translated. The error
        lists each such field, its value, and what to do instead.

    Example:
      >>> config = {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0}
      >>> rule = from_keras_config(config)
      >>> rows = jnp.ones((1, 2))
      >>> rule.update(rows, rule.init(rows), rows)[0].tolist()
      [[-0.5, -0.5]]
    """
    if is_keras_optimizer(config):
        optimizer, cls = config, type(config)
        is_own = _is_of_keras(cls.__module__)
        full_name = f"{cls.__module__}.{cls.__qualname__}"
        class_name = class_name or (cls.__name__ if is_own else full_name)
        config = dict(optimizer.get_config())
        # The public `learning_rate` is only the value at Keras' own step count.
        schedule = getattr(optimizer, "_learning_rate", None)
        is_users = callable(schedule) and _serialized_schedule(schedule) is None
        if is_users and isinstance(config.get("learning_rate"), Mapping):
            config["learning_rate"] = schedule
    if not isinstance(config, Mapping):
        rule = "be a Keras optimizer or the mapping that its get_config() returns"
        raise invalid("from_keras_config: config", rule, config)
    rate = config.get("learning_rate")
    config = {**config, "learning_rate": _serialized_schedule(rate) or rate}
    return _translate(str(class_name or config.get("name")), config, rows)


@equal_calls_are_one
def _translate(
    name: str, config: Mapping[str, Any], rows: KerasRows
) -> optax.GradientTransformation:
    """Checks a config, and makes its optimizer."""
    # Keras names the second Adam in a session `adam_1`.
    class_key = re.sub(r"_\d+$", "", name).replace("_", "").lower()
    if class_key not in _OWN_FIELDS:
        raise invalid(
            "from_keras_config: class_name",
            f"be one of {sorted(_OWN_FIELDS)}",
            name,
            "Write the optimizer as an optax transformation, such as "
            "te.optimizers.every_row(optax.adamw(0.1)).",
        )
    fields = {**_COMMON_FIELDS, **_OWN_FIELDS[class_key]}
    values = fields | {
        field: value.item() if isinstance(value, np.generic) else value
        for field, value in config.items()
    }
    if problems := list(_problems(class_key, values, rows)):
        text = f"Keras' {name} has no equivalent with these values:"
        text += "".join(f"\n  {problem}." for problem in problems)
        field = problems[0].partition("=")[0]
        raise about(ValueError(text), field, values.get(field, rows))
    rate = values["learning_rate"]
    rate = _keras_schedule(rate) if isinstance(rate, Mapping) else rate
    is_tf_keras = not _OF_TF_KERAS.isdisjoint(values)
    ema_start: EMAStart = "initial_values" if is_tf_keras else "first_update"
    if class_key == "adafactor":
        return adafactor(
            rate,
            **{field: values[field] for field in fields},
            mode="lazy" if rows == "touched" else "exact",
            ema_start=ema_start,
            clipnorm_of="occurrences" if is_tf_keras else "sum",
        )
    weight_decay = values["weight_decay"]
    # Only AdamW has a default that differs from `_COMMON_FIELDS`.
    if class_key == "adamw" and "weight_decay" not in config:
        weight_decay = 0.004
    steps = int(values["gradient_accumulation_steps"] or 1)
    if steps > 1 and callable(rate):
        # Keras schedules count steps, and updates happen in the last of `steps` steps.
        schedule: Any = rate
        rate = lambda count: schedule(count * steps + steps - 1)  # noqa: E731
    # Fields without an equivalent are off here, or `_problems` would have found them.
    own = {x: values[x] for x in _OWN_FIELDS[class_key] if x not in _WITHOUT_EQUIVALENT}
    rule = with_options(
        _RULES[class_key](rate, **own),
        learning_rate=rate,
        weight_decay_factor=weight_decay,
        multiply_weight_decay_factor_by_learning_rate=True,
        clipvalue=values["clipvalue"] if _is_on(values["clipvalue"]) else None,
    )
    # Keras unscales gradients before it clips them.
    if values["loss_scale_factor"]:
        rule = optax.chain(optax.scale(1 / values["loss_scale_factor"]), rule)
    rests_without_gradient = (
        class_key in ("sgd", "adagrad")
        and not own.get("momentum")
        and not weight_decay
        and steps == 1
    )
    overwrite_frequency = values["ema_overwrite_frequency"]
    overwrites = values["use_ema"] and overwrite_frequency is not None
    if rows == "every" and (overwrites or not rests_without_gradient):
        rule = every_row(rule, gradient_steps=steps)
    if not values["use_ema"]:
        return rule
    return with_ema(
        rule,
        momentum=values["ema_momentum"],
        overwrite_frequency=overwrite_frequency,
        start=ema_start,
    )


def _sgd(rate: Any, momentum: float, nesterov: bool) -> optax.GradientTransformation:
    if not momentum:
        return sgd(rate)
    # Keras' momentum sums gradients after multiplying each by its own step's rate.
    return optax.chain(sgd(rate), optax.trace(momentum, nesterov))


def _adagrad(
    rate: Any, initial_accumulator_value: float, epsilon: float
) -> optax.GradientTransformation:
    if initial_accumulator_value == 0:
        # `adagrad` rejects 0, like TensorFlow's TPU embedding.
        return optax.adagrad(rate, 0.0, epsilon)
    return adagrad(rate, initial_accumulator_value, epsilon=epsilon)


_adam = functools.partial(adam, sum_inside_sqrt=False, bias_correction=True)

_RULES: Final[Mapping[str, Callable[..., optax.GradientTransformation]]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adadelta": adadelta,
    "adam": _adam,
    "adamw": _adam,
    "lion": lion,
    "rmsprop": rmsprop,
    "ftrl": functools.partial(ftrl, allow_zero_accumulator=True),
}
"""Functions that make each class's rule, from a rate and the class's own fields."""


def _problems(class_key: str, values: Mapping[str, Any], rows: str) -> Iterator[str]:
    """Yields one sentence for each field that cannot be translated."""
    if rows not in get_args(KerasRows):
        yield f"rows={rows!r}: must be one of {list(get_args(KerasRows))}"
    known = {*_OWN_FIELDS[class_key], *_COMMON_FIELDS, *_OF_TF_KERAS}
    for field in sorted(set(values) - known - {"name", "learning_rate"}):
        yield (
            f"{field}={values[field]!r}: unknown field; remove it if it does not "
            "affect the numbers. Optimizers before Keras 2.11 had other fields, such "
            "as decay: use tf_keras.optimizers or Keras 3"
        )
    for field, default in {**_COMMON_FIELDS, **_OWN_FIELDS[class_key]}.items():
        value = values[field]
        types = bool if isinstance(default, bool) else int | float
        if not isinstance(value, types) and not (value is None and default is None):
            yield f"{field}={value!r}: must be {'bool' if types is bool else 'numeric'}"
    if problem := _rate_problem(values.get("learning_rate")):
        yield problem
    if class_key == "adafactor":
        return
    for field, instead in _WITHOUT_EQUIVALENT.items():
        value = values.get(field)
        if _is_on(value):
            yield f"{field}={value!r}: {instead.format(value=value)}"
    steps = values["gradient_accumulation_steps"]
    frequency = values["ema_overwrite_frequency"]
    if values["use_ema"] and frequency is not None:
        if problem := RANGES["ema_overwrite_frequency"](frequency).problem:
            yield f"ema_overwrite_frequency={frequency!r}: must be {problem}"
        elif rows == "touched" or steps:
            yield (
                f"ema_overwrite_frequency={frequency!r}: needs rows='every' and no "
                "gradient_accumulation_steps, because it replaces all rows; or set it "
                "to None, and call finalize_variable_values at the end"
            )
    if values["use_ema"]:
        momentum = values["ema_momentum"]
        if problem := RANGES["ema_momentum"](momentum).problem:
            yield f"ema_momentum={momentum!r}: must be {problem}"
    if steps and (steps != int(steps) or steps < 2):
        yield (
            f"gradient_accumulation_steps={steps!r}: must be None or an integer of at "
            "least 2, as in Keras"
        )
    elif steps and rows == "touched":
        yield (
            f"gradient_accumulation_steps={steps!r}: rows='touched' cannot apply the "
            "collected gradients of rows that the last step does not look up; use "
            "rows='every', or set it to None"
        )


def _rate_problem(rate: Any) -> str | None:
    """Explains why a value cannot be the learning rate, or gives None if it can."""
    if isinstance(rate, numbers.Real) and not isinstance(rate, bool):
        return None
    if (serialized := _serialized_schedule(rate)) is not None:
        try:
            _keras_schedule(serialized)
        except ValueError as error:
            return f"learning_rate={rate!r}: {error}"
        return None
    if not callable(rate):
        return (
            f"learning_rate={rate!r}: must be a number, one of Keras' six schedules, "
            "or a function of the step. If the schedule is your own class, pass the "
            "optimizer itself; for a function without arguments, see "
            "te.nn.set_each_step"
        )
    check_takes_a_step("from_keras_config", rate, "learning_rate")
    try:
        jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # Keras may run on any backend, and raise anything.
        return (
            f"learning_rate={rate!r}: JAX cannot trace it ({type(error).__name__}). "
            "Use one of Keras' six schedules, or write yours with jax.numpy or optax, "
            "such as optax.exponential_decay"
        )
    return None


def _is_on(value: Any) -> bool:
    # Keras ignores bounds at or below 0.
    return bool(value and value > 0)
