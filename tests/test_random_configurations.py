"""Random configurations and batches against the dense reference, step by step.

Other tests vary one thing at a time. Here hypothesis draws a nest of features, their
tables, a mesh and a batch together, so features meet that no other test combines.

The full tier runs a few examples. Any number runs outside
pytest: `python -m tests.many_random_configurations --examples 2000 --seed 1`.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.placements import assert_replicas_equal, mesh_of_shape
from tests.random_configurations import (
    ABSENT,
    INITIAL_ACCUMULATOR,
    OPTIMIZERS,
    PADDING,
    examples,
)
from tests.reference import bags_of, gains_of, table_name

BATCHES = 10  # per example; compiling takes much longer than running

# Tables, weights and cotangents are multiples of 1/8, so sums are exact in float32. A
# mean or sqrtn divides once, and adds up some ten quotients.
TOLERANCE = dict(rtol=2e-6, atol=2e-6)


def check_example(example):
    """Runs a step of some batches; all results must equal the dense reference's."""
    config = example.nested([feature.config for feature in example.features])
    plan = te.make_plan(config, mesh_of_shape(example.mesh), **example.options)
    tables = tables_with_values(plan)
    step = step_of(plan)
    for batch_number in range(BATCHES):
        rows = [feature.rows(batch_number) for feature in example.features]
        check_step(example, rows, plan, tables, step)
    assert step._cache_size() == 1


def check_step(example, rows, plan, tables, step):
    batch, weights = zip(
        *(
            feature.inputs(of_feature) if feature.is_given else (ABSENT, ABSENT)
            for feature, of_feature in zip(example.features, rows, strict=True)
        ),
        strict=True,
    )
    batch = example.nested(batch)
    if example.is_prepared:
        batch = te.inputs.prepare_features(batch, plan, example.nested(weights))
    lookups, _ = plan.match(batch)
    cotangents = cotangents_of(te.functional.activation_shapes(batch, plan))
    activations, stats, after, slots = step(tables, batch, cotangents)
    assert_replicas_equal((after, slots))

    of_lookups = [
        of_feature
        for feature, of_feature in zip(example.features, rows, strict=True)
        if feature.is_given
    ]
    before = te.functional.unstack_tables(tables, plan)
    expected, gradients, counts = reference_step(
        before, of_lookups, lookups.flatten(cotangents), lookups
    )
    assert {name: int(n) for name, n in stats.out_of_range.items()} == counts
    found = lookups.flatten(activations)
    for array, values, feature, of_samples in zip(
        found, expected, lookups.features, of_lookups, strict=True
    ):
        assert array.shape == shape_of(feature, len(of_samples))
        np.testing.assert_allclose(
            array.reshape(values.shape),
            values,
            **tolerance_of(feature.table, [feature]),
            err_msg=feature.name,
        )
    check_updates(
        plan, before, te.functional.unstack_tables(after, plan), slots, gradients
    )


def step_of(plan):
    """Returns a function of its own, so that its program is freed with it.

    It returns activations and counts, and the updated tables and slot variables.
    """

    @jax.jit
    def step(tables, batch, cotangents):
        slots = te.functional.init_slots(tables, plan)
        result = te.functional.lookup(tables, batch, plan)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
        return result.activations, result.stats, tables, slots

    return step


def tables_with_values(plan):
    """Returns tables of multiples of 1/8, whose rows differ."""
    shapes = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    shardings = {stack.name: plan.rows_sharding(stack) for stack in plan.stacks}
    tables = {
        name: jax.tree.map(
            lambda s, name=name: jax.device_put(
                np.zeros(s.shape, s.dtype), shardings[name]
            ),
            shapes[name],
        )
        for name in shardings
    }
    values = {}
    for stack in plan.stacks:
        for table in stack.tables:
            rows = np.arange(table.config.vocabulary_size)[:, None]
            steps = 7 * rows + 3 * np.arange(table.config.dim) + len(values) * 11
            values[table.name] = ((steps % 31 - 15) / 8).astype(np.float32)
    return te.functional.with_table_values(tables, values, plan, {})[0]


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
                gradient = np.nan_to_num(gradients[name][row]) + gain * by_bag[i]
                gradients[name][row] = gradient
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


def shape_of(feature, num_samples):
    """Returns the shape of the activations of a lookup."""
    dim, length = feature.table.dim, feature.config.max_sequence_length
    if feature.config.output_shape is not None:
        return (*feature.config.output_shape, dim)
    return (num_samples, length, dim) if length else (num_samples, dim)


def tolerance_of(table, features):
    combiners = {feature.combiner for feature in features}
    is_exact = combiners <= {"sum"} and table.dtype_name != "int8"
    return dict(rtol=0, atol=0) if is_exact else TOLERANCE


def check_updates(plan, before, after, slots, gradients):
    """Compares tables and slot variables; rows not looked up keep their bits."""
    found_slots = te.functional.slot_values(slots, plan)
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
        features = [f for f in plan.features if f.table == table.config]
        tolerance = dict(tolerance_of(table.config, features))
        if optimizer is OPTIMIZERS["adagrad"]:
            accumulators = INITIAL_ACCUMULATOR + gradient**2
            np.testing.assert_allclose(
                found_slots[name]["accumulators"],
                accumulators,
                **tolerance,
                err_msg=name,
            )
            step = gradient / np.sqrt(accumulators)
            tolerance = {k: max(v, TOLERANCE[k]) for k, v in tolerance.items()}
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


@pytest.mark.full
def test_random_configurations_equal_the_dense_reference():
    random_examples(8)()
