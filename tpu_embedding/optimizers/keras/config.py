"""Translation of Keras optimizer configurations into optimizers of this package.

Users who leave Keras have `optimizer.get_config()`, or the serialized form that
`keras.saving` or `tf_keras.optimizers.serialize` makes. The formulas are those of
`keras/src/optimizers` of Keras 3.15, and of `tf_keras/src/optimizers` 2.21.
Optimizers older than Keras 2.11, today in `tf_keras.optimizers.legacy`, are refused:
they have other formulas.
"""

import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import numpy as np
import optax

from tpu_embedding.optimizers.keras.classes import (
    COMMON_FIELDS,
    KERAS_CLASSES,
    KerasConfig,
    KerasRows,
    is_number,
    make_optimizer,
)
from tpu_embedding.optimizers.keras.schedules import keras_learning_rate
from tpu_embedding.optimizers.keras_instances import (
    KerasOptimizer,
    is_keras_optimizer,
    serialized_form,
)


def from_keras_config(
    config: Mapping[str, Any] | KerasOptimizer,
    *,
    class_name: str | None = None,
    rows: KerasRows = "every",
) -> optax.GradientTransformation:
    """Translates the configuration of a Keras optimizer, or raises with every reason.

    The equivalents are:

    * `SGD`: `sgd`, followed by `optax.trace` if there is momentum.
    * `Adagrad`: `adagrad` with an epsilon.
    * `Adam`, `AdamW`: `adam(sum_inside_sqrt=False, bias_correction=True)`.
    * `RMSprop`, `Adadelta`, `Ftrl`, `Lion`, `Adafactor`: the optimizer of that name.

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
      config: from `get_config()`, or the serialized form, a mapping with `class_name`
        and `config`. A missing field has Keras' default. `learning_rate` is required: a
        number, a serialized Keras schedule, or a function of the step counted from 0.
        Or the Keras optimizer itself, whose `get_config()` is called once, here.
      class_name: Keras' class, such as `"Adam"`. None takes it from the serialized
        form, or else from the field `name`, which Keras derives from the class by
        default.
      rows: `"every"` moves every row, as Keras does. `"touched"` moves the rows that
        the step looks up.

    Returns:
      The optimizer. Equal configurations give equal optimizers, whose tables share a
      stack.

    Raises:
      ValueError: if the class is unknown or has no equivalent; if the optimizer is
        older than Keras 2.11; or if fields have no equivalent. One error then lists
        each such field with its value, the reason, and the way out.

    Example:
      >>> import jax.numpy as jnp
      >>> config = {"name": "SGD", "learning_rate": 0.5, "momentum": 0.0}
      >>> rule = from_keras_config(config)
      >>> rows = jnp.ones((1, 2))
      >>> rule.update(rows, rule.init(rows), rows)[0].tolist()
      [[-0.5, -0.5]]
    """
    if is_keras_optimizer(config):
        config = serialized_form(config)
    keras = _parse(config, class_name, rows)
    problems = list(_problems(keras))
    rate: Any = None
    try:
        rate = keras_learning_rate(keras.fields.get("learning_rate"))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError(
            f"Keras' {keras.name} has no equivalent with these values:"
            + "".join(f"\n  {problem}." for problem in problems)
        )
    return make_optimizer(rate, keras)


def rule_of_keras(optimizer: KerasOptimizer) -> optax.GradientTransformation:
    """Returns the rule of a Keras optimizer that a table or layer is given.

    Calls with one optimizer return the same value, so its tables are stacked. If its
    fields have changed since the last call, they are read again.

    Raises:
      ValueError: if the optimizer has no equivalent; see `from_keras_config`.
    """
    fields = optimizer.get_config()
    known = _RULES.get(optimizer)
    if known is not None and known[0] == fields:
        return known[1]
    rule = from_keras_config(optimizer)
    _RULES[optimizer] = fields, rule
    return rule


_RULES: Final[
    weakref.WeakKeyDictionary[
        KerasOptimizer, tuple[dict[str, Any], optax.GradientTransformation]
    ]
] = weakref.WeakKeyDictionary()
"""Fields and rule of each Keras optimizer that a table or layer was given."""

_WITHOUT_EFFECT: Final = {"name", "jit_compile", "is_legacy_optimizer"}

_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "amsgrad": (
        "no optimizer here keeps the largest velocity",
        "set it to False, or use optax.amsgrad, which corrects the bias before the "
        "maximum",
    ),
    "adaptive_epsilon": (
        "no optimizer here scales epsilon by the bias correction",
        "set it to False, or use optax.adam, which scales epsilon so",
    ),
    "clipnorm": (
        "it needs the norm of the gradient of the whole table",
        "set it to None, and clip before the translation: "
        "optax.chain(optax.clip_by_global_norm({value}), "
        "te.optimizers.from_keras_config(config)); or bound the gradient's elements by "
        "clipvalue",
    ),
    "global_clipnorm": (
        "it needs the norm of the gradients of all variables of the model",
        "set it to None, and clip the gradients of the model in the step: "
        "gradients = te.gradients.clip_by_global_norm(gradients, {value}); or bound "
        "the gradient's elements by clipvalue",
    ),
    "use_ema": (
        "only Adafactor keeps a moving average of the rows here",
        "set it to False, and average checkpoints instead",
    ),
}

_WITHOUT_EQUIVALENT: Final[Mapping[str, str]] = {
    "adamax": "no optimizer here adds epsilon to a maximum norm; the nearest is "
    "optax.adamax, which adds it to each gradient",
    "nadam": "its momentum follows its own schedule; the nearest is optax.nadam, "
    "whose momentum is constant, or Adam",
    "lamb": "its steps are scaled by the norm of the whole table; the nearest is lamb "
    "of this package, which takes the norm of each row",
    "muon": 'it trains variables with "embedding" in their path by AdamW, others as '
    "whole matrices; pass a configuration of AdamW with learning_rate * adam_lr_ratio, "
    "adam_beta_1, adam_beta_2, epsilon, and the weight_decay "
    "adam_weight_decay / adam_lr_ratio",
    "schedulefreeadamw": "it trains an average of the rows; the nearest is AdamW",
    "lossscaleoptimizer": "it scales the loss for float16, but tables train in "
    "float32; give its inner_optimizer",
    "multioptimizer": "it holds several optimizers; give that of the tables",
}


def _parse(config: Any, class_name: str | None, rows: KerasRows) -> KerasConfig:
    """Returns the parsed configuration, with the defaults of Keras' class.

    Raises:
      ValueError: if the class is unknown or has no equivalent.
    """
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a Keras optimizer, or a mapping as get_config() of one "
            f"returns it, got {config!r}."
        )
    is_serialized = isinstance(config.get("config"), Mapping)
    given: Mapping[str, Any] = config["config"] if is_serialized else config
    name = class_name
    if name is None:
        name = _serialized_name(config) if is_serialized else given.get("name")
    # Keras names the second Adam of a session adam_1, and an AdamW adam_w. Keras 2
    # registers its own classes as "Custom>Adam".
    key = re.sub(r"_\d+$", "", str(name)).removeprefix("Custom>")
    key = key.replace("_", "").lower()
    if key in _WITHOUT_EQUIVALENT:
        raise ValueError(
            f"Keras' {name} has no equivalent: {_WITHOUT_EQUIVALENT[key]}."
        )
    if key not in KERAS_CLASSES:
        raise ValueError(
            f"config must be of one of Keras' classes {sorted(KERAS_CLASSES)}, got "
            f"{name!r}; say which by class_name, or write the optimizer as an optax "
            "transformation."
        )
    _check_generation(config, given)
    is_tf_keras = "is_legacy_optimizer" in given or "jit_compile" in given
    return KerasConfig(
        class_key=key,
        name=str(name),
        given_fields=given,
        fields={**COMMON_FIELDS, **KERAS_CLASSES[key].own_fields, **given},
        generation="tf_keras" if is_tf_keras else "keras_3",
        rows=rows,
    )


def _check_generation(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises ValueError for the configuration of an optimizer before Keras 2.11."""
    signs = {
        "decay": "decay" in given,
        "is_legacy_optimizer": given.get("is_legacy_optimizer"),
        "module": "legacy" in str(config.get("module")),
    }
    for field, says_so in signs.items():
        if says_so:
            value = given.get(field, config.get(field))
            raise ValueError(
                "config must be of an optimizer of Keras 2.11 or later, got "
                f"{field}={value!r} of an older one, whose formulas differ. Make the "
                "optimizer anew with tf_keras.optimizers or Keras 3, and pass its "
                "get_config(). Write decay as the schedule "
                "InverseTimeDecay(learning_rate, 1, decay)."
            )


def _serialized_name(config: Mapping[str, Any]) -> Any:
    """Returns the class that the serialized form names."""
    registered_name = str(config.get("registered_name") or "")
    is_users_own = ">" in registered_name and not registered_name.startswith("Custom>")
    if is_users_own or "class_name" not in config:
        return registered_name
    return config["class_name"]


def _problems(keras: KerasConfig) -> Iterator[str]:
    """Yields one sentence for each field that cannot be translated."""
    if keras.rows not in get_args(KerasRows):
        yield f"rows={keras.rows!r}: must be one of {list(get_args(KerasRows))}"
    keras_class = KERAS_CLASSES[keras.class_key]
    own = keras_class.own_fields
    known = {*own, *COMMON_FIELDS, *_WITHOUT_EFFECT, "learning_rate"}
    for field in sorted(set(keras.given_fields) - known):
        yield (
            f"{field}={keras.given_fields[field]!r}: the field is not known here; "
            "remove it if it has no effect on numbers"
        )
    for field, default in {**COMMON_FIELDS, **own}.items():
        yield from _type_problems(field, keras.fields[field], default)
    if keras.class_key == "adafactor":
        yield from _adafactor_problems(keras)
    else:
        yield from _common_problems(keras)


def _common_problems(keras: KerasConfig) -> Iterator[str]:
    """Yields the problems of fields that most classes have."""
    for field, (why, way_out) in _REFUSED.items():
        if keras.is_on(field):
            value = keras.fields[field]
            yield f"{field}={value!r}: {why}; {way_out.format(value=value)}"
    scale = keras.fields["loss_scale_factor"]
    if is_number(scale) and scale <= 0:
        yield (
            f"loss_scale_factor={scale!r}: must be positive, or None, which turns it "
            "off"
        )
    yield from _accumulation_problems(keras)


def _adafactor_problems(keras: KerasConfig) -> Iterator[str]:
    """Yields the problems of Adafactor's fields."""
    steps = keras.fields["gradient_accumulation_steps"]
    overwrites = keras.is_on("use_ema") and keras.is_on("ema_overwrite_frequency")
    if steps and overwrites:
        yield (
            f"ema_overwrite_frequency={keras.fields['ema_overwrite_frequency']!r}: "
            "Keras overwrites variables in steps that only collect gradients, too; set "
            "it to None, and call finalize_variable_values after training"
        )
    if steps and keras.is_on("global_clipnorm"):
        yield (
            f"global_clipnorm={keras.fields['global_clipnorm']!r}: a table does not "
            "know the norm of all gradients that the model collects; set it to None, "
            "or collect gradients by te.gradients.add and clip them by "
            "te.gradients.clip_by_global_norm"
        )
    decays_all = keras.is_on("weight_decay") and keras.rows != "touched"
    moves_all = overwrites or decays_all
    if keras.generation == "tf_keras" and keras.is_on("clipnorm") and moves_all:
        yield (
            f"clipnorm={keras.fields['clipnorm']!r}: tf_keras takes the norm over all "
            "occurrences of ids, but ema_overwrite_frequency and weight_decay pass "
            "over every row, where only summed gradients are known; turn one of them "
            "off, or call adafactor with clipnorm_of='sum'"
        )


def _type_problems(field: str, value: Any, default: Any) -> Iterator[str]:
    """Yields a problem if a field's type is not that of its default."""
    if isinstance(default, bool):
        if not isinstance(value, bool | np.bool_):
            yield f"{field}={value!r}: must be True or False"
    elif not (is_number(value) or (value is None and field in COMMON_FIELDS)):
        yield (f"{field}={value!r}: must be a number; convert a tensor by float(...)")


def _accumulation_problems(keras: KerasConfig) -> Iterator[str]:
    """Yields the problems of `gradient_accumulation_steps`."""
    steps = keras.fields["gradient_accumulation_steps"]
    if not steps or not is_number(steps):
        return
    if steps != int(steps) or steps < 2:
        yield (
            f"gradient_accumulation_steps={steps!r}: must be None or an integer of at "
            "least 2, as in Keras"
        )
    elif keras.rows == "touched":
        yield (
            f"gradient_accumulation_steps={steps!r}: rows='touched' cannot apply the "
            "collected gradients of rows that the last step does not look up; use "
            "rows='every', or set it to None"
        )
