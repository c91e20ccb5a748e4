"""Marks the transfers between host and devices that a function intends."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

T = TypeVar("T", bound=Callable[..., Any])


def moves_arrays(function: T) -> T:
    """Allows a function's transfers, even under `jax.transfer_guard("disallow")`.

    The guard finds transfers in a training loop that nobody intended. Reading a table
    to the host, or bringing rows from there, is the purpose of the decorated function.
    """

    @functools.wraps(function)
    def allowed(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return cast(T, allowed)
