"""Translation of Keras optimizers into optimizers of this package.

The formulas are those of `keras/src/optimizers` of Keras 3.15, and of
`tf_keras/src/optimizers` 2.21. Optimizers older than Keras 2.11, today in
`tf_keras.optimizers.legacy`, have other formulas and are refused by their fields.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import optax

from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.keras.schedules import at_updates, keras_learning_rate
from tpu_embedding.optimizers.keras_instances import (
    KerasOptimizer,
    is_keras_optimizer,
    keras_class_name,
)
from tpu_embedding.optimizers.modes import every_row
from tpu_embedding.optimizers.options import clip_gradients, decay_rows
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad
from tpu_embedding.optimizers.rules.adam import adam
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.rmsprop import rmsprop
from tpu_embedding.optimizers.rules.sgd import sgd

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

_WITHOUT_EFFECT: Final = {"name", "jit_compile", "is_legacy_optimizer"}

_REFUSED: Final[Mapping[str, str]] = {
    "amsgrad": "set it to False, or use optax.amsgrad, which corrects the bias before "
    "the maximum",
    "adaptive_epsilon": "set it to False, or use optax.adam, which scales epsilon so",
    "clipnorm": "set it to None, and clip the gradients of the model in the step: "
    "gradients = te.gradients.clip_by_global_norm(gradients, {value}); or bound the "
    "gradient's elements by clipvalue",
    "global_clipnorm": "set it to None, and clip the gradients of the model in the "
    "step: gradients = te.gradients.clip_by_global_norm(gradients, {value}); or bound "
    "the gradient's elements by clipvalue",
    "use_ema": "set it to False, and average checkpoints instead; only Adafactor keeps "
    "a moving average of the rows here",
}
"""The way out for each field that has no equivalent, except in Adafactor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KerasFields:
    """The fields of a Keras optimizer.

    Attributes:
      class_key: class in lower case, a key of `_OWN_FIELDS`.
      given: fields that the optimizer has.
      fields: the given fields, and Keras' defaults of the missing ones.
      rows: see `from_keras_config`.
    """

    class_key: str
    given: Mapping[str, Any]
    fields: Mapping[str, Any]
    rows: KerasRows

    def number(self, field: str) -> float:
        """Returns a field as a float; None, which turns a field off, becomes 0."""
        return float(self.fields[field] or 0.0)

    def is_on(self, field: str) -> bool:
        """Returns True if the field's value has an effect in Keras."""
        value = self.fields.get(field)
        # Keras ignores a bound of 0 or below.
        return bool(value) if isinstance(value, bool) else bool(value and value > 0)


def from_keras_config(
    config: Mapping[str, Any] | KerasOptimizer,
    *,
    class_name: str | None = None,
    rows: KerasRows = "every",
) -> optax.GradientTransformation:
    """Translates a Keras optimizer, or raises with every reason why it cannot.

    The equivalents are:

    * `SGD`: `sgd`, followed by `optax.trace` if there is momentum.
    * `Adagrad`: `adagrad` with an epsilon.
    * `Adam`: `adam(sum_inside_sqrt=False, bias_correction=True)`.
    * `RMSprop`, `Ftrl`, `Adafactor`: the optimizer of that name.

    Keras' optimizers move every row of a table in each step, also rows that no id
    names. Moments decay, weights decay, and Ftrl recomputes each row from its slot
    variables. That costs a pass over table and slot variables in each step. The
    translation makes the pass only for optimizers and fields that need it.
    `rows="touched"` selects the lazy algorithm, which is the usual one on TPUs: slot
    variables and rows move only in steps that look the row up. The gradient of a row is
    the sum over the occurrences of its id, before clipping.

    `tf_keras` sums after clipping, if the gradient is that of a lookup
    (`tf.IndexedSlices`). `clipnorm` of its Adafactor is translated so: the norm is that
    of all occurrences. For a table whose gradient is dense in `tf_keras`, call
    `adafactor` with `clipnorm_of="sum"`. `clipvalue` and `global_clipnorm` clip sums
    here, so numbers differ from those of `tf_keras` where an id repeats in a step.

    Fields with an equivalent are `weight_decay`, `clipvalue`, `loss_scale_factor` and
    `gradient_accumulation_steps`. Fields without one are
    `clipnorm`, `global_clipnorm`, `use_ema` and `amsgrad`; Adafactor takes the first
    three. `name`, `jit_compile` and `is_legacy_optimizer` do not change numbers. With
    `loss_scale_factor`, multiply the loss by it, as Keras does. The layer collects the
    gradients of several steps (`every_row`); the bare optimizer does not.

    Args:
      config: the Keras optimizer, or what its `get_config()` returns. A missing field
        has Keras' default. `learning_rate` is required: a number, a Keras schedule as
        `get_config()` serializes it, or a function of the step counted from 0.
      class_name: Keras' class, such as `"Adam"`. None takes the class of the optimizer,
        or the field `name`, which Keras derives from the class by default.
      rows: `"every"` moves every row, as Keras does. `"touched"` moves the rows that
        the step looks up.

    Returns:
      The optimizer.

    Raises:
      ValueError: if the class is unknown or has no equivalent; or if fields have no
        equivalent. One error then lists each such field with its value and the way out.

    Example:
      >>> import jax.numpy as jnp
      >>> config = {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0}
      >>> rule = from_keras_config(config)
      >>> rows = jnp.ones((1, 2))
      >>> rule.update(rows, rule.init(rows), rows)[0].tolist()
      [[-0.5, -0.5]]
    """
    if is_keras_optimizer(config):
        class_name = class_name or keras_class_name(config)
        config = config.get_config()
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a Keras optimizer, or a mapping as get_config() of one "
            f"returns it, got {config!r}."
        )
    return _translate(str(class_name or config.get("name")), config, rows)


@equal_calls_are_one
def _translate(
    name: str, config: Mapping[str, Any], rows: KerasRows
) -> optax.GradientTransformation:
    # Keras names the second Adam of a session adam_1.
    class_key = re.sub(r"_\d+$", "", name).replace("_", "").lower()
    if class_key not in _OWN_FIELDS:
        raise ValueError(
            f"config must be of one of Keras' classes {sorted(_OWN_FIELDS)}, got "
            f"{name!r}; say which by class_name, or write the optimizer as an optax "
            "transformation, such as te.optimizers.every_row(optax.adamw(0.1))."
        )
    fields = {**_COMMON_FIELDS, **_OWN_FIELDS[class_key], **config}
    keras = _KerasFields(class_key=class_key, given=config, fields=fields, rows=rows)
    problems: list[str] = list(_problems(keras))
    rate: Any = None
    try:
        rate = keras_learning_rate(config.get("learning_rate"))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(
            f"Keras' {name} has no equivalent with these values:"
            + "".join(f"\n  {problem}." for problem in problems)
        )
    if class_key == "adafactor":
        return _adafactor(rate, keras)
    return _with_common_fields(rate, keras)


def _problems(keras: _KerasFields) -> Iterator[str]:
    """Yields one sentence for each field that cannot be translated."""
    if keras.rows not in get_args(KerasRows):
        yield f"rows={keras.rows!r}: must be one of {list(get_args(KerasRows))}"
    own = _OWN_FIELDS[keras.class_key]
    known = {*own, *_COMMON_FIELDS, *_WITHOUT_EFFECT, "learning_rate"}
    for field in sorted(set(keras.given) - known):
        yield (
            f"{field}={keras.given[field]!r}: the field is not known here; remove it "
            "if it has no effect on numbers. Optimizers before Keras 2.11 had other "
            "fields, such as decay: make yours anew with tf_keras.optimizers or Keras 3"
        )
    for field, default in {**_COMMON_FIELDS, **own}.items():
        value = keras.fields[field]
        types = (
            bool | np.bool_ if isinstance(default, bool) else float | int | np.number
        )
        if not (isinstance(value, types) or (value is None and default is None)):
            yield f"{field}={value!r}: must be of the type of {default!r}, or a number"
    if keras.class_key == "adafactor":
        return
    for field, way_out in _REFUSED.items():
        if keras.is_on(field):
            value = keras.fields[field]
            yield f"{field}={value!r}: {way_out.format(value=value)}"
    steps = keras.fields["gradient_accumulation_steps"]
    if steps and (steps != int(steps) or steps < 2):
        yield (
            f"gradient_accumulation_steps={steps!r}: must be None or an integer of at "
            "least 2, as in Keras"
        )
    elif steps and keras.rows == "touched":
        yield (
            f"gradient_accumulation_steps={steps!r}: rows='touched' cannot apply the "
            "collected gradients of rows that the last step does not look up; use "
            "rows='every', or set it to None"
        )


def _with_common_fields(
    rate: optax.ScalarOrSchedule, keras: _KerasFields
) -> optax.GradientTransformation:
    """Returns the rule of a class, wrapped in Keras' common fields in Keras' order."""
    gradient_steps = int(keras.number("gradient_accumulation_steps")) or 1
    if gradient_steps > 1:
        rate = at_updates(rate, gradient_steps)
    rule = _rule_of_class(rate, keras)
    if keras.number("weight_decay"):
        rule = decay_rows(rule, keras.number("weight_decay"), rate)
    if keras.is_on("clipvalue"):
        rule = optax.chain(clip_gradients(keras.number("clipvalue")), rule)
    if keras.number("loss_scale_factor"):
        rule = optax.chain(optax.scale(1 / keras.number("loss_scale_factor")), rule)
    if keras.rows == "touched" or not _zero_gradient_has_effect(keras):
        return rule
    return every_row(rule, gradient_steps=gradient_steps)


def _zero_gradient_has_effect(keras: _KerasFields) -> bool:
    """Returns True if a gradient of zero changes rows or slot variables."""
    if keras.number("weight_decay") or keras.number("gradient_accumulation_steps"):
        return True
    if keras.class_key == "sgd":
        return bool(keras.number("momentum"))
    return keras.class_key != "adagrad"


def _rule_of_class(rate: Any, keras: _KerasFields) -> optax.GradientTransformation:
    number, fields = keras.number, keras.fields
    match keras.class_key:
        case "sgd" if not number("momentum"):
            return sgd(rate)
        case "sgd":
            # Keras' momentum accumulates the gradient times the rate of its own step.
            momentum = optax.trace(number("momentum"), fields["nesterov"])
            return optax.chain(sgd(rate), momentum)
        case "adagrad":
            start, epsilon = number("initial_accumulator_value"), number("epsilon")
            if start == 0:  # `adagrad` refuses it, as TensorFlow's TPU embedding does.
                return optax.adagrad(rate, start, epsilon)
            return adagrad(rate, start, epsilon=epsilon)
        case "adam":
            return adam(
                rate,
                number("beta_1"),
                number("beta_2"),
                number("epsilon"),
                sum_inside_sqrt=False,
                bias_correction=True,
            )
        case "rmsprop":
            return rmsprop(
                rate,
                rho=number("rho"),
                momentum=number("momentum"),
                epsilon=number("epsilon"),
                centered=fields["centered"],
            )
    own: Any = {field: number(field) for field in _OWN_FIELDS["ftrl"]}
    return ftrl(rate, **own, allow_zero_accumulator=True)


def _adafactor(rate: Any, keras: _KerasFields) -> optax.GradientTransformation:
    is_tf_keras = not {"is_legacy_optimizer", "jit_compile"}.isdisjoint(keras.given)
    clips: dict[str, Any] = {
        field: keras.number(field)
        for field in ("clipnorm", "clipvalue", "global_clipnorm")
        if keras.is_on(field)
    }
    return adafactor(
        rate,
        beta_2_decay=keras.number("beta_2_decay"),
        epsilon_1=keras.number("epsilon_1"),
        epsilon_2=keras.number("epsilon_2"),
        clip_threshold=keras.number("clip_threshold"),
        relative_step=bool(keras.fields["relative_step"]),
        weight_decay=keras.number("weight_decay") or None,
        **clips,
        use_ema=bool(keras.fields["use_ema"]),
        ema_momentum=keras.number("ema_momentum"),
        ema_overwrite_frequency=int(keras.number("ema_overwrite_frequency")) or None,
        loss_scale_factor=keras.fields["loss_scale_factor"],
        gradient_accumulation_steps=keras.fields["gradient_accumulation_steps"],
        mode="lazy" if keras.rows == "touched" else "exact",
        ema_start="initial_values" if is_tf_keras else "first_update",
        clipnorm_of="occurrences" if is_tf_keras else "sum",
    )
