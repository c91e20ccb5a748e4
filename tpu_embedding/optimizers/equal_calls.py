"""Lets equal calls make one rule, so that the tables of all of them share a stack.

An optax transformation is a pair of functions, and two such pairs are equal only if
they are the same objects. So the functions of this package return the rule that the
first call with equal arguments made.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

MakeRule = TypeVar("MakeRule", bound=Callable[..., Any])


def equal_calls_are_one(make: MakeRule) -> MakeRule:
    """Makes a function return the same rule for equal arguments.

    Arguments that cannot be hashed, such as arrays, make a new rule in each call.

    Example:
      >>> import tpu_embedding as te
      >>> te.optimizers.adagrad(0.1) is te.optimizers.adagrad(learning_rate=0.1)
      True
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_once(*args: Any, **arguments: Any) -> Any:
        try:
            bound = signature.bind(*args, **arguments)
            bound.apply_defaults()
            key = make, _hashable(bound.arguments)
            hash(key)
        except TypeError:
            # Wrong arguments, too: the function says what is wrong with them.
            return make(*args, **arguments)
        return _result(_Call(key, functools.partial(make, *args, **arguments)))

    return cast(MakeRule, make_once)


@dataclasses.dataclass(frozen=True)
class _Call:
    key: Any
    call: Callable[[], Any] = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=4096)
def _result(call: _Call) -> Any:
    return call.call()


def _hashable(value: Any) -> Any:
    """Returns a value as tuples, with the types that tell 1, 1.0 and True apart."""
    if isinstance(value, Mapping):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_hashable, value))
    return type(value), value
