"""Reads the names of TorchRec's state dicts.

A table is `...embedding_bags.NAME.weight`, or `...embeddings.NAME.weight` for
sequences. A fused optimizer names its slot variables `...NAME.momentum1` and
`...NAME.momentum2`, or `...NAME.weight.momentum_1`, whatever the rule.
"""

import re
from collections.abc import Mapping
from typing import Final

from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource

_WEIGHT: Final = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.(.+)\.weight")
_SLOT: Final = re.compile(r"(.*?)\.(?:weight\.)?momentum_?([12])")


def is_state_dict(arrays: Mapping[str, RowArray]) -> bool:
    """Returns True if the names are those of TorchRec's collections of tables."""
    return any(_WEIGHT.fullmatch(name) for name in arrays)


def tables_of_state_dict(arrays: Mapping[str, RowArray], origin: str) -> TableSource:
    """Returns the tables of a state dict.

    Tables of one name in two collections get the whole name of their tensor. Other
    tensors, such as dense weights, are left out.

    Args:
      arrays: by the names of the state dict.
      origin: format and path, for messages.
    """
    matches = {k: match[1] for k in arrays if (match := _WEIGHT.fullmatch(k))}
    names = list(matches.values())
    tables = {
        key if names.count(name) > 1 else name: SourceTable(
            values=arrays[key], slots=_slots(arrays, key, name)
        )
        for key, name in matches.items()
    }
    return TableSource(origin=origin, tables=tables)


def _slots(arrays: Mapping[str, RowArray], key: str, name: str) -> dict[str, RowArray]:
    """Returns the slot variables of a table, `[rows]` in place of `[rows, 1]`."""
    collection = key.removesuffix(".weight")
    found: dict[str, list[str]] = {}
    for other in arrays:
        match = _SLOT.fullmatch(other)
        if match and (match[1] == name or match[1].endswith(f".{name}")):
            found.setdefault(f"momentum{match[2]}", []).append(other)
    slots = {}
    for slot, keys in found.items():
        # Two collections may have a table of this name.
        own = [other for other in keys if collection in other] or keys
        if len(own) == 1:
            array = arrays[own[0]]
            is_column = array.shape[1:] == (1,) and arrays[key].shape[1:] != (1,)
            slots[slot] = array.squeezed() if is_column else array
    return slots
