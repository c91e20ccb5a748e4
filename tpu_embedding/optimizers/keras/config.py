"""Keras' optimizer configurations, translated into rules of this package.

Who leaves Keras has `optimizer.get_config()`, or what `keras.saving` or
`tf_keras.optimizers.serialize` made of the optimizer. The formulas are those of
`keras/src/optimizers` of Keras 3.15, and of `tf_keras/src/optimizers` 2.21 with its
folder `legacy`, whose optimizers differ: in `decay`, in where Adagrad and RMSprop add
epsilon, and in which rows of a table they move.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, get_args

import numpy as np
import optax

from tpu_embedding.optimizers.keras.classes import (
    COMMON_FIELDS,
    KERAS_CLASSES,
    KerasConfig,
    KerasGeneration,
    KerasRows,
    is_number,
    make_rule,
)
from tpu_embedding.optimizers.keras.schedules import (
    inverse_time_decay,
    keras_learning_rate,
)


def from_keras_config(
    config: Mapping[str, Any],
    *,
    class_name: str | None = None,
    rows: KerasRows = "as_keras",
) -> optax.GradientTransformation:
    """Translates the configuration of a Keras optimizer, or says why it cannot.

    | Keras | here |
    |---|---|
    | SGD | `sgd`, followed by `optax.trace` if there is momentum |
    | Adagrad | `adagrad` with epsilon |
    | Adam, AdamW | `adam(sum_inside_sqrt=False, bias_correction=True)` |
    | RMSprop, Adadelta, Ftrl, Lion, Adafactor | the rule of that name |

    Keras' optimizers move every row of a table in each step, also rows that no id
    names: moments decay, weights decay, and Ftrl computes each row anew from its slots.
    That costs a pass over table and slot variables in each step. So it is done only
    for rules and fields that need it, and `rows="touched"` has the lazy form, which
    is another algorithm, and the usual one on TPUs: slots and rows move in the steps
    that look the row up. Gradients are always those of the loss, summed over the
    occurrences of an id before they are clipped.

    `decay`, `weight_decay`, `clipvalue`, `loss_scale_factor` and
    `gradient_accumulation_steps` are honoured; `clipnorm`, `global_clipnorm`, `use_ema`
    and `amsgrad` have no equivalent but for those that Adafactor takes. `name`,
    `jit_compile` and `is_legacy_optimizer` have no effect on numbers. With
    `loss_scale_factor`, the loss must be multiplied by it, as Keras does. Gradients of
    several steps are collected by the layer (`every_row`), not by the bare rule.

    Args:
      config: from `get_config()`, or the serialized form, a mapping with `class_name`
        and `config`. A field that is missing has Keras' default, but `learning_rate`:
        a number, a serialized schedule of Keras, or a function of the step from 0.
      class_name: Keras' class, such as `"Adam"`; None: taken from the serialized form,
        else from the field `name`, which Keras makes from the class unless told
        otherwise. A configuration is of a legacy optimizer if it has `decay`, says so,
        or has a module that says so.
      rows: `"every"`, `"touched"`, or `"as_keras"`: the rows that Keras moves. These
        are every row, but the touched ones in legacy Adadelta, Ftrl, and SGD and
        RMSprop with momentum, whose kernels for the gradient of an `Embedding` are
        lazy.

    Returns:
      The rule. Tables share a stack if they share one value, so call this once for all
      of them.

    Raises:
      ValueError: if the class is unknown or has no equivalent; else, in one error, for
        each field without an equivalent, its value, why, and the way out.

    Example:
      >>> import jax.numpy as jnp
      >>> config = {"name": "SGD", "learning_rate": 0.5, "decay": 1.0, "momentum": 0.0}
      >>> rule = from_keras_config(config)
      >>> rows = jnp.ones((1, 2))
      >>> state = rule.init(rows)
      >>> _, state = rule.update(rows, state, rows)
      >>> rule.update(rows, state, rows)[0].tolist()
      [[-0.25, -0.25]]
    """
    keras = _read(config, class_name, rows)
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
    if keras.number("decay"):
        rate = inverse_time_decay(rate, keras.number("decay"))
    return make_rule(rate, keras)


_WITHOUT_EFFECT: Final = {"name", "jit_compile", "is_legacy_optimizer"}

_REFUSED: Final[Mapping[str, tuple[str, str]]] = {
    "amsgrad": (
        "no rule here keeps the largest velocity",
        "set it to False, or use optax.amsgrad, which corrects the bias first",
    ),
    "adaptive_epsilon": (
        "no rule here scales epsilon by the bias correction",
        "set it to False, or use optax.adam, which has epsilon so",
    ),
    "clipnorm": (
        "it needs the norm of the gradient of the whole table",
        "set it to None, and bound the gradient's elements by clipvalue",
    ),
    "global_clipnorm": (
        "it needs the norm of the gradients of all variables of the model",
        "set it to None, and bound the gradient's elements by clipvalue",
    ),
    "use_ema": (
        "no rule here keeps a moving average of the rows",
        "set it to False, and average checkpoints instead",
    ),
}

_WITHOUT_EQUIVALENT: Final[Mapping[str, str]] = {
    "adamax": "no rule here adds epsilon to a maximum norm; nearest is optax.adamax, "
    "which adds it to each gradient",
    "nadam": "its momentum follows a schedule of its own; nearest is optax.nadam, "
    "whose momentum is constant, or Adam",
    "lamb": "its steps are scaled by the norm of the whole table; nearest is lamb of "
    "this package, by that of each row",
    "muon": 'it trains variables with "embedding" in their path by AdamW, others by '
    "whole matrices; give the configuration of AdamW with the learning_rate times "
    "adam_lr_ratio, adam_beta_1, adam_beta_2, epsilon, and the weight_decay "
    "adam_weight_decay / adam_lr_ratio",
    "schedulefreeadamw": "it trains an average of the rows; nearest is AdamW",
    "lossscaleoptimizer": "it scales the loss for float16, and tables train in "
    "float32; give its inner_optimizer",
    "multioptimizer": "it holds several optimizers; give that of the tables",
}


def _read(
    config: Mapping[str, Any], class_name: str | None, rows: KerasRows
) -> KerasConfig:
    if not isinstance(config, Mapping):
        raise ValueError(
            "config must be a mapping, from get_config() of the Keras optimizer, got "
            f"{config!r}."
        )
    is_serialized = isinstance(config.get("config"), Mapping)
    given: Mapping[str, Any] = config["config"] if is_serialized else config
    name = class_name
    if name is None:
        name = _serialized_name(config) if is_serialized else given.get("name")
    # A second optimizer of a class is named adam_1, one of AdamW adam_w. Keras 2
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
            f"{name!r}; say which it is by class_name, or write the rule as an optax "
            "transformation."
        )
    return KerasConfig(
        key=key,
        name=str(name),
        given=given,
        fields={**COMMON_FIELDS, **KERAS_CLASSES[key].own, **given},
        generation=_generation(config, given),
        rows=rows,
    )


def _generation(config: Mapping[str, Any], given: Mapping[str, Any]) -> KerasGeneration:
    says_so = given.get("is_legacy_optimizer") or "legacy" in str(config.get("module"))
    if says_so or "decay" in given:
        return "legacy"
    is_second = "is_legacy_optimizer" in given or "jit_compile" in given
    return "tf_keras" if is_second else "keras_3"


def _serialized_name(config: Mapping[str, Any]) -> Any:
    registered_name = str(config.get("registered_name") or "")
    is_users_own = ">" in registered_name and not registered_name.startswith("Custom>")
    if is_users_own or "class_name" not in config:
        return registered_name
    return config["class_name"]


def _problems(keras: KerasConfig) -> Iterator[str]:
    if keras.rows not in get_args(KerasRows):
        yield f"rows={keras.rows!r}: must be one of {list(get_args(KerasRows))}"
    keras_class = KERAS_CLASSES[keras.key]
    own = keras_class.own
    known = {*own, *COMMON_FIELDS, *_WITHOUT_EFFECT, "learning_rate"}
    for field in sorted(set(keras.given) - known):
        yield (
            f"{field}={keras.given[field]!r}: its effect is not known here; take it "
            "out if it has none"
        )
    for field, default in {**COMMON_FIELDS, **own}.items():
        yield from _type_problems(field, keras.fields[field], default)
    if keras.key == "adafactor":
        yield from _adafactor_problems(keras)
    else:
        yield from _common_problems(keras)


def _common_problems(keras: KerasConfig) -> Iterator[str]:
    for field, (why, way_out) in _REFUSED.items():
        if keras.is_on(field):
            yield f"{field}={keras.fields[field]!r}: {why}; {way_out}"
    for field in ("clipvalue", "loss_scale_factor"):
        value = keras.fields[field]
        if is_number(value) and value <= 0 and keras.is_on(field):
            yield f"{field}={value!r}: must be positive, or None, which turns it off"
    yield from _accumulation_problems(keras)


def _adafactor_problems(keras: KerasConfig) -> Iterator[str]:
    decays_all = keras.is_on("weight_decay") and keras.rows != "touched"
    moves_all = keras.is_on("use_ema") or decays_all
    if keras.generation == "tf_keras" and keras.is_on("clipnorm") and moves_all:
        yield (
            f"clipnorm={keras.fields['clipnorm']!r}: tf_keras takes the norm over all "
            "occurrences of ids, which a pass over every row for use_ema or "
            "weight_decay does not see; turn one of them off, or call adafactor "
            "with clipnorm_of='sum'"
        )


def _type_problems(field: str, value: Any, default: Any) -> Iterator[str]:
    if isinstance(default, bool):
        if not isinstance(value, bool | np.bool_):
            yield f"{field}={value!r}: must be True or False"
    elif not (is_number(value) or (value is None and field in COMMON_FIELDS)):
        yield (
            f"{field}={value!r}: must be a number; give one, as float(...) of a tensor"
        )


def _accumulation_problems(keras: KerasConfig) -> Iterator[str]:
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
            f"gradient_accumulation_steps={steps!r}: collected gradients reach rows in "
            "steps that do not look them up, against rows='touched'; use rows='every', "
            "or set it to None"
        )
