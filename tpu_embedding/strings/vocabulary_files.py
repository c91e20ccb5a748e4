"""Directories of vocabularies: numbered files, and the names of their features.

A run and an export keep the vocabularies of their features so. The names are a list in
a file of its own, because file systems limit the length of names, and may ignore case.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Final

from tpu_embedding.strings.string_ids import Vocabulary

VOCABULARIES_DIR: Final = "vocabularies"
_NAMES_FILE: Final = "names.json"


def save_vocabularies(
    directory: pathlib.Path, vocabularies: Mapping[str, Vocabulary]
) -> None:
    """Writes vocabularies below a directory; nothing if there are none."""
    path = directory / VOCABULARIES_DIR
    if vocabularies:
        path.mkdir(exist_ok=True)
        (path / _NAMES_FILE).write_text(json.dumps(list(vocabularies)))
    for number, vocabulary in enumerate(vocabularies.values()):
        vocabulary.save(path / f"{number}.json")


def load_vocabularies(directory: pathlib.Path) -> dict[str, Vocabulary]:
    """Returns the vocabularies below a directory, by the names of their features.

    Raises:
      ValueError: if a file is none of `Vocabulary.save`.
    """
    path = directory / VOCABULARIES_DIR
    if not path.exists():
        return {}
    names = json.loads((path / _NAMES_FILE).read_text())
    return {
        name: Vocabulary.load(path / f"{number}.json")
        for number, name in enumerate(names)
    }
