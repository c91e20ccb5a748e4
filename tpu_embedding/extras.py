"""Checks that the libraries of a pip extra are installed, before any work is done."""

import importlib.util


class MissingExtraError(ImportError):
    """A library of an extra is not installed."""


def require_extra(
    extra: str,
    *modules: str,
    purpose: str,
    error: type[Exception] = MissingExtraError,
) -> None:
    """Raises an error that names the extra if a top-level module is missing.

    Example:
      >>> require_extra("train", "numpy", purpose="This function")
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise error(
                f"{purpose} needs the library {module}, which is not installed. "
                f"Install the extra `{extra}`: pip install '.[{extra}]' in a clone "
                "of the repository."
            )
