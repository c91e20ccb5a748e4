"""What each Keras optimizer is here: its fields with their defaults, and its rule.

`keras_config` reads configurations, and asks this module for the rules.
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeGuard

import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.keras.schedules import at_updates
from tpu_embedding.optimizers.modes import every_row
from tpu_embedding.optimizers.options import clip_gradients, decay_rows
from tpu_embedding.optimizers.rules._arrays import for_each_array
from tpu_embedding.optimizers.rules.adafactor import adafactor
from tpu_embedding.optimizers.rules.adagrad import ScaleByAdagradState, adagrad
from tpu_embedding.optimizers.rules.adam import adam
from tpu_embedding.optimizers.rules.ftrl import ftrl
from tpu_embedding.optimizers.rules.lion import lion
from tpu_embedding.optimizers.rules.rmsprop import adadelta, rmsprop
from tpu_embedding.optimizers.rules.sgd import sgd

KerasRows = Literal["as_keras", "every", "touched"]
KerasGeneration = Literal["legacy", "tf_keras", "keras_3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasConfig:
    """A configuration as read.

    Attributes:
      key: class in lower case, a key of `KERAS_CLASSES`.
      name: class as Keras has it, or name of the optimizer; for errors.
      given: fields of the configuration.
      fields: these, and the defaults of those that are missing.
      generation: of Keras; `"legacy"` is that of `tf_keras.optimizers.legacy`.
      rows: see `from_keras_config`.
    """

    key: str
    name: str
    given: Mapping[str, Any]
    fields: Mapping[str, Any]
    generation: KerasGeneration
    rows: KerasRows

    @property
    def is_legacy(self) -> bool:
        """Whether the optimizer is a legacy one."""
        return self.generation == "legacy"

    def number(self, field: str) -> float:
        """Returns a field as a number; None, which Keras has for "off", as 0."""
        return float(self.fields[field] or 0.0)

    def is_on(self, field: str) -> bool:
        """Whether a field has an effect in Keras."""
        value = self.fields.get(field)
        if not is_number(value):
            return bool(value)
        # Bounds of 0 and below are no bounds, but for legacy optimizers.
        return self.is_legacy or field == "loss_scale_factor" or value > 0


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a field is a number, of Python or NumPy."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_Make = Callable[[Any, KerasConfig], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KerasClass:
    """A class of Keras that has an equivalent.

    Attributes:
      own: fields beside the common ones, with Keras' defaults.
      make: learning rate and configuration to the rule.
      takes_common_fields: whether the rule has clipping, decay, averages and the like.
    """

    own: Mapping[str, float | bool]
    make: _Make
    takes_common_fields: bool = False


def make_rule(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    """Makes the rule of a configuration that has no problems.

    Args:
      rate: number, or schedule of the step from 0.
      keras: the configuration.
    """
    keras_class = KERAS_CLASSES[keras.key]
    if keras_class.takes_common_fields:
        return keras_class.make(rate, keras)
    gradient_steps = int(keras.number("gradient_accumulation_steps")) or 1
    if gradient_steps > 1:
        rate = at_updates(rate, gradient_steps)
    rule = _with_common_fields(keras_class.make(rate, keras), rate, keras)
    if not _moves_every_row(keras):
        return rule
    return every_row(rule, gradient_steps=gradient_steps)


def _moves_every_row(keras: KerasConfig) -> bool:
    if keras.rows == "touched" or not _zero_gradient_has_effect(keras):
        return False
    return keras.rows == "every" or not _is_lazy_in_keras(keras)


def _zero_gradient_has_effect(keras: KerasConfig) -> bool:
    """Whether rows, or slot variables, change in a step without a gradient."""
    if keras.number("weight_decay") or keras.number("gradient_accumulation_steps"):
        return True
    if keras.key == "sgd":
        return bool(keras.number("momentum"))
    return keras.key != "adagrad"


def _is_lazy_in_keras(keras: KerasConfig) -> bool:
    """Whether Keras updates a table by a kernel `ResourceSparseApply...`, lazily."""
    has_momentum = keras.key in ("sgd", "rmsprop") and keras.number("momentum") > 0
    return keras.is_legacy and (has_momentum or keras.key in ("adadelta", "ftrl"))


def _with_common_fields(
    rule: optax.GradientTransformation,
    rate: optax.ScalarOrSchedule,
    keras: KerasConfig,
) -> optax.GradientTransformation:
    """Adds Keras' common fields around a rule, in Keras' order."""
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
    # The rate is in Keras' momentum, which matters where it changes.
    return optax.chain(
        sgd(rate), optax.trace(keras.number("momentum"), keras.fields["nesterov"])
    )


def _adagrad(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    start, epsilon = keras.number("initial_accumulator_value"), keras.number("epsilon")
    if keras.is_legacy:
        return optax.chain(
            _scale_by_legacy_adagrad(start, epsilon),
            optax.scale_by_learning_rate(rate),
        )
    if start == 0:  # Which the rule of TensorFlow's TPU embeddings refuses.
        return optax.adagrad(rate, start, epsilon)
    return adagrad(rate, start, epsilon=epsilon)


def _scale_by_legacy_adagrad(
    initial_accumulator_value: float, epsilon: float
) -> optax.GradientTransformation:
    """Adagrad of the kernel `ResourceApplyAdagradV2`: `g / (sqrt(a) + epsilon)`."""

    def init(params: Any) -> Any:
        return ScaleByAdagradState(jnp.full_like(params, initial_accumulator_value))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        accumulators = state.accumulators + jnp.square(updates)
        steps = updates / (jnp.sqrt(accumulators) + epsilon)
        return steps, ScaleByAdagradState(accumulators)

    return for_each_array(init, update)


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
    if keras.is_legacy and not momentum:  # Not by a kernel, and with another epsilon.
        return optax.rmsprop(rate, rho, epsilon, centered=centered, eps_in_sqrt=False)
    return rmsprop(rate, rho, momentum, epsilon, centered=centered)


def _ftrl(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    own: Any = {field: keras.number(field) for field in KERAS_CLASSES["ftrl"].own}
    return ftrl(rate, **own, allow_zero_accumulator=True)


def _adafactor(rate: Any, keras: KerasConfig) -> optax.GradientTransformation:
    is_keras_2 = keras.generation == "tf_keras"
    clips: dict[str, Any] = {
        field: keras.number(field)
        for field in ("clipnorm", "clipvalue", "global_clipnorm")
        if keras.is_on(field)
    }
    return adafactor(
        rate,
        keras.number("beta_2_decay"),
        keras.number("epsilon_1"),
        keras.number("epsilon_2"),
        keras.number("clip_threshold"),
        bool(keras.fields["relative_step"]),
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
    "decay": 0.0,
}

_ADAM: Final = {
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "amsgrad": False,
    "adaptive_epsilon": False,
}
KERAS_CLASSES: Final[Mapping[str, KerasClass]] = {
    "sgd": KerasClass(own={"momentum": 0.0, "nesterov": False}, make=_sgd),
    "adagrad": KerasClass(
        own={"initial_accumulator_value": 0.1, "epsilon": 1e-7}, make=_adagrad
    ),
    "adam": KerasClass(own=_ADAM, make=_adam),
    "adamw": KerasClass(own={**_ADAM, "weight_decay": 0.004}, make=_adam),
    "rmsprop": KerasClass(
        own={"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
        make=_rmsprop,
    ),
    "adadelta": KerasClass(
        own={"rho": 0.95, "epsilon": 1e-7},
        make=lambda rate, keras: adadelta(
            rate, keras.number("rho"), keras.number("epsilon")
        ),
    ),
    "ftrl": KerasClass(
        own={
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
        own={"beta_1": 0.9, "beta_2": 0.99},
        make=lambda rate, keras: lion(
            rate, keras.number("beta_1"), keras.number("beta_2")
        ),
    ),
    "adafactor": KerasClass(
        own={
            "beta_2_decay": -0.8,
            "epsilon_1": 1e-30,
            "epsilon_2": 1e-3,
            "clip_threshold": 1.0,
            "relative_step": True,
        },
        make=_adafactor,
        takes_common_fields=True,
    ),
}
