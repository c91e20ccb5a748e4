"""The signature of an exported program: its inputs and outputs, as JSON.

The program itself takes three dicts: the tables, the dense parameters and the arrays of
the inputs. An input is what the model's caller knows. It is one array, or, if ragged,
the arrays `NAME/values`, `NAME/row_splits` and maybe `NAME/weights`. NAME is the path
of the input in the arguments, with `%2F` for a slash in a key and `%25` for a percent
sign. No input lies inside another one, so no two arrays have the same name.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar

import jax

BATCH: Final = "batch"
"""Size of the axis of samples, in shapes of a signature."""

ROW_SPLITS: Final = f"{BATCH} + 1"
"""Size of row splits, in shapes of a signature."""

WORDS: Final = 2
"""Numbers of 32 bits of an id of 64 bits: the size of the last axis of such ids."""

OUTPUT: Final = "output"
"""Name of the only output of a model that returns an array."""

InputKind = Literal["array", "dense_ids", "ragged_ids"]

_T = TypeVar("_T")


class ExportError(ValueError):
    """Raised if a model cannot be exported, or an export cannot be read or called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape and dtype of an array; sizes that change are names such as "batch"."""

    shape: tuple[int | str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """An input of the model.

    Attributes:
      name: path in the arguments, such as "features/movie", or the name of a bare
        argument.
      path: keys that lead to the input: the name of its argument, if there are several,
        and then the keys in the argument. Empty for a bare argument.
      kind: ids that the program was traced to look up, ragged ids, or another array.
      is_weighted: True if each id has a weight.
      num_samples: "batch", or the only number of samples; 0 without an axis of them.
      spec: shape and dtype of the array or of the ids; None if ragged.
      is_wide: True for ids of 64 bits, of dynamic tables. The program takes the eight
        bytes of each as two uint32 along a last axis, the lower one first.
      vocabulary_size: ids must be below it; None if ids beyond it are left out or
        clipped, or the model computes with them first.
    """

    name: str
    path: tuple[str, ...]
    kind: InputKind
    is_weighted: bool
    num_samples: int | str
    spec: ArraySpec | None
    is_wide: bool = False
    vocabulary_size: int | None = None

    @property
    def places(self) -> str:
        """Size of the arrays of ragged ids, in shapes of a signature."""
        return f"{self.name} places"

    @property
    def ids_part(self) -> str:
        """Key in `parts` of the array that holds the ids."""
        if self.spec is None:
            return "values"
        return "ids" if self.is_weighted else ""

    @property
    def parts(self) -> dict[str, ArraySpec]:
        """Shapes of the program's arrays: a single one is "", others "values" etc."""
        if self.spec is not None:
            parts = {self.ids_part: self._of_ids(self.spec)}
            if self.is_weighted:
                parts["weights"] = dataclasses.replace(self.spec, dtype="float32")
            return parts
        places, splits = (self.places,), ROW_SPLITS
        if isinstance(self.num_samples, int):
            splits = self.num_samples + 1
        parts = {
            self.ids_part: self._of_ids(ArraySpec(shape=places, dtype="int32")),
            "row_splits": ArraySpec(shape=(splits,), dtype="int32"),
        }
        if self.is_weighted:
            parts["weights"] = ArraySpec(shape=places, dtype="float32")
        return parts

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Name and shape of each array that the program takes for it."""
        return self.named(self.parts)

    @property
    def named_parts(self) -> dict[str, str]:
        """Key in `parts` to the name of the program's array."""
        return dict(zip(self.parts, self.arrays, strict=True))

    def named(self, parts: Mapping[str, _T]) -> dict[str, _T]:
        """Returns values of `parts` by the names of the program's arrays."""
        name = quoted_path(self.path) if self.path else self.name
        return {f"{name}/{part}" if part else name: x for part, x in parts.items()}

    def _of_ids(self, spec: ArraySpec) -> ArraySpec:
        """Returns the shape and dtype of the array that holds the ids."""
        if not self.is_wide:
            return spec
        return ArraySpec(shape=(*spec.shape, WORDS), dtype="uint32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs and outputs of an exported program.

    Attributes:
      arguments: names of the arguments of the model.
      inputs: inputs of the model, in the order of their names in the arguments.
      arrays: name and shape of each array that the program takes: `arrays_of(inputs)`.
      outputs: name to shape and dtype. A single array has the name "output".
      returns_array: True if the model returns that array, not a nest that holds it.
      batch_size: None: any; else the only one.

    Raises:
      ExportError: if two inputs or arrays have the same name, or the arrays are others.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    arrays: dict[str, ArraySpec]
    outputs: dict[str, ArraySpec]
    returns_array: bool
    batch_size: int | None = None

    def __post_init__(self):
        if self.arrays != arrays_of(self.inputs):
            raise ExportError(
                "The arrays of a signature must be those of its inputs, "
                f"{list(arrays_of(self.inputs))}, got {list(self.arrays)}."
            )


def arrays_of(inputs: Iterable[Input]) -> dict[str, ArraySpec]:
    """Returns name and shape of each array that the program takes for some inputs.

    Raises:
      ExportError: if two inputs or arrays have the same name.
    """
    inputs = tuple(inputs)
    refuse_repeated("inputs", (each.name for each in inputs))
    names = (name for each in inputs for name in each.arrays)
    refuse_repeated("arrays of the program", names)
    return {name: x for each in inputs for name, x in each.arrays.items()}


def keys_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the keys of a path in a pytree as strings.

    Raises:
      ExportError: if a key is no text that UTF-8 can hold.
    """
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    for key in keys:
        check_name("feature, output or attribute", key)
    return keys


def check_name(kind: str, name: str) -> None:
    """Refuses a name that files cannot hold.

    Raises:
      ExportError: if UTF-8 cannot encode it.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ExportError(
            f"The name of a {kind} must be text that UTF-8 can encode, got {name!r}; "
            "rename it."
        ) from None


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
            "attribute whose name holds a slash."
        )
