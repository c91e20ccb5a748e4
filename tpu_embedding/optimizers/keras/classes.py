"""Keras' optimizer classes: their fields with defaults, and their equivalents here.

`config` parses and validates a configuration, then calls `make_optimizer`.
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeGuard

import optax

from tpu_embedding.optimizers.keras.schedules import at_updates
from tpu_embedding.optimizers.modes import every_row
from tpu_embedding.optimizers.options import clip_gradients, decay_rows
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import adagrad
from tpu_embedding.optimizers.rules.adam import adam
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.lion import lion
from tpu_embedding.optimizers.rules.rmsprop import adadelta, rmsprop
from tpu_embedding.optimizers.rules.sgd import sgd

KerasRows = Literal["every", "touched"]
KerasGeneration = Literal["tf_keras", "keras_3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasConfig:
    """A parsed configuration of a Keras optimizer.

    Attributes:
      class_key: class in lower case, a key of `KERAS_CLASSES`.
      name: class or optimizer name as the configuration has it, for errors.
      given_fields: fields of the configuration.
      fields: the given fields, and Keras' defaults of the missing ones.
      generation: generation of Keras that wrote the configuration.
      rows: see `from_keras_config`.
    """

    class_key: str
    name: str
    given_fields: Mapping[str, Any]
    fields: Mapping[str, Any]
    generation: KerasGeneration
    rows: KerasRows

    def number(self, field: str) -> float:
        """Returns a field as a float; None, which turns a field off, becomes 0."""
        return float(self.fields[field] or 0.0)

    def is_on(self, field: str) -> bool:
        """Returns True if the field's value has an effect in Keras."""
        value = self.fields.get(field)
        # Keras ignores a bound of 0 or below.
        return value > 0 if is_number(value) else bool(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for a real number of Python or NumPy; a boolean is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_Make = Callable[[Any, KerasConfig], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasClass:
    """A Keras optimizer class that has an equivalent in this package.

    Attributes:
      own_fields: fields beside `COMMON_FIELDS`, with Keras' defaults.
      make: function of learning rate and configuration that returns the optimizer.
      handles_common_fields: True if `make` handles `COMMON_FIELDS` itself.
    """

    own_fields: Mapping[str, float | bool]
    make: _Make
    handles_common_fields: bool = False


def make_optimizer(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    """Returns the optimizer of a validated configuration.

    Args:
      rate: scalar, or schedule of the step counted from 0.
      keras: the configuration.
    """
    keras_class = KERAS_CLASSES[keras.class_key]
    if keras_class.handles_common_fields:
        return keras_class.make(rate, keras)
    gradient_steps = int(keras.number("gradient_accumulation_steps")) or 1
    if gradient_steps > 1:
        rate = at_updates(rate, gradient_steps)
    rule = _with_common_fields(keras_class.make(rate, keras), rate, keras)
    if keras.rows == "touched" or not _zero_gradient_has_effect(keras):
        return rule
    return every_row(rule, gradient_steps=gradient_steps)


def _zero_gradient_has_effect(keras: KerasConfig) -> bool:
    """Returns True if a gradient of zero changes rows or slot variables."""
    if keras.number("weight_decay") or keras.number("gradient_accumulation_steps"):
        return True
    if keras.class_key == "sgd":
        return bool(keras.number("momentum"))
    return keras.class_key != "adagrad"


def _with_common_fields(
    rule: optax.GradientTransformation,
    rate: optax.ScalarOrSchedule,
    keras: KerasConfig,
) -> optax.GradientTransformation:
    """Wraps an optimizer in Keras' common fields, in Keras' order."""
    if keras.number("weight_decay"):
        rule = decay_rows(rule, keras.number("weight_decay"), rate)
    if keras.is_on("clipvalue"):
        rule = optax.chain(clip_gradients(keras.number("clipvalue")), rule)
    if keras.number("loss_scale_factor"):
        rule = optax.chain(optax.scale(1 / keras.number("loss_scale_factor")), rule)
    return rule


def _sgd(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    if not keras.number("momentum"):
        return sgd(rate)
    # Keras' momentum accumulates the gradient times the rate of its own step.
    return optax.chain(
        sgd(rate), optax.trace(keras.number("momentum"), keras.fields["nesterov"])
    )


def _adagrad(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    start, epsilon = keras.number("initial_accumulator_value"), keras.number("epsilon")
    if start == 0:  # `adagrad` refuses it, as TensorFlow's TPU embedding does.
        return optax.adagrad(rate, start, epsilon)
    return adagrad(rate, start, epsilon=epsilon)


def _adam(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    return adam(
        rate,
        keras.number("beta_1"),
        keras.number("beta_2"),
        keras.number("epsilon"),
        sum_inside_sqrt=False,
        bias_correction=True,
    )


def _rmsprop(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    rho, momentum = keras.number("rho"), keras.number("momentum")
    epsilon, centered = keras.number("epsilon"), keras.fields["centered"]
    return rmsprop(rate, rho=rho, momentum=momentum, epsilon=epsilon, centered=centered)


def _ftrl(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    own_fields: Any = {
        field: keras.number(field) for field in KERAS_CLASSES["ftrl"].own_fields
    }
    return ftrl(rate, **own_fields, allow_zero_accumulator=True)


def _adafactor(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    is_keras_2 = keras.generation == "tf_keras"
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
        ema_start="initial_values" if is_keras_2 else "first_update",
        clipnorm_of="occurrences" if is_keras_2 else "sum",
    )


COMMON_FIELDS: Final[Mapping[str, Any]] = {
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

_ADAM: Final = {
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "amsgrad": False,
    "adaptive_epsilon": False,
}
KERAS_CLASSES: Final[Mapping[str, KerasClass]] = {
    "sgd": KerasClass(own_fields={"momentum": 0.0, "nesterov": False}, make=_sgd),
    "adagrad": KerasClass(
        own_fields={"initial_accumulator_value": 0.1, "epsilon": 1e-7}, make=_adagrad
    ),
    "adam": KerasClass(own_fields=_ADAM, make=_adam),
    "adamw": KerasClass(own_fields={**_ADAM, "weight_decay": 0.004}, make=_adam),
    "rmsprop": KerasClass(
        own_fields={"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
        make=_rmsprop,
    ),
    "adadelta": KerasClass(
        own_fields={"rho": 0.95, "epsilon": 1e-7},
        make=lambda rate, keras: adadelta(
            rate, keras.number("rho"), keras.number("epsilon")
        ),
    ),
    "ftrl": KerasClass(
        own_fields={
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.0,
            "l2_regularization_strength": 0.0,
            "l2_shrinkage_regularization_strength": 0.0,
            "beta": 0.0,
        },
        make=_ftrl,
    ),
    "lion": KerasClass(
        own_fields={"beta_1": 0.9, "beta_2": 0.99},
        make=lambda rate, keras: lion(
            rate, keras.number("beta_1"), keras.number("beta_2")
        ),
    ),
    "adafactor": KerasClass(
        own_fields={
            "beta_2_decay": -0.8,
            "epsilon_1": 1e-30,
            "epsilon_2": 1e-3,
            "clip_threshold": 1.0,
            "relative_step": True,
        },
        make=_adafactor,
        handles_common_fields=True,
    ),
}
