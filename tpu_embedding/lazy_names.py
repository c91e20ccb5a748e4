"""Imports a package's public names on first use.

This keeps `import tpu_embedding` fast, and lets a package export names from modules
that import the package itself.
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
"""Without this lock, two threads that import parts of the package could deadlock."""


def import_when_used(package: str) -> Callable[[str], Any]:
    """Makes the `__getattr__` for a package with lazy names."""

    def import_name(name: str) -> Any:
        sources = lazy_names(package)
        module = importlib.import_module(package)
        with _lock:
            if name in vars(module):
                return vars(module)[name]
            if name not in sources:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            parent, attribute = sources[name]
            # A name can be an attribute of its parent module, or a submodule of it.
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
    """Maps names imported under `TYPE_CHECKING` to their module and original name."""
    # The names are read from the source, which avoids a second list of them.
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
    """Makes `dir` follow a module's `__all__`, which is added if it is missing."""
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
