"""Draws a layer and its batches: tables, features, forms of ids, a mesh, placements."""

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tests.lookup.placements import MESHES, placements_on

PADDING = te.inputs.PADDING_ROW_ID
INITIAL_ACCUMULATOR = 0.25
OPTIMIZERS = {
    "none": None,
    "sgd": te.optimizers.sgd(1.0),
    "adagrad": te.optimizers.adagrad(
        1.0, initial_accumulator_value=INITIAL_ACCUMULATOR
    ),
}
# Powers of two as steps, so that float32 quantizes exactly.
QUANTIZATIONS = (
    te.QuantizationConfig(num_buckets=5, lower=-1, upper=1),
    te.QuantizationConfig(num_buckets=2, lower=-0.5, upper=1.5),
)
WEIGHTS = (1, 2, 0.5, 0, -1, -2, -0.5)
# Ids in 64 bits are for the host only.
BAD_IDS = (-1, -7, -(2**31), 12, 13, 2**31 - 2)
FOREIGN_IDS = (2**31, 2**40, -(2**40))
# Tables this small are rarely beyond a limit of the plan's choice.


def replicate_small(name, num_rows):
    return te.Replicated() if num_rows <= 4 else te.Sharded()


BACKENDS = ("xla", "sparse_core", te.SparseCore(max_ids=8), te.SparseCore(cores=4))
ABSENT = object()
DENSE_FORMS = ("one", "matrix")
MAX_VALENCE = 5
STEP_FORMS = ("one", "matrix", "matrix")
HOST_FORMS = ("ragged", "ragged", "sparse", "lists")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomFeature:
    """A feature, and what its ids are like.

    Attributes:
      config: of the feature.
      form: of the ids.
      num_samples: of a batch.
      max_valence: maximum number of ids of a sample; all have as many if dense.
      is_weighted: True if ids have weights.
      has_bad_ids: True if some ids are outside their table.
      has_foreign_ids: True if an int32 holds some of them not.
      seed: of the ids. Batches differ in their ids, and in no shape.
      is_given: False for features that the batch lacks.
    """

    config: te.FeatureConfig
    form: str
    num_samples: int
    max_valence: int
    is_weighted: bool
    has_bad_ids: bool
    has_foreign_ids: bool
    seed: int
    is_given: bool

    @property
    def is_reshaped(self):
        """Returns True if samples are combined, and lie along several axes."""
        shape = self.config.output_shape
        return shape is not None and math.prod(shape) == self.num_samples

    def rows(self, batch_number):
        """Returns each sample's list of (id, weight)."""
        of_shapes = np.random.default_rng(self.seed)
        of_ids = np.random.default_rng([self.seed, batch_number])
        num_rows = self.config.table.vocabulary_size
        bad = BAD_IDS + FOREIGN_IDS * self.has_foreign_ids
        bad = [i for i in bad if not 0 <= i < num_rows]
        rows = []
        for _ in range(self.num_samples):
            is_dense = self.form in DENSE_FORMS
            least = self.max_valence if is_dense else 0
            row = []
            for _ in range(of_shapes.integers(least, self.max_valence + 1)):
                i = int(of_ids.integers(0, num_rows))
                if self.has_bad_ids and of_ids.random() < 0.15:
                    i = int(of_ids.choice(bad))
                if of_shapes.random() < 0.15:
                    i = PADDING
                weight = float(of_ids.choice(WEIGHTS)) if self.is_weighted else 1.0
                row.append((i, weight))
            is_sparse = self.form == "sparse" and self.config.output_shape is not None
            if self.form in ("lists", "ragged") or is_sparse:
                # Ragged ids have no places without an id.
                row = [pair for pair in row if pair[0] != PADDING]
            rows.append(row)
        return rows

    def inputs(self, rows):
        """Returns the ids in their form, and the weights of lists or None."""
        ids = [[i for i, _ in row] for row in rows]
        weights = [[weight for _, weight in row] for row in rows]
        weights = weights if self.is_weighted else None
        match self.form:
            case "lists":
                return ids, weights
            case "ragged":
                return te.RaggedIds.from_lists(ids, weights), None
            case "sparse":
                return self._sparse(rows), None
        matrix = np.asarray(ids, np.int64).reshape(self.num_samples, -1)
        if not self.has_foreign_ids:
            matrix = matrix.astype(np.int32)
        if self.form == "one":
            matrix = matrix[:, 0]
        elif self.is_reshaped:
            matrix = matrix.reshape(*self.config.output_shape, matrix.shape[1])
        if weights is None:
            return matrix, None
        of_ids = np.asarray(weights, np.float32).reshape(matrix.shape)
        return te.DenseIds(ids=matrix, weights=of_ids), None

    def _sparse(self, rows):
        """Returns sparse ids in any order. Padding has no coordinates."""
        entries = [
            (i, j, *pair)
            for i, row in enumerate(rows)
            for j, pair in enumerate(row)
            if pair[0] != PADDING
        ]
        np.random.default_rng(self.seed).shuffle(entries)
        indices = np.array([entry[:2] for entry in entries], np.int64).reshape(-1, 2)
        batch_shape = [self.num_samples]
        if self.is_reshaped:
            batch_shape = self.config.output_shape
            places = np.unravel_index(indices[:, 0], batch_shape)
            indices = np.stack([*places, indices[:, 1]], axis=1)
        weights = np.array([entry[3] for entry in entries], np.float32)
        return te.SparseIds(
            indices=indices,
            values=np.array([entry[2] for entry in entries], np.int64),
            dense_shape=np.array([*batch_shape, self.max_valence + self.seed % 2]),
            weights=weights if self.is_weighted else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A layer and a batch.

    Attributes:
      mesh: name of a mesh.
      options: of `make_plan`.
      nest: how features are nested.
      is_prepared: False if the batch enters the step as it is.
      features: in the order of the nest's leaves.
    """

    mesh: str
    options: dict[str, Any]
    nest: str
    is_prepared: bool
    features: list[RandomFeature]

    def nested(self, leaves):
        """Returns the nest with one leaf per feature; `ABSENT` leaves its key out."""
        named = {f"f{i}": leaf for i, leaf in enumerate(leaves)}
        if self.nest in ("list", "tuple"):
            return list(leaves) if self.nest == "list" else tuple(leaves)
        if self.nest == "deep":
            nest = {"first": {"f0": named.pop("f0")}, "others": named}
            parts = {key: without_absent(part) for key, part in nest.items()}
            return {key: part for key, part in parts.items() if part}
        return without_absent(named)


def without_absent(leaves):
    return {name: leaf for name, leaf in leaves.items() if leaf is not ABSENT}


@st.composite
def examples(draw):
    """Draws a layer and a batch."""
    mesh = draw(st.sampled_from(list(MESHES)))
    placements = [None, *placements_on(mesh).values()]
    tables = draw(tables_on(st.sampled_from(placements)))
    options = dict(
        capacity=draw(st.sampled_from([None, 1, 2])),
        placement=draw(st.sampled_from([*placements, replicate_small])),
        backend=draw(st.sampled_from(BACKENDS)),
    )
    is_prepared = draw(st.sampled_from([True, True, True, False]))
    batch_size = draw(st.integers(1, 7))
    num_features = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    feature = features_of(tables, batch_size, is_prepared)
    features = [draw(feature) for _ in range(num_features)]
    nest = draw(st.sampled_from(["dict", "dict", "deep", "deep", "list", "tuple"]))
    if nest in ("list", "tuple") or not any(f.is_given for f in features):
        features = [dataclasses.replace(f, is_given=True) for f in features]
    facts = dict(is_prepared=is_prepared, features=features)
    return Example(mesh=mesh, options=options, nest=nest, **facts)


@st.composite
def tables_on(draw, placements):
    """Draws up to three tables of up to two sizes and two dims."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=2))
    optimizers = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1))
    combiners = ["sum", "sum", "mean", "mean", "sqrtn", "sqrtn"]
    num_tables = draw(st.integers(1, 3))
    tables = []
    for i in range(num_tables):
        optimizer = OPTIMIZERS[draw(st.sampled_from(optimizers))]
        dtypes = ["float32"] * 6 + ["bfloat16"] + ["int8"] * (optimizer is None)
        dtype = draw(st.sampled_from(dtypes))
        quantization = None
        if dtype != "int8":  # whose values are between those that quantize exactly
            quantization = draw(st.sampled_from([None, None, *QUANTIZATIONS]))
        table = te.TableConfig(
            vocabulary_size=draw(st.sampled_from(sizes)),
            dim=draw(st.sampled_from(dims)),
            combiner=draw(st.sampled_from(combiners)),
            name=draw(st.sampled_from([None, f"named_{i}"])),
            initializer=jax.nn.initializers.zeros,
            optimizer=optimizer,
            dtype=jnp.dtype(dtype),
            quantization_config=quantization,
            placement=draw(placements),
        )
        tables.append(table)
    return tables


@st.composite
def features_of(draw, tables, batch_size, is_prepared):
    """Draws a feature of some tables, and its ids in some form."""
    table = draw(st.sampled_from(tables))
    num_rows = table.vocabulary_size
    form = draw(st.sampled_from(STEP_FORMS + HOST_FORMS * is_prepared))
    shape = draw(shapes(batch_size, form))
    num_samples = shape.pop("num_samples")
    policy = draw(st.sampled_from(["error", "drop", "clip"]))
    default_id = combiner = None
    if not shape.pop("is_sequence"):
        default_id = draw(st.none() | st.integers(0, num_rows - 1))
        combiner = draw(st.sampled_from([None, None, "sum", "mean", "sqrtn"]))
    config = te.FeatureConfig(
        table=table,
        combiner=combiner,
        validate_weights_and_indices=draw(st.booleans()),
        default_id=default_id,
        out_of_range_ids=policy,
        expected_valence=draw(st.sampled_from([None, 0.5, 3])),
        **shape,
    )
    may_be_weighted = not config.max_sequence_length
    has_bad_ids = policy != "error" or not is_prepared
    return RandomFeature(
        config=config,
        form=form,
        num_samples=num_samples,
        max_valence=1 if form == "one" else draw(st.integers(0, MAX_VALENCE)),
        is_weighted=may_be_weighted and draw(st.sampled_from([True, True, False])),
        has_bad_ids=has_bad_ids,
        has_foreign_ids=has_bad_ids and is_prepared and draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        is_given=draw(st.sampled_from([True, True, False])),
    )


@st.composite
def shapes(draw, batch_size, form):
    """Draws the number of samples, and the options on which output shapes depend."""
    kinds = ["combined", "combined", "reshaped", "sequence by shape"]
    if form != "one":
        kinds.append("sequence")
    kind = draw(st.sampled_from(kinds))
    num_samples, options = batch_size, {}
    match kind:
        case "sequence":
            options["max_sequence_length"] = draw(st.integers(1, 4))
        case "reshaped":
            axes = draw(st.sampled_from([(1,), (5,), (1, 3), (2, 3), (3, 1)]))
            num_samples = math.prod(axes)
            options["output_shape"] = axes
        case "sequence by shape":
            num_samples, length = draw(st.integers(1, 7)), draw(st.integers(2, 3))
            axes = [(num_samples, length), (num_samples * length,)]
            options["output_shape"] = draw(st.sampled_from(axes))
    is_sequence = kind.startswith("sequence")
    return options | {"num_samples": num_samples, "is_sequence": is_sequence}
