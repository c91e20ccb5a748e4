"""TensorFlow's common optimizer options, as wrappers around any optimizer.

Optimizers in `rules/` get the options from `public_optimizer`, and `with_options` adds
them to other rules. A step first clips gradients and decays rows. Then it runs the rule
on the decayed rows, and clips the updated rows.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from tpu_embedding.argument_checks import invalid, right_names
from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import (
    Check,
    check_hyperparameters,
    check_rule,
    checks_of,
    equal_calls_are_one,
    finite,
    flag,
    non_negative_bound,
    not_nan,
    or_none,
)
from tpu_embedding.optimizers.learning_rates import checked_schedule, learning_rate_at
from tpu_embedding.optimizers.probe import slot_row_shapes
from tpu_embedding.optimizers.row_optimizer import in_sequence, wrap_rule

SlotInitializer = float | Callable[[tuple[int, ...], Any], jax.Array]
SlotInitializers = Mapping[str, SlotInitializer]
"""Maps a slot's name to a number, or to a function of `(shape, dtype)` that returns the
same values for every row."""


def check_initializers(owner: str, initializers: Mapping[Any, SlotInitializer]) -> None:
    """Rejects initial values that are not finite."""
    checks = {
        f"slot_initializers[{name!r}]": finite(value)
        for name, value in initializers.items()
        if not callable(value)
    }
    check_hyperparameters(owner, **checks)


def initial_values(
    initializer: Any, shape: tuple[int, ...], dtype: jnp.dtype
) -> jax.Array:
    if callable(initializer):
        initializer = initializer(shape, dtype)
    return jnp.broadcast_to(jnp.asarray(initializer, dtype), shape)


def with_slot_storage(
    owner: str,
    rule: optax.GradientTransformation,
    dtype: Any,
    initializers: SlotInitializers | None,
) -> optax.GradientTransformation:
    """Applies the options `slot_dtype` and `slot_initializers`."""
    try:
        is_floating = dtype is None or jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        is_floating = False
    if not is_floating:
        must = "be a floating type such as jnp.bfloat16"
        raise invalid(f"{owner}: slot_dtype", must, dtype)
    if not isinstance(initializers, Mapping | None):
        must = "map slot names to values, such as {'accumulators': 0.5}"
        raise invalid(f"{owner}: slot_initializers", must, initializers, kind=TypeError)
    values = dict(initializers or {})
    check_initializers(owner, values)

    def first_values(path: Any, row: jax.ShapeDtypeStruct | None, leaf: Any) -> Any:
        if row is None:
            return leaf
        value = values.get(_name(path), leaf)
        value = initial_values(value, leaf.shape, leaf.dtype)
        return value if dtype is None else _cast(value, dtype)

    def store(inner: optax.GradientTransformation) -> optax.GradientTransformation:
        def init(rows: Any) -> Any:
            # Slot names are checked here, because they are known only from the state.
            slots = slot_row_shapes(inner, rows.shape[1:])
            paths = jax.tree_util.tree_leaves_with_path(slots)
            names = sorted(_name(path) for path, _ in paths)
            for name in values:
                if name not in names:
                    rule = f"name slots, which are {names}"
                    raise invalid(f"{owner}: slot_initializers", rule, name)
            return jax.tree_util.tree_map_with_path(
                first_values, slots, inner.init(rows), is_leaf=lambda leaf: leaf is None
            )

        def update(updates: Any, state: Any, rows: Any) -> tuple[Any, Any]:
            wide = jax.tree.map(lambda leaf: _cast(leaf, jnp.float32), state)
            updates, new = inner.update(updates, wide, rows)
            stored = jax.tree.map(lambda x, old: _cast(x, old.dtype), new, state)
            return updates, stored

        return for_each_array(init, update)

    return wrap_rule(rule, store)


def _cast(leaf: Any, dtype: Any) -> Any:
    """Converts floats to a dtype. Integers and random keys are unchanged."""
    return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def _name(path: Any) -> str:
    """Finds the last field name, key or index in a path."""
    last = path[-1] if path else None
    return str(getattr(last, "name", getattr(last, "key", getattr(last, "idx", ""))))


OptimizerFunction = TypeVar(
    "OptimizerFunction", bound=Callable[..., optax.GradientTransformation]
)
ClipValue = float | tuple[float | None, float | None]

OPTIMIZERS: Final[dict[str, functools.partial[optax.GradientTransformation]]] = {}
"""Optimizer functions with their default learning rates, by name."""

_OPTAX_NAMES: Final = {"b1": "beta_1", "b2": "beta_2", "eps": "epsilon"}


class DecayRowsState(NamedTuple):
    """The state that `weight_decay_factor` wraps around the state of a rule."""

    count: jax.Array
    inner: optax.OptState


class CommonOptions(TypedDict, total=False):
    """Options that most optimizers here accept; see `with_options`."""

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


_OPTION_NAMES: Final = tuple(CommonOptions.__annotations__)


def public_optimizer(
    **ranges: Callable[[Any], Check],
) -> Callable[[OptimizerFunction], OptimizerFunction]:
    """Decorates a function that makes a rule, so that it becomes a public optimizer.

    The decorated function checks its arguments, and also accepts the names `b1`, `b2`
    and `eps`. If the function's parameters end in `**options: Unpack[CommonOptions]`,
    the decorator adds the common options. Pass `ranges` for arguments whose range
    differs from `RANGES`.

    Example:
      >>> import tpu_embedding as te
      >>> te.optimizers.adam(0.1, b1=0.5) is te.optimizers.adam(0.1, beta_1=0.5)
      True
    """
    return functools.partial(_make_public, ranges=ranges)


def _make_public(
    make_optimizer: OptimizerFunction, ranges: Mapping[str, Callable[[Any], Check]]
) -> OptimizerFunction:
    name, checks = make_optimizer.__name__, checks_of(make_optimizer, ranges)
    signature = _with_listed_options(make_optimizer)
    rate_parameter = signature.parameters.get("learning_rate")
    if rate_parameter is not None:
        # Users must pass the rate, as in optax. `OPTIMIZERS` keeps the default for
        # tables that name their optimizer, as in `optimizer="adagrad"`.
        required = rate_parameter.replace(default=inspect.Parameter.empty)
        parameters = {**signature.parameters, "learning_rate": required}
        signature = signature.replace(parameters=list(parameters.values()))

    @functools.wraps(make_optimizer)
    def make_public(*args: Any, **arguments: Any) -> optax.GradientTransformation:
        try:
            bound = signature.bind(*args, **arguments)
        except TypeError as error:
            raise TypeError(f"te.optimizers.{name}: {error}.") from None
        bound.apply_defaults()
        arguments, rate = bound.arguments, None
        if rate_parameter is not None:
            rate = checked_schedule(name, arguments["learning_rate"])
            arguments["learning_rate"] = rate
        check_hyperparameters(name, **{x: checks[x](arguments[x]) for x in checks})
        # `make_optimizer` ignores the options, so this call wraps its rule in them.
        options = {x: arguments[x] for x in _OPTION_NAMES if x in arguments}
        return _with_options(name, make_optimizer(**arguments), rate, **options)

    cast(Any, make_public).__signature__ = signature
    make_public = equal_calls_are_one(make_public)
    if rate_parameter is not None:
        OPTIMIZERS[name] = functools.partial(make_public, rate_parameter.default)
    aliases = {k: x for k, x in _OPTAX_NAMES.items() if x in signature.parameters}
    return cast(OptimizerFunction, right_names(aliases, "te.optimizers")(make_public))


def _with_listed_options(function: Callable[..., Any]) -> inspect.Signature:
    """Lists each common option in a signature instead of `**options`."""
    # `optax.inject_hyperparams` and `help()` need names and defaults.
    options = inspect.signature(_with_options).parameters
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if parameters[-1].kind == inspect.Parameter.VAR_KEYWORD:
        parameters[-1:] = [options[name] for name in _OPTION_NAMES]
    return signature.replace(parameters=parameters)


@equal_calls_are_one
def with_options(
    rule: optax.GradientTransformation,
    *,
    learning_rate: optax.ScalarOrSchedule | None = None,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adds TensorFlow's common options to any optimizer, under TensorFlow's names.

    You can also pass these options as keyword arguments to most optimizers in this
    package. The options work on every platform, whereas TensorFlow 2 ignores or rejects
    most of them.

    Args:
      rule: an optimizer from this package or optax.
      learning_rate: the optimizer's learning rate, needed only for
        `multiply_weight_decay_factor_by_learning_rate`.
      **options: by default, each option leaves the rule unchanged.

        * `use_gradient_accumulation`: False applies the optimizer once per occurrence
          of an id; see `in_sequence`.
        * `clip_weight_min`: lower bound on each element of an updated row. Defaults to
          no bound.
        * `clip_weight_max`: upper bound on each element of an updated row. Defaults to
          no bound.
        * `weight_decay_factor`: fraction of each row that is subtracted before the rule
          runs. None or 0 means no decay.
        * `multiply_weight_decay_factor_by_learning_rate`: True multiplies
          `weight_decay_factor` by the learning rate.
        * `clipvalue`: bounds on each element of the summed gradient of a row. A scalar
          `c` means `(-c, c)`. In a pair, either bound may be None.
        * `slot_dtype`: floating dtype to store slot variables in, such as
          `jnp.bfloat16`. Defaults to the rule's choice. The rule still computes in
          float32. Note that bfloat16 suits only moving averages, because it has 8 bits
          of precision. A sum of squares, such as Adagrad's, stops growing once it is
          256 times as large as the next summand. Integer slots, such as counts, keep
          their dtype. With `optax.inject_hyperparams`, `slot_dtype` must be a static
          argument.
        * `slot_initializers`: maps a slot name, such as `"accumulators"`, to a number
          or a function `(shape, dtype) -> array`. The function must return the same
          values for all rows. `shape` is the slot variable's shape on one shard. Slot
          variables that you omit keep their initial values.
        * `slot_variable_creation_fn`: must be None. Use `slot_initializers` and
          `slot_dtype` instead. Slot variables are always sharded and packed like their
          table.
        * `low_dimensional_packing_status`: no effect; narrow rows are always packed.

    Raises:
      TypeError: if an option has the wrong type.
      ValueError: if an option is out of range, or if options contradict each other.
        Also raised when the state is made, if a name in `slot_initializers` is not the
        name of a slot variable.

    Example:
      >>> rule = with_options(optax.sgd(1.0), clip_weight_min=0.0)
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = rule.update(3 * rows, rule.init(rows), rows)
      >>> (rows + updates).tolist()
      [[0.0, 0.0]]
      >>> rule = with_options(
      ...     optax.adam(0.1), slot_dtype=jnp.bfloat16, slot_initializers={"nu": 0.5}
      ... )
      >>> state = rule.init(jnp.ones((3, 2)))
      >>> state[0].nu.dtype.name, float(state[0].nu[0, 0]), state[0].count.dtype.name
      ('bfloat16', 0.5, 'int32')
    """
    check_rule("with_options", rule)
    if unknown := sorted(set(options) - set(_OPTION_NAMES)):
        must = f"be one of {', '.join(_OPTION_NAMES)}"
        raise invalid("with_options: option", must, unknown[0], kind=TypeError)
    if learning_rate is not None:
        learning_rate = checked_schedule("with_options", learning_rate)
    return _with_options("with_options", rule, learning_rate, **options)


def _with_options(
    owner: str,
    rule: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule | None,
    *,
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
    """Applies the options to a rule. Errors start with `owner`."""
    del low_dimensional_packing_status
    check_hyperparameters(
        owner,
        use_gradient_accumulation=flag(use_gradient_accumulation),
        weight_decay_factor=or_none(finite, weight_decay_factor),
    )
    if slot_variable_creation_fn is not None:
        raise invalid(
            f"{owner}: slot_variable_creation_fn",
            "be None, because slot variables are sharded and packed like their table",
            slot_variable_creation_fn,
            "Set values with slot_initializers, and the dtype with slot_dtype.",
        )
    if clipvalue is not None and not use_gradient_accumulation:
        must = "be None with use_gradient_accumulation=False, which sums no gradients"
        raise invalid(f"{owner}: clipvalue", must, clipvalue, "Remove one of them.")
    decays = isinstance(weight_decay_factor, Tracer) or bool(weight_decay_factor)
    multiplies = multiply_weight_decay_factor_by_learning_rate
    if decays and multiplies and learning_rate is None:
        must = "be a rate with multiply_weight_decay_factor_by_learning_rate=True"
        fix = "Pass learning_rate to with_options."
        raise invalid(f"{owner}: learning_rate", must, None, fix)

    # Wrappers are added from the inside to the outside. TensorFlow's
    # `optimization_parameters.proto` doesn't state an order. The order here reproduces
    # the recorded runs in the tests.
    if slot_dtype is not None or slot_initializers is not None:
        rule = with_slot_storage(owner, rule, slot_dtype, slot_initializers)
    if decays:
        rate = learning_rate if multiplies else None
        rule = wrap_rule(
            rule, lambda inner: _decay_rows(inner, weight_decay_factor, rate)
        )
    if clipvalue is not None:
        clip = _clip_gradients(owner, clipvalue)
        rule = wrap_rule(rule, lambda inner: optax.chain(clip, inner))
    if clip_weight_min is not None or clip_weight_max is not None:
        bounds = {
            "clip_weight_min": clip_weight_min,
            "clip_weight_max": clip_weight_max,
        }
        clip_updated = _clip_rows(owner, bounds)
        rule = wrap_rule(rule, lambda inner: optax.chain(inner, clip_updated))
    return rule if use_gradient_accumulation else in_sequence(rule)


cast(Any, with_options).__signature__ = _with_listed_options(with_options)


def _clip_gradients(owner: str, clipvalue: ClipValue) -> optax.GradientTransformation:
    if not isinstance(clipvalue, tuple):
        check_hyperparameters(owner, clipvalue=non_negative_bound(clipvalue))
        clipvalue = (-1.0 * clipvalue, clipvalue)
    if len(clipvalue) != 2:
        rule, fix = "be a number or a pair (min, max)", "Either bound may be None."
        raise invalid(f"{owner}: clipvalue", rule, clipvalue, fix)
    low, high = clipvalue
    _check_bounds(owner, {"clipvalue's minimum": low, "maximum": high})

    def clip(gradient: Any, rows: Any) -> Any:
        del rows
        return jnp.clip(gradient, low, high)

    return optax.stateless_with_tree_map(clip)


def _decay_rows(
    rule: optax.GradientTransformation,
    factor: Any,
    learning_rate: optax.ScalarOrSchedule | None,
) -> optax.GradientTransformation:
    """Decays rows before a rule sees them: `w -= factor * learning_rate * w`.

    Without a learning rate, the decay is `w -= factor * w`.
    """

    def init(params):
        return DecayRowsState(jnp.zeros((), jnp.int32), rule.init(params))

    def update(updates: Any, state: Any, params: Any = None):
        fraction = jnp.asarray(factor, jnp.float32)
        if learning_rate is not None:
            fraction *= learning_rate_at(learning_rate, state.count)
        lost = jax.tree.map(lambda rows: fraction * rows, params)
        decayed = jax.tree.map(jnp.subtract, params, lost)
        updates, inner = rule.update(updates, state.inner, decayed)
        # The layer adds updates to rows that have not decayed, so updates include the
        # decay.
        updates = jax.tree.map(jnp.subtract, updates, lost)
        return updates, DecayRowsState(state.count + 1, inner)

    return optax.GradientTransformation(init, update)


def _clip_rows(
    owner: str, bounds: Mapping[str, float | None]
) -> optax.GradientTransformation:
    """Clips each element of an updated row, as the last rule in a chain.

    `bounds` maps argument names to values: first the lower bound, then the upper bound.
    """
    _check_bounds(owner, bounds)
    low, high = bounds.values()

    # The layer adds updates to rows. So if a row was far out of bounds, the result can
    # miss the bound by the rounding error of the old value.
    def clip(update: Any, rows: Any) -> Any:
        return jnp.clip(rows + update, low, high) - rows

    return optax.stateless_with_tree_map(clip)


def _check_bounds(owner: str, bounds: Mapping[str, Any]) -> None:
    """Rejects bounds that are NaN or out of order. Either bound may be None."""
    check_hyperparameters(owner, **{x: or_none(not_nan, bounds[x]) for x in bounds})
    (low_name, low), (high_name, high) = bounds.items()
    is_known = not any(x is None or isinstance(x, Tracer) for x in (low, high))
    if is_known and low > high:
        fix = "Swap them, or set one to None for no bound."
        raise invalid(
            f"{owner}: {low_name}", f"be at most {high_name}, {high}", low, fix
        )
