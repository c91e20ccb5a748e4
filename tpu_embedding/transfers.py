"""Marks intended transfers between host and devices."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

T = TypeVar("T", bound=Callable[..., Any])


def moves_arrays(function: T) -> T:
    """Allows a function's transfers, even under `jax.transfer_guard("disallow")`."""
    # Users set the guard to find unintended transfers in their loops. Moving rows to
    # or from the host is the purpose of a decorated function.

    @functools.wraps(function)
    def allowed(*args: Any, **kwargs: Any) -> Any:
        with jax.transfer_guard("allow"):
            return function(*args, **kwargs)

    return cast(T, allowed)
