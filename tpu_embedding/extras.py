"""Checks that an extra's libraries are installed, before any work is done."""

import importlib.util


class MissingExtraError(ImportError):
    """Raised if a library of an extra is not installed."""


def require_extra(
    extra: str,
    *modules: str,
    purpose: str,
    error: type[Exception] = MissingExtraError,
) -> None:
    """Raises an error that names the extra if one of its libraries is missing.

    Args:
      extra: name of the extra in `pyproject.toml`.
      *modules: top-level modules to check.
      purpose: what needs the modules; the first words of the error.
      error: type of the error.

    Raises:
      MissingExtraError: if a module is not installed. `error` replaces this type.

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
