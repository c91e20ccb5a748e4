"""Random configurations and batches against the dense reference, step by step.

Other tests vary one thing at a time. Here hypothesis draws a nest of features, their
tables, a mesh and a batch together, so features meet that no other test combines.

The quick tier runs a few examples, the full tier more. Any number runs outside pytest:
`python -m tests.many_random_configurations --examples 2000 --seed 1`.
"""

import dataclasses
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.placements import (
    MESHES,
    assert_replicas_equal,
    mesh_of_shape,
    placements_on,
)
from tests.reference import bags_of, gains_of, table_name

PADDING = te.PADDING_ROW_ID
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
ABSENT = object()
DENSE_FORMS = ("one", "matrix", "weighted")
HOST_FORMS = ("ragged", "sparse", "lists", "masked")

# Tables, weights and cotangents are multiples of 1/8, so sums are exact in float32. A
# mean or sqrtn divides once, and adds up some ten quotients.
TOLERANCE = dict(rtol=2e-6, atol=2e-6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenFeature:
    """A feature and its ids.

    Attributes:
      config: of the feature.
      rows: per sample, its list of (id, weight).
      ids: the rows in some form.
      weights: of lists, or None.
      is_given: False for features that the batch lacks.
    """

    config: te.FeatureConfig
    rows: Any
    ids: Any
    weights: Any = None
    is_given: bool = True


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
    features: list[GivenFeature]

    def nested(self, leaves):
        """Returns the nest with one leaf per feature; `ABSENT` leaves its key out."""
        named = {f"f{i}": leaf for i, leaf in enumerate(leaves)}
        match self.nest:
            case "list":
                return list(leaves)
            case "tuple":
                return tuple(leaves)
            case "deep":
                first = {"f0": named.pop("f0")}
                nest = {"first": first, "others": named}
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
        exchange=draw(st.sampled_from([None, "padded", "ragged"])),
        placement=draw(st.sampled_from([*placements, te.ReplicateSmall(max_rows=4)])),
    )
    is_prepared = draw(st.sampled_from([True, True, True, False]))
    batch_size = draw(st.integers(1, 7))
    num_features = draw(st.sampled_from([1, 1, 2, 2, 3, 4]))
    feature = features_of(tables, batch_size, is_prepared)
    features = [draw(feature) for _ in range(num_features)]
    nest = draw(st.sampled_from(["dict", "dict", "deep", "deep", "list", "tuple"]))
    if nest in ("list", "tuple") or not any(f.is_given for f in features):
        features = [dataclasses.replace(f, is_given=True) for f in features]
    return Example(
        mesh=mesh,
        options=options,
        nest=nest,
        is_prepared=is_prepared,
        features=features,
    )


@st.composite
def tables_on(draw, placements):
    """Draws up to three tables of up to two sizes and two dims."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=1, max_size=2))
    optimizers = draw(st.lists(st.sampled_from(list(OPTIMIZERS)), min_size=1))
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
            combiner=draw(st.sampled_from(["sum", "mean", "sqrtn"])),
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
    if draw(st.sampled_from([False, False, True])):
        alike = [other for other in tables if other.vocabulary_size == num_rows]
        table = tuple(draw(st.lists(st.sampled_from(alike), min_size=1, max_size=3)))
    form = draw(st.sampled_from(DENSE_FORMS + HOST_FORMS * is_prepared))
    shape = draw(shapes(batch_size, form))
    num_samples = shape.pop("num_samples")
    policy = draw(st.sampled_from(["error", "drop", "clip"]))
    default_id = None
    if not shape.pop("is_sequence"):
        default_id = draw(st.none() | st.integers(0, num_rows - 1))
    config = te.FeatureConfig(
        table=table,
        validate_weights_and_indices=draw(st.booleans()),
        default_id=default_id,
        out_of_range_ids=policy,
        expected_valence=draw(st.sampled_from([None, 0.5, 3])),
        **shape,
    )
    id_values = st.integers(0, num_rows - 1) | st.just(PADDING)
    if policy != "error" or not is_prepared:
        bad = [i for i in BAD_IDS + FOREIGN_IDS * is_prepared if not 0 <= i < num_rows]
        id_values |= st.sampled_from(bad)
    rows = draw(rows_of(form, num_samples, id_values))
    is_weighted = form == "weighted" or (
        form in ("ragged", "sparse", "lists")
        and not config.max_sequence_length
        and draw(st.booleans())
    )
    return draw(in_form(form, rows, is_weighted, config))


@st.composite
def shapes(draw, batch_size, form):
    """Draws the number of samples, and the options on which output shapes depend."""
    kinds = ["combined", "combined", "reshaped", "sequence by shape"]
    if form not in ("one", "weighted"):
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


@st.composite
def rows_of(draw, form, num_samples, id_values):
    """Draws each sample's (id, weight) pairs."""
    few, many = 0, 5
    if form == "one":
        few = many = 1
    elif form in ("matrix", "weighted", "masked"):
        few = many = draw(st.integers(0, 4))
    pairs = st.tuples(id_values, st.sampled_from(WEIGHTS))
    row = st.lists(pairs, min_size=few, max_size=many)
    return draw(st.lists(row, min_size=num_samples, max_size=num_samples))


@st.composite
def in_form(draw, form, rows, is_weighted, config):
    """Draws a container that holds the rows."""
    if form == "sparse" and config.output_shape is not None:
        # Ragged ids have no places without an id.
        rows = [[pair for pair in row if pair[0] != PADDING] for row in rows]
    if not is_weighted:
        rows = [[(i, 1.0) for i, _ in row] for row in rows]
    ids = [[i for i, _ in row] for row in rows]
    weights = [[weight for _, weight in row] for row in rows]
    is_given = draw(st.sampled_from([True, True, False]))
    given = dict(config=config, rows=rows, is_given=is_given)
    match form:
        case "lists":
            lists = weights if is_weighted else None
            return GivenFeature(ids=ids, weights=lists, **given)
        case "ragged":
            lists = weights if is_weighted else None
            return GivenFeature(ids=te.RaggedIds.from_lists(ids, lists), **given)
        case "sparse":
            container = draw(sparse_of(rows, is_weighted, config))
            return GivenFeature(ids=container, **given)
    matrix = dense_of(ids, draw(st.sampled_from(["int32", "int64"])))
    axes = config.output_shape
    if form == "one":
        matrix = matrix[:, 0]
    elif axes is not None and math.prod(axes) == len(rows):
        matrix = matrix.reshape(*axes, matrix.shape[1])
    if form == "masked":
        is_padding = matrix == PADDING
        matrix = np.ma.masked_array(np.where(is_padding, 0, matrix), is_padding)
    if form == "weighted":
        of_ids = np.asarray(weights, np.float32).reshape(matrix.shape)
        return GivenFeature(ids=te.DenseIds(ids=matrix, weights=of_ids), **given)
    return GivenFeature(ids=matrix, **given)


def dense_of(ids, dtype):
    """Returns ids as a matrix; int64 if an int32 cannot hold them."""
    matrix = np.asarray(ids, np.int64).reshape(len(ids), -1)
    fits = np.array_equal(matrix, matrix.astype(np.int32))
    return matrix.astype(dtype if fits else np.int64)


@st.composite
def sparse_of(draw, rows, is_weighted, config):
    """Draws sparse ids with their values in any order. Padding has no coordinates."""
    entries = [
        (i, j, *pair)
        for i, row in enumerate(rows)
        for j, pair in enumerate(row)
        if pair[0] != PADDING
    ]
    entries = draw(st.permutations(entries))
    indices = np.array([entry[:2] for entry in entries], np.int64).reshape(-1, 2)
    dense_shape = [len(rows), max(map(len, rows)) + draw(st.integers(0, 2))]
    axes = config.output_shape
    if axes is not None and math.prod(axes) == len(rows):
        places = np.unravel_index(indices[:, 0], axes)
        indices = np.stack([*places, indices[:, 1]], axis=1)
        dense_shape = [*axes, dense_shape[1]]
    weights = np.array([entry[3] for entry in entries], np.float32)
    return te.SparseIds(
        indices=indices,
        values=np.array([entry[2] for entry in entries], np.int64),
        dense_shape=np.array(dense_shape),
        weights=weights if is_weighted else None,
    )


def check_example(example):
    """Runs a step of the example; all results must equal the dense reference's."""
    given = [feature for feature in example.features if feature.is_given]
    config = example.nested([feature.config for feature in example.features])
    plan = te.make_plan(config, mesh_of_shape(example.mesh), **example.options)
    batch = example.nested([f.ids if f.is_given else ABSENT for f in example.features])
    if example.is_prepared:
        weights = [f.weights if f.is_given else ABSENT for f in example.features]
        batch = te.prepare_features(batch, plan, example.nested(weights))
    tables = tables_with_values(plan)
    before = te.unstack_tables(tables, plan)
    lookups = plan.for_batch(batch)
    cotangents = cotangents_of(te.activation_shapes(batch, plan))
    activations, stats, after, slots = run_step(plan, tables, batch, cotangents)
    assert_replicas_equal((after, slots))

    rows = [feature.rows for feature in given for _ in feature.config.tables]
    expected, gradients, counts = reference_step(
        before, rows, lookups.flatten_activations(cotangents), lookups
    )
    assert {name: int(n) for name, n in stats.out_of_range.items()} == counts
    found = lookups.flatten_activations(activations)
    for array, values, feature in zip(found, expected, lookups.features, strict=True):
        assert array.shape == (*leading_axes(feature, rows, lookups), feature.table.dim)
        np.testing.assert_allclose(
            array.reshape(values.shape),
            values,
            **tolerance_of(feature.table),
            err_msg=feature.name,
        )
    check_updates(plan, before, te.unstack_tables(after, plan), slots, gradients)


def run_step(plan, tables, batch, cotangents):
    """Returns activations and counts, and the updated tables and slot variables."""

    # Its own function, so that its program is freed with it.
    @jax.jit
    def step(tables, batch, cotangents):
        slots = te.init_slots(tables, plan)
        result = te.lookup(tables, batch, plan)
        gradients = te.compute_gradients(result.routing, cotangents, plan)
        tables, slots = te.apply_gradients(tables, slots, gradients, plan)
        return result.activations, result.stats, tables, slots

    return step(tables, batch, cotangents)


def tables_with_values(plan):
    """Returns tables of multiples of 1/8, whose rows differ."""
    shapes = jax.eval_shape(lambda: te.init_tables(plan, jax.random.key(0)))
    shardings = {stack.name: plan.rows_sharding(stack) for stack in plan.stacks}
    tables = {
        name: jax.tree.map(
            lambda s, name=name: jax.device_put(
                np.zeros(s.shape, s.dtype), shardings[name]
            ),
            packed,
        )
        for name, packed in shapes.items()
    }
    values = {}
    for stack in plan.stacks:
        for table in stack.tables:
            rows = np.arange(table.config.vocabulary_size)[:, None]
            steps = 7 * rows + 3 * np.arange(table.config.dim) + len(values) * 11
            values[table.name] = ((steps % 31 - 15) / 8).astype(np.float32)
    return te.with_table_values(tables, values, plan)


def cotangents_of(shapes):
    """Returns small whole numbers."""
    generator = np.random.default_rng(7)
    return jax.tree.map(
        lambda s: generator.integers(-3, 4, s.shape).astype(np.float32), shapes
    )


def reference_step(tables, rows, cotangents, plan):
    """Computes a step sample by sample, in float64.

    Returns:
      Per lookup the activations, `[samples, dim]`. Per table the gradient, NaN in rows
      that were not looked up. Per feature, the number of ids outside the table.
    """
    activations, counts = [], {}
    gradients = {name: np.full(t.shape, np.nan) for name, t in tables.items()}
    for feature, of_samples, cotangent in zip(
        plan.features, rows, cotangents, strict=True
    ):
        bags, combiner = bags_of(of_samples, feature)
        name = table_name(feature, plan)
        seen = quantized(tables[name].astype(np.float64), feature.table)
        result = np.zeros((len(bags), feature.table.dim))
        by_bag = cotangent.reshape(result.shape)
        for i, bag in enumerate(bags):
            for row, gain in gains_of(bag, combiner, feature):
                result[i] += gain * seen[row]
                of_row = np.nan_to_num(gradients[name][row])
                gradients[name][row] = of_row + gain * by_bag[i]
        activations.append(result)
        counts[feature.name] = sum(
            row != PADDING and not 0 <= row < feature.table.vocabulary_size
            for bag in bags
            for row, _ in bag
        )
    return activations, gradients, counts


def quantized(rows, table):
    """Returns rows as a lookup sees them."""
    config = table.quantization_config
    if config is None:
        return rows
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    steps = (np.clip(rows, config.lower, config.upper) - config.lower) / step
    return np.floor(steps + 0.5) * step + config.lower


def leading_axes(feature, rows, plan):
    """Returns the axes of a feature's activations before `dim`."""
    if feature.config.output_shape is not None:
        return feature.config.output_shape
    num_samples = len(rows[plan.features.index(feature)])
    length = feature.config.max_sequence_length
    return (num_samples, length) if length else (num_samples,)


def tolerance_of(table):
    is_exact = table.combiner == "sum" and table.dtype_name != "int8"
    return dict(rtol=0, atol=0) if is_exact else TOLERANCE


def check_updates(plan, before, after, slots, gradients):
    """Compares tables and slot variables; rows not looked up keep their bits."""
    found_slots = te.slot_values(slots, plan)
    for table in (table for stack in plan.stacks for table in stack.tables):
        name, old, gradient = table.name, before[table.name], gradients[table.name]
        is_touched = ~np.isnan(gradient).all(axis=1)
        np.testing.assert_array_equal(
            after[name][~is_touched], old[~is_touched], err_msg=name
        )
        optimizer = table.config.optimizer
        if optimizer is None:
            np.testing.assert_array_equal(after[name], old, err_msg=name)
            continue
        gradient = np.nan_to_num(gradient)
        step = gradient
        tolerance = dict(tolerance_of(table.config))
        if optimizer is OPTIMIZERS["adagrad"]:
            accumulators = INITIAL_ACCUMULATOR + gradient**2
            np.testing.assert_allclose(
                found_slots[name]["accumulators"],
                accumulators,
                **tolerance,
                err_msg=name,
            )
            step = gradient / np.sqrt(accumulators)
            tolerance = dict(TOLERANCE)
        if table.config.dtype_name == "bfloat16":
            # Rounded up or down, by less than one step.
            tolerance["rtol"] += float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(after[name], old - step, **tolerance, err_msg=name)


def random_examples(number, seed=None):
    """Returns a function that checks a number of random examples."""
    check = hypothesis.given(examples())(check_example)
    if seed is not None:
        check = hypothesis.seed(seed)(check)
    return hypothesis.settings(
        max_examples=number,
        derandomize=seed is None,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )(check)


@pytest.mark.parametrize("number", [8, pytest.param(40, marks=pytest.mark.full)])
def test_random_configurations_equal_the_dense_reference(number):
    random_examples(number)()
