"""The signature of an exported program: the inputs that its arrays come from.

The program itself takes three dicts: the tables, the dense parameters and the arrays of
the inputs. An input is what the model's caller knows. It is one array, or, if ragged,
the arrays `NAME/values` and `NAME/row_splits`. Weights are an array `NAME/weights`.
NAME is the path of the input in the arguments, with `%2F` for a slash in a key and
`%25` for a percent sign. No input lies inside another one, so no two arrays have the
same name. Their shapes and dtypes are those of the program.
"""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Literal, Self, get_args

import jax

InputKind = Literal["array", "dense_ids", "ragged_ids"]

WIDE_DTYPE: Final = "uint32"
"""Type of the words of ids of 64 bits, which dynamic tables take. The last axis of
their array has the eight bytes of an id as two words, the lower one first. No other
array has this type."""


class ExportError(ValueError):
    """Raised if a model cannot be exported, or an export cannot be read or called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """An input of the model.

    Attributes:
      name: name of its array, or the start of the names of several.
      path: keys that lead to the input: the name of its argument, if there are several,
        and then the keys in the argument. Empty for a bare argument.
      kind: ids that the program was traced to look up, ragged ids, or another array.
      vocabulary_size: ids must be below it; None if ids beyond it are left out or
        clipped, or have 64 bits, or the model computes with them first.

    Raises:
      ValueError: if a field is of another type.
    """

    name: str
    path: tuple[str, ...]
    kind: InputKind
    vocabulary_size: int | None = None

    def __post_init__(self):
        size = self.vocabulary_size
        is_size = size is None or (type(size) is int and size > 0)
        is_kind = self.kind in get_args(InputKind)
        if not is_kind or not isinstance(self.name, str) or not is_size:
            raise ValueError(f"no input has these fields: {self}")

    @property
    def ids_name(self) -> str:
        """Name of the array of ids, or of the only array."""
        return f"{self.name}/values" if self.kind == "ragged_ids" else self.name

    @property
    def row_splits_name(self) -> str:
        """Name of the row splits of ragged ids."""
        return f"{self.name}/row_splits"

    @property
    def weights_name(self) -> str:
        """Name of the weights, if there are any."""
        return f"{self.name}/weights"

    def array_names(self, arrays: Collection[str]) -> set[str]:
        """Returns the names of its arrays, given all arrays of the program."""
        names = {self.ids_name}
        if self.kind == "ragged_ids":
            names.add(self.row_splits_name)
        if self.kind != "array" and self.weights_name in arrays:
            names.add(self.weights_name)
        return names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs of an exported program.

    Attributes:
      arguments: names of the arguments of the model.
      inputs: inputs of the model, in the order of their names in the arguments.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]

    @classmethod
    def of_json(cls, value: Any) -> Self:
        """Reads a signature that `dataclasses.asdict` and JSON wrote.

        Raises:
          LookupError, TypeError, ValueError: if it is none.
        """
        inputs = tuple(
            Input(**{**entry, "path": _texts(entry["path"])})
            for entry in value["inputs"]
        )
        return cls(arguments=_texts(value["arguments"]), inputs=inputs)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ValueError(f"a signature needs lists of names, got {value!r}")
    return tuple(value)


def keys_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the keys of a path in a pytree as strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def quoted_path(keys: Iterable[str]) -> str:
    """Joins keys by slashes, so that other keys never give the same text.

    Example:
      >>> quoted_path(("features", "user/geo"))
      'features/user%2Fgeo'
    """
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in keys)


def refuse_repeated(kind: str, names: Iterable[str]) -> None:
    """Refuses two things of the same name.

    Args:
      kind: names the things in the error.
      names: name of each.

    Raises:
      ExportError: if a name comes twice.
    """
    repeated = sorted(k for k, n in collections.Counter(names).items() if n > 1)
    if repeated:
        raise ExportError(
            f"The {kind} of an export must have different names, but several have "
            f"the name {', '.join(map(repr, repeated))}; rename a feature, table or "
            "attribute."
        )
