"""Sets hyper-parameters before each step, as TensorFlow does with callable rates."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


def set_each_step(
    step: Callable[..., Any], **functions: Callable[[], Any]
) -> Callable[..., Any]:
    """Returns a train step that first asks functions for hyper-parameters of tables.

    TensorFlow takes a learning rate such as `lambda: rate` and calls it on the host in
    each step. Here a step is compiled, so a function can only be called outside of it.
    The tables' optimizer holds the value in its state, by `optax.inject_hyperparams`. A
    new value takes part in the next step, without recompilation.

    Args:
      step: compiled train step, or any function that runs one. Among its arguments is
        a `tpu_embedding.Optimizer`, or a `TrainState` of `tpu_embedding.linen`.
      **functions: name of a hyper-parameter to a function without arguments that
        returns its value. Each function is called once per step. In a job, all
        processes must get equal values.

    Returns:
      A function with the arguments and results of `step`. Do not compile it.

    Raises:
      TypeError: if an argument is no function without arguments. When called: if no
        argument holds the tables' optimizers; or under `jit`.
      ValueError: when called, if no table's optimizer holds such a hyper-parameter.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> rule = optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=0.0)
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> model = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = te.Optimizer(model, optax.adam(1e-3))
      >>> @nnx.jit
      ... def train_step(model, optimizer, ids):
      ...     loss, gradients = te.value_and_grad(lambda m: m(ids).sum())(model)
      ...     optimizer.update(model, gradients)
      ...     return loss
      >>> rates = iter([0.1, 0.05])
      >>> step = set_each_step(train_step, learning_rate=lambda: next(rates))
      >>> losses = [step(model, optimizer, model.prepare([1, 2])) for _ in range(2)]
    """
    for name, function in functions.items():
        _check_takes_nothing(name, function)

    @functools.wraps(step, updated=())
    def step_with_values(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if not any(map(_has_optimizers, given)):
            raise TypeError(
                "te.nn.set_each_step: the step must be called with a te.Optimizer or "
                "a te.linen.TrainState, whose tables have the hyper-parameters, got "
                f"{[type(x).__name__ for x in given]}."
            )
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
            raise TypeError(
                "te.nn.set_each_step: its step must be called outside of jit, which "
                f"would call {', '.join(functions)} once, while it compiles, and keep "
                "the values. Compile the step alone: "
                "te.nn.set_each_step(jitted_step, learning_rate=function)."
            )
        values = {name: function() for name, function in functions.items()}
        return step(
            *(_with_values(x, values) for x in args),
            **{key: _with_values(x, values) for key, x in kwargs.items()},
        )

    return step_with_values


def _with_values(argument: Any, values: dict[str, Any]) -> Any:
    """Returns an argument of a step, with new values if it has optimizers of tables."""
    if not _has_optimizers(argument):
        return argument
    if hasattr(argument, "set_hyperparameters"):
        argument.set_hyperparameters(**values)
        return argument
    return argument.with_hyperparameters(**values)


def _has_optimizers(argument: Any) -> bool:
    """Returns True for an `Optimizer`, and for a `TrainState` of Linen."""
    methods = ("set_hyperparameters", "with_hyperparameters")
    return any(hasattr(type(argument), method) for method in methods)


def _check_takes_nothing(name: str, function: Any) -> None:
    """Raises TypeError for a value that cannot be called without arguments."""
    way_out = "set a number by optimizer.set_hyperparameters"
    if callable(function):
        try:
            inspect.signature(function).bind()
            return
        except ValueError:  # A builtin may have no signature.
            return
        except TypeError:
            way_out = "give a function of the step to the optimizer, as its schedule"
    raise TypeError(
        f"te.nn.set_each_step: {name} must be a function without arguments, got "
        f"{function!r}; {way_out}."
    )
