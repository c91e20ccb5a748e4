"""JSON files without nested values, which may come from anyone."""

import json
import os
import pathlib
import re
import uuid
from typing import Any, Final

# Possessive quantifiers (`*+`) keep no state to backtrack, so a match takes linear time
# and no memory.
_STRING: Final = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LIST: Final = rf"\[\s*+(?:{_STRING}\s*+,?+\s*+)*+\]"
_FIELD: Final = rf"{_STRING}\s*+:\s*+(?:{_STRING}|{_LIST}|[-+.\w]++)"
_FLAT: Final = re.compile(
    rf"\s*+(?:{_LIST}|\{{\s*+(?:{_FIELD}\s*+,?+\s*+){{0,9}}+\}})\s*+", re.DOTALL
)


def read_flat_json(path: pathlib.Path) -> Any:
    """Returns the list of strings, or the dict of scalars and such lists, of a file.

    Nested lists take 40 times their text in memory, so the text is matched first.

    Raises:
      ValueError: if the file holds anything else.
    """
    text = path.read_bytes().decode()
    if not _FLAT.fullmatch(text):
        raise ValueError("it must be JSON, with lists of strings and nothing nested")
    return json.loads(text)


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a text in UTF-8, whole or not at all.

    Raises:
      OSError: if it cannot be written, for example because the disk is full; the error
        names the file. An existing file then stays as it was.
    """
    path = pathlib.Path(os.path.realpath(path))
    unfinished = path.with_name(f".{uuid.uuid4().hex}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
