"""Directories of vocabularies: numbered files, and the names of their features.

A run and an export keep the vocabularies of their features so. The names are a list in
a file of its own, because file systems limit the length of names, and may ignore case.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Final

from tpu_embedding.strings.json_files import read_flat_json, write_atomically
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
        write_atomically(path / _NAMES_FILE, json.dumps(list(vocabularies)))
    for number, vocabulary in enumerate(vocabularies.values()):
        vocabulary.save(path / f"{number}.json")


def load_vocabularies(directory: pathlib.Path) -> dict[str, Vocabulary]:
    """Returns the vocabularies below a directory, by the names of their features.

    The directory may come from anyone, so links, which may point elsewhere, are errors.

    Raises:
      ValueError: if a file is missing, or was not written by `save_vocabularies`; the
        message names it.
    """
    path = directory / VOCABULARIES_DIR
    if not path.exists() and not path.is_symlink():
        return {}
    if path.is_symlink() or not path.is_dir():
        raise _not_saved(path, "it must be a directory, not a link or a file")
    names_file = path / _NAMES_FILE
    _check_is_file(names_file)
    try:
        names = read_flat_json(names_file)
        if not isinstance(names, list) or len(set(names)) < len(names):
            raise ValueError("it must be a list of different names")
    except ValueError as error:
        raise _not_saved(names_file, error) from None
    vocabularies = {}
    for number, name in enumerate(names):
        file = path / f"{number}.json"
        _check_is_file(file)
        vocabularies[name] = Vocabulary.load(file)
    return vocabularies


def _check_is_file(path: pathlib.Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise _not_saved(path, "it must be a file, and not a link")


def _not_saved(path: pathlib.Path, problem: object) -> ValueError:
    return ValueError(
        f"{path} is not part of saved vocabularies: {problem}; copy the directory "
        "again."
    )
