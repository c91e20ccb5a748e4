"""Imports the public names of a package when they are used first.

`import tpu_embedding` then takes no time, and a package can offer names of modules that
import it. The imports under `TYPE_CHECKING` list the names, for editors, type checkers
and this module alike.
"""

import ast
import functools
import importlib
import importlib.util
import threading
import types
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()
"""Two threads that import parts of the package at once could wait for each other."""


def import_when_used(
    package: str, describe_unknown: Callable[[str], str] = lambda name: ""
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package with lazy names.

    Args:
      package: name of the package, `__name__`.
      describe_unknown: takes a name that the package lacks; its result ends the error.
    """

    def import_name(name: str) -> Any:
        sources = lazy_names(package)
        module = importlib.import_module(package)
        with _lock:
            if name in vars(module):  # Another thread was faster.
                return vars(module)[name]
            if name not in sources:
                raise AttributeError(
                    f"module {package!r} has no attribute {name!r}"
                    f"{describe_unknown(name)}"
                )
            parent, attribute = sources[name]
            owner = importlib.import_module(parent)
            if parent != package and hasattr(owner, attribute):
                value = getattr(owner, attribute)
            else:
                value = importlib.import_module(f"{parent}.{attribute}")
            setattr(module, name, value)
            return value

    return import_name


@functools.cache
def lazy_names(package: str) -> dict[str, tuple[str, str]]:
    """Returns the names under a package's `TYPE_CHECKING`: their modules and names."""
    spec = importlib.util.find_spec(package)
    source = spec.loader.get_source(package)  # pyright: ignore
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def show_public_names_only(module: types.ModuleType) -> None:
    """Gives a module `__all__`, unless it has one, and a `__dir__` that follows it."""
    names = vars(module)
    public = {
        name
        for name, value in names.items()
        if name[0] != "_"
        and name != "TYPE_CHECKING"
        and not isinstance(value, types.ModuleType)
    }
    names.setdefault("__all__", sorted(public | lazy_names(module.__name__).keys()))
    names["__dir__"] = lambda: sorted(
        [*names["__all__"], *(name for name in names if name[0] == "_")]
    )
