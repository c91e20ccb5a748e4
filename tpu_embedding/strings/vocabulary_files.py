"""Directories of vocabularies: one file per feature, named like it.

A run and an export keep the vocabularies of their features so. A slash in a name is
`%2F` in the name of its file, and a percent sign is `%25`.
"""

import pathlib
import urllib.parse
from collections.abc import Mapping
from typing import Final

from tpu_embedding.strings.string_ids import Vocabulary

VOCABULARIES_DIR: Final = "vocabularies"
_SUFFIX: Final = ".json"


def save_vocabularies(
    directory: pathlib.Path, vocabularies: Mapping[str, Vocabulary]
) -> None:
    """Writes vocabularies below a directory; nothing if there are none."""
    for name, vocabulary in vocabularies.items():
        path = directory / VOCABULARIES_DIR / urllib.parse.quote(name, safe=" ")
        path.parent.mkdir(exist_ok=True)
        vocabulary.save(path.with_name(path.name + _SUFFIX))


def load_vocabularies(directory: pathlib.Path) -> dict[str, Vocabulary]:
    """Returns the vocabularies below a directory, by the names of their features.

    Raises:
      ValueError: if a file is none of `Vocabulary.save`.
    """
    return {
        urllib.parse.unquote(path.name.removesuffix(_SUFFIX)): Vocabulary.load(path)
        for path in sorted((directory / VOCABULARIES_DIR).glob(f"*{_SUFFIX}"))
    }
