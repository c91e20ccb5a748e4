"""The operations in plain JAX equal dense NumPy, and reject what a chip cannot do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.optimizers.rule_cases import OPTIMIZERS
from tests.sparse_core.cases import (
    dealt,
    gathered,
    on_devices,
    partition,
    random_case,
    stacked,
)
from tests.tiers import quick_cases, with_ids
from tpu_embedding.optimizers.row_optimizer import row_optimizer_of
from tpu_embedding.sparse_core import operations
from tpu_embedding.sparse_core.limits import Limits, OperationSizes
from tpu_embedding.sparse_core.row_rule import RowRule, row_rule

WIDTH = 8
AXES = ("shard",)
LIMITS = Limits(max_ids=256, max_unique=256, room=4096)

SHAPES = quick_cases(
    with_ids(
        {
            f"{cores}cores-{devices}devices": (cores, devices)
            for cores in (2, 4)
            for devices in (1, 2, 3, 8)
        }
    ),
    "2cores-1devices",
    "2cores-2devices",
)


def cases_of(cores, devices, seed=0):
    """Returns the ids of each device, for one table."""
    cases = [random_case(seed + i, cores, devices) for i in range(devices)]
    rows = max(case.rows_per_partition for case in cases)
    return [dataclasses.replace(case, rows_per_partition=rows) for case in cases]


def table_of(case, seed=0, width=WIDTH):
    shape = case.rows_per_partition * case.num_partitions, width
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def expected_sums(cases, table):
    sums = np.zeros((len(cases), cases[0].num_samples, table.shape[1]))
    for device, case in enumerate(cases):
        for row, sample, gain in zip(case.ids, case.samples, case.gains, strict=True):
            if row >= 0:
                sums[device, sample] += gain * table[row]
    return sums


def expected_gradients(cases, cotangents):
    """Returns the gradient of each row, and which rows were asked for."""
    num_rows = cases[0].rows_per_partition * cases[0].num_partitions
    sums, is_touched = np.zeros((num_rows, cotangents.shape[2])), np.zeros(num_rows)
    for case, of_device in zip(cases, cotangents, strict=True):
        for row, sample, gain in zip(case.ids, case.samples, case.gains, strict=True):
            if row >= 0:
                sums[row] += np.float32(gain) * of_device[sample]
                is_touched[row] = 1
    return sums, is_touched > 0


def run_lookup(cases, table, limits=LIMITS, change=lambda ids: ids, buffered=LIMITS):
    case = cases[0]

    def look_up(partitions, rows, samples, gains, shard):
        ids, _ = partition(
            *(partitions, rows, samples, gains), **case.sizes(), limits=buffered
        )
        sizes = OperationSizes(case.num_samples, limits, case.cores, AXES)
        return operations.lookup(change(ids), shard, sizes)

    run = on_devices(look_up, case.devices, 5, 1)
    return np.asarray(run(*stacked(cases), dealt(table, case.cores, case.devices)))


def run_update(
    cases,
    rule: RowRule,
    arrays,
    cotangents,
    hyperparameters,
    limits=LIMITS,
    buffered=LIMITS,
):
    case = cases[0]
    sizes = tuple(case.sizes().items())
    run = update_program(rule, sizes, limits, buffered)
    shards = [dealt(x, case.cores, case.devices) for x in arrays]
    scalars = [jnp.repeat(x[None], case.devices) for x in hyperparameters]
    results = run(*stacked(cases), cotangents, *shards, *scalars)
    return [gathered(x, case.cores) for x in jax.tree.leaves(results)]


@functools.cache
def update_program(rule: RowRule, sizes, limits, buffered):
    sizes, num_arrays = dict(sizes), 1 + rule.num_slots
    static = OperationSizes(sizes["num_samples"], limits, sizes["cores"], AXES)

    def update(partitions, rows, samples, gains, cotangents, *rest):
        ids, _ = partition(partitions, rows, samples, gains, **sizes, limits=buffered)
        shards, scalars = rest[:num_arrays], rest[num_arrays:]
        new = operations.update(ids, cotangents, shards, scalars, rule, static)
        return new if num_arrays > 1 else new[0]

    num_inputs = 5 + num_arrays + rule.num_hyperparameters
    return on_devices(update, sizes["devices"], num_inputs, num_arrays)


@pytest.mark.parametrize("cores, devices", SHAPES)
def test_lookup_equals_dense_sums(cores, devices):
    cases = cases_of(cores, devices)
    table = table_of(cases[0])
    sums = run_lookup(cases, table)
    # Sums of some rounded products, in another order.
    np.testing.assert_allclose(sums, expected_sums(cases, table), atol=1e-5)


@functools.cache
def _rule(optimizer, dim=WIDTH, width=WIDTH) -> RowRule:
    rule = row_rule(row_optimizer_of(optimizer), dim, width)
    assert isinstance(rule, RowRule), rule
    return rule


ELEMENTWISE = {
    name: rule
    for name, rule in OPTIMIZERS.items()
    if not any(x in name for x in ("rowwise", "lamb", "clippy", "frequency", "lazy"))
    and name != "adafactor"
}


RULES_AND_DIMS = {
    **{name: (name, 5) for name in ELEMENTWISE},
    "no padding": ("adam", 8),
}


@pytest.mark.parametrize(
    "name, dim",
    quick_cases(with_ids(RULES_AND_DIMS), "adam"),
)
def test_every_elementwise_rule_equals_optax(name, dim):
    """Two steps; the second touches other rows."""
    optimizer = ELEMENTWISE[name]
    rule = _rule(optimizer, dim)
    cases, more = cases_of(2, 2), cases_of(2, 2, seed=7)
    rows = max(cases[0].rows_per_partition, more[0].rows_per_partition)
    table = table_of(dataclasses.replace(cases[0], rows_per_partition=rows), width=dim)
    state = optimizer.init(jnp.asarray(table))
    leaves, tree = jax.tree.flatten(state)
    is_slot = [np.shape(x) == table.shape for x in leaves]
    arrays = [
        np.asarray(x) for x, of_rows in zip(leaves, is_slot, strict=True) if of_rows
    ]
    padding = np.full((len(table), WIDTH - dim), -3, np.float32)
    stored = [np.concatenate([x, padding], 1) for x in (table, *arrays)]
    others = [x for x, of_rows in zip(leaves, is_slot, strict=True) if not of_rows]

    for step, cases_ in enumerate((cases, more)):
        cases_ = [dataclasses.replace(x, rows_per_partition=rows) for x in cases_]
        shape = (2, cases_[0].num_samples, WIDTH)
        cotangents = np.random.default_rng(step).normal(size=shape).astype(np.float32)
        hyperparameters, others = rule.values(others)
        stored = run_update(cases_, rule, stored, cotangents, hyperparameters)

        gradient, is_touched = expected_gradients(cases_, cotangents)
        gradient = jnp.asarray(gradient[:, :dim], jnp.float32)
        updates, new = optimizer.update(gradient, state, jnp.asarray(table))
        new_leaves = tree.flatten_up_to(new)
        table = np.where(is_touched[:, None], table + updates, table)
        leaves = [
            np.where(is_touched[:, None], after, before) if of_rows else after
            for before, after, of_rows in zip(leaves, new_leaves, is_slot, strict=True)
        ]
        state = tree.unflatten([jnp.asarray(x) for x in leaves])
        expected = [table, *(x for x, s in zip(leaves, is_slot, strict=True) if s)]
        for got, wanted in zip(stored, expected, strict=True):
            # Sums of gradients in another order; roots of small numbers widen that.
            np.testing.assert_allclose(got[:, :dim], wanted, rtol=2e-4, atol=2e-5)
            assert np.array_equal(got[:, dim:], padding)
        wanted = [x for x, s in zip(leaves, is_slot, strict=True) if not s]
        jax.tree.map(np.testing.assert_array_equal, others, wanted)


BROKEN = {
    "too many ids": dict(limits=Limits(max_ids=0, max_unique=256, room=4096)),
    "too many rows": dict(limits=Limits(max_ids=256, max_unique=0, room=4096)),
    "pointer": dict(
        change=lambda ids: dataclasses.replace(ids, pointers=ids.pointers.at[9].add(1))
    ),
    "gain": dict(
        change=lambda ids: dataclasses.replace(ids, gains=ids.gains.at[0].set(jnp.nan))
    ),
    "row": dict(
        change=lambda ids: dataclasses.replace(ids, rows=ids.rows.at[0].set(10**6))
    ),
    "minibatches": dict(
        change=lambda ids: dataclasses.replace(
            ids, num_minibatches=ids.num_minibatches + 1
        )
    ),
    "padding": dict(
        change=lambda ids: dataclasses.replace(ids, rows=ids.rows.at[-1].set(0))
    ),
}


@pytest.mark.parametrize("name", quick_cases(BROKEN, every_case=True))
def test_what_a_chip_leaves_undefined_is_nan(name):
    fault = BROKEN[name]
    cases = cases_of(2, 1)
    cases = [dataclasses.replace(cases[0], ids=np.maximum(cases[0].ids, 0))]
    assert np.all(np.isnan(run_lookup(cases, table_of(cases[0]), **fault)))


@pytest.mark.full
def test_undefined_on_one_device_is_nan_on_all():
    cases = cases_of(2, 3)
    empty = [dataclasses.replace(c, ids=np.full_like(c.ids, -1)) for c in cases]
    one = [empty[0], cases[1], empty[2]]
    limits = Limits(max_ids=1, max_unique=1, room=4096)
    table = table_of(cases[0])
    assert np.all(run_lookup(empty, table, limits) == 0)
    assert np.all(np.isnan(run_lookup(one, table, limits)))
    rule = _rule(optax.sgd(0.1))
    cotangents = np.ones((3, cases[0].num_samples, WIDTH), np.float32)
    hyperparameters, _ = rule.values([])
    (updated,) = run_update(one, rule, [table], cotangents, hyperparameters, limits)
    assert np.all(np.isnan(updated))


# Inputs and results of jax-tpu-embedding's tests of its primitives, which run on TPUs:
# jax_tpu_embedding/sparsecore/lib/core/primitives/tests, commit 566086d. 16 samples
# with one id each; all elements of row i start at i, or at i + 1 if `first` is 1.
PUBLISHED_IDS = [5, 3, 9, 1, 6, 12, 0, 4, 15, 13, 11, 7, 8, 14, 2, 10]


def _laprop(learning_rate, b1=0.9, decay=0.95, epsilon=1e-8):
    """Its update of LaProp, as an optax transformation."""

    def init(rows):
        return jnp.full_like(rows, 0.002), jnp.full_like(rows, 0.004)

    def update(gradient, state, rows=None):
        mu, nu = state
        nu = decay * nu + (1 - decay) * (gradient * gradient + epsilon)
        mu = b1 * mu + np.sqrt(1 - b1**2) * gradient / jnp.sqrt(nu)
        return -learning_rate * mu, (mu, nu)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Published:
    """One of these tests: `moved` maps the values of rows to the new ones."""

    optimizer: optax.GradientTransformation
    gradient: float
    first: int
    slots: tuple[float, ...]
    moved: object
    new_slots: tuple


def _ftrl(w, a, z, g, rate, power, l1, l2, beta):
    """Its update of FTRL in float64."""
    new = a + g * g
    delta = (new**-power - a**-power) / rate
    z = z + g - delta * w
    w = np.where(
        np.abs(z) > l1,
        (np.sign(z) * l1 - z) / ((new**-power + beta) / rate + 2 * l2),
        0.0,
    )
    return w, new, z


PUBLISHED = {
    "sgd": Published(optax.sgd(0.01), 0.01, 0, (), lambda w: w - 1e-4, ()),
    "adagrad": Published(
        te.optimizers.adagrad(0.1, 0.002),
        0.012,
        1,
        (0.002,),
        lambda w: w - 0.02591604,
        (0.002144,),
    ),
    "adam": Published(
        te.optimizers.adam(0.1, bias_correction=True, epsilon=1e-8),
        0.012,
        1,
        (0.002, 0.004),
        lambda w: (
            w
            - 0.1
            * ((0.9 * 0.002 + 0.1 * 0.012) / 0.1)
            / np.sqrt((0.999 * 0.004 + 0.001 * 0.012**2) / 0.001)
        ),
        (0.003, 0.999 * 0.004 + 0.001 * 0.012**2),
    ),
    "ftrl": Published(
        te.optimizers.ftrl(
            0.1,
            learning_rate_power=-0.05,
            l1_regularization_strength=2.0,
            l2_regularization_strength=3.0,
            beta=0.5,
        ),
        0.012,
        1,
        (0.002, 0.004),
        lambda w: _ftrl(w, 0.002, 0.004, 0.012, 0.1, -0.05, 2.0, 3.0, 0.5)[0],
        (
            0.002144,
            lambda w: _ftrl(w, 0.002, 0.004, 0.012, 0.1, -0.05, 2.0, 3.0, 0.5)[2],
        ),
    ),
    "laprop": Published(
        _laprop(0.1),
        0.01,
        0,
        (0.002, 0.004),
        lambda w: w - 0.00724642,
        (0.07246420, 0.0038050005),
    ),
}


@pytest.mark.parametrize("name", quick_cases(PUBLISHED, every_case=True))
def test_published_updates(name):
    published = PUBLISHED[name]
    case = dataclasses.replace(
        random_case(0, 2, 1, num_samples=16, valence=1),
        ids=np.asarray(PUBLISHED_IDS),
        samples=np.arange(16),
        gains=np.ones(16),
        rows_per_partition=16,
    )
    values = np.arange(32.0) + published.first
    table = np.tile(np.float32(values)[:, None], WIDTH)
    slots = [np.full_like(table, x) for x in published.slots]
    cotangents = np.full((1, 16, WIDTH), published.gradient, np.float32)
    rule = _rule(published.optimizer)
    state = jax.tree.leaves(published.optimizer.init(jnp.asarray(table)))
    others = [x for x in state if np.shape(x) != table.shape]
    hyperparameters, _ = rule.values(others)
    results = run_update([case], rule, [table, *slots], cotangents, hyperparameters)

    expected = [published.moved, *published.new_slots]
    for before, got, wanted in zip([table, *slots], results, expected, strict=True):
        after = wanted(values) if callable(wanted) else np.full(32, wanted)
        after = np.where(np.arange(32) < 16, after, before[:, 0])
        # The tolerance of the original tests.
        np.testing.assert_allclose(got, np.tile(after[:, None], WIDTH), atol=1e-5)
