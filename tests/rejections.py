"""Matches errors by what they say to a program, not by their wording."""

import contextlib
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tpu_embedding

PACKAGE = pathlib.Path(tpu_embedding.__file__).parent
ANY = object()


@contextlib.contextmanager
def rejects(
    kind: type[Exception] | tuple[type[Exception], ...] = ValueError,
    *,
    field: str | None = None,
    value: Any = ANY,
    fix: str = "",
) -> Iterator[pytest.ExceptionInfo]:
    """Passes if the package itself raises an error of this type.

    Args:
        kind: Type of the error.
        field: Last part of the error's attribute `field`: `"dim"` fits `"Table.dim"`.
        value: The error's attribute `value`.
        fix: Code that the error shows the user, such as `"te.value_and_grad"`.

    An error that a library raises by itself doesn't count: it names no field and no
    fix.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    frames = traceback.extract_tb(error.__traceback__)
    inside = [PACKAGE in pathlib.Path(frame.filename).parents for frame in frames]
    assert inside[-1], f"raised by {frames[-1].filename}: {error!r}"
    if field is not None:
        assert hasattr(error, "field"), f"no attribute `field`: {error!r}"
        assert field == error.field or error.field.endswith((f".{field}", f" {field}"))
    if value is not ANY:
        assert hasattr(error, "value"), f"no attribute `value`: {error!r}"
        assert error.value is value or np.array_equal(error.value, value)
    assert fix in str(error)
