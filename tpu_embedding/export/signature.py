"""The signature of an exported program: its inputs and outputs, as JSON.

The program itself takes three dicts: the tables, the dense parameters and the arrays of
the inputs. An input is what the model's caller knows. It is one array, or, if ragged,
the arrays `NAME/values`, `NAME/row_splits` and maybe `NAME/weights`.
"""

import dataclasses
from typing import Any, Final, Literal, Self

from tpu_embedding.config import OutOfRangePolicy

BATCH: Final = "batch"
"""Size of the axis of samples, in shapes of a signature."""

ROW_SPLITS: Final = f"{BATCH} + 1"
"""Size of row splits, in shapes of a signature."""

WORDS: Final = 2
"""Numbers of 32 bits of an id of 64 bits: the size of the last axis of such ids."""

OUTPUT: Final = "output"
"""Name of the only output of a model that returns an array."""

InputKind = Literal["array", "dense_ids", "ragged_ids"]


class ExportError(ValueError):
    """Raised if a model cannot be exported, or an export cannot be read or called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """Shape and dtype of an array; sizes that change are names such as "batch"."""

    shape: tuple[int | str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """A table that the ids of an input are looked up in, and its rules.

    Attributes:
      feature: name in the layer's `feature_config`.
      table: name of the table.
      vocabulary_size: rows of the table; the capacity of a dynamic one.
      combiner: "sum", "mean", "sqrtn" or "custom".
      max_sequence_length: see `FeatureConfig`; 0: ids are combined.
      max_valence: maximum number of ids of a sample for a custom combiner, or None.
      out_of_range_ids: see `FeatureConfig`.
      default_id: see `FeatureConfig`.
      output_shape: see `FeatureConfig`.
      is_dynamic: True if the table has a `te.Dynamic` vocabulary.
    """

    feature: str
    table: str
    vocabulary_size: int
    combiner: str
    max_sequence_length: int
    max_valence: int | None
    out_of_range_ids: OutOfRangePolicy
    default_id: int | None
    output_shape: tuple[int, ...] | None
    is_dynamic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Input:
    """An input of the model.

    Attributes:
      name: path in the arguments, such as "features/movie".
      kind: ids that the program was traced to look up, ragged ids, or another array.
      is_weighted: True if each id has a weight.
      num_samples: "batch", or the only number of samples; 0 without an axis of them.
      spec: shape and dtype of the array or of the ids; None if ragged.
      is_wide: True for ids of 64 bits, of dynamic tables. The program takes the eight
        bytes of each as two uint32 along a last axis, the lower one first.
      lookups: tables that the ids go to; empty if the model computes with them first.
    """

    name: str
    kind: InputKind
    is_weighted: bool
    num_samples: int | str
    spec: ArraySpec | None
    is_wide: bool = False
    lookups: tuple[Lookup, ...] = ()

    @property
    def places(self) -> str:
        """Size of the arrays of ragged ids, in shapes of a signature."""
        return f"{self.name} places"

    @property
    def ids_name(self) -> str:
        """Name of the array that holds the ids."""
        if self.spec is None:
            return f"{self.name}/values"
        return f"{self.name}/ids" if self.is_weighted else self.name

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Name and shape of each array that the program takes for it."""
        name = self.name
        if self.spec is not None:
            arrays = {self.ids_name: self._of_ids(self.spec)}
            if self.is_weighted:
                weights = dataclasses.replace(self.spec, dtype="float32")
                arrays[f"{name}/weights"] = weights
            return arrays
        places, splits = (self.places,), ROW_SPLITS
        if isinstance(self.num_samples, int):
            splits = self.num_samples + 1
        arrays = {
            self.ids_name: self._of_ids(ArraySpec(shape=places, dtype="int32")),
            f"{name}/row_splits": ArraySpec(shape=(splits,), dtype="int32"),
        }
        if self.is_weighted:
            arrays[f"{name}/weights"] = ArraySpec(shape=places, dtype="float32")
        return arrays

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
      outputs: name to shape and dtype. A single array has the name "output".
      batch_size: None: any; else the only one.
    """

    arguments: tuple[str, ...]
    inputs: tuple[Input, ...]
    outputs: dict[str, ArraySpec]
    batch_size: int | None = None

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Name and shape of each array that the program takes."""
        return {name: x for each in self.inputs for name, x in each.arrays.items()}

    def to_json(self) -> dict[str, Any]:
        """Returns the signature as JSON, with the arrays of each input."""
        document = dataclasses.asdict(self)
        for entry, each in zip(document["inputs"], self.inputs, strict=True):
            arrays = {k: dataclasses.asdict(x) for k, x in each.arrays.items()}
            entry["arrays"] = arrays
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Returns the signature of `to_json`."""
        return cls(
            arguments=tuple(document["arguments"]),
            inputs=tuple(_input(entry) for entry in document["inputs"]),
            outputs={k: _spec(entry) for k, entry in document["outputs"].items()},
            batch_size=document["batch_size"],
        )


def _input(entry: dict[str, Any]) -> Input:
    return Input(
        name=entry["name"],
        kind=entry["kind"],
        is_weighted=entry["is_weighted"],
        num_samples=entry["num_samples"],
        spec=None if entry["spec"] is None else _spec(entry["spec"]),
        # Exports of earlier releases have none.
        is_wide=entry.get("is_wide", False),
        lookups=tuple(map(_lookup, entry["lookups"])),
    )


def _lookup(entry: dict[str, Any]) -> Lookup:
    lookup, shape = Lookup(**entry), entry["output_shape"]
    output_shape = None if shape is None else tuple(shape)
    return dataclasses.replace(lookup, output_shape=output_shape)


def _spec(entry: dict[str, Any]) -> ArraySpec:
    return ArraySpec(shape=tuple(entry["shape"]), dtype=entry["dtype"])
