"""Moving averages of tables: kept by touched rows, swapped in at the end."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import GOLDEN, mesh_of
from tests.optimizers.rule_cases import (
    initial_state,
    initial_state_of_tables,
    one_table_plan,
    plan_of_tables,
    update,
)

opt = te.optimizers
DIM, SIZES = 4, {"a": 30, "b": 7, "c": 1}


def plan_of(names, optimizer, num_devices, hardware="cpu", **options):
    sizes = {name: SIZES[name] for name in names}
    return plan_of_tables(sizes, DIM, optimizer, num_devices, hardware, **options)


def start_of(name):
    rows = np.random.default_rng(SIZES[name]).normal(size=(SIZES[name], DIM))
    return rows.astype(np.float32)


def batches(names, num_steps):
    """Few ids per step, so that most rows are skipped in most steps."""
    generator = np.random.default_rng(1)
    for _ in range(num_steps):
        ids = {n: generator.integers(0, SIZES[n], 4).astype(np.int32) for n in names}
        yield (
            ids,
            {n: np.float32(generator.normal(size=(4, DIM))) for n in names},
        )


def rows_after_each_step(plan, names, num_steps):
    """Yields the tables and slots, and the logical rows, from the start on."""
    tables, slots = initial_state_of_tables(plan, {n: start_of(n) for n in names})
    yield tables, slots, te.functional.unstack_tables(tables, plan)
    for ids, cotangents in batches(names, num_steps):
        tables, slots = update(tables, slots, ids, cotangents, plan)
        yield tables, slots, te.functional.unstack_tables(tables, plan)


EMA = {"use_ema": True, "ema_momentum": 0.7}
CASES = {
    "lazy": (EMA, 2, {"capacity": 1}),
    "exact": ({**EMA, "mode": "exact"}, 2, {}),
    "packed": ({**EMA, "weight_decay": 0.1}, 8, {"hardware": "v5p"}),
    "from_initial_values": ({**EMA, "ema_start": "initial_values"}, 1, {}),
    "chain": (EMA, 2, {}),
    "collected": ({**EMA, "gradient_accumulation_steps": 2}, 3, {}),
    "replicated": (EMA, 2, {"placement": te.Replicated()}),
}
full = pytest.mark.full


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        "lazy",
        pytest.param("collected", marks=full),
        pytest.param("replicated", marks=full),
        pytest.param("exact", marks=full),
        pytest.param("packed", marks=full),
        pytest.param("from_initial_values", marks=full),
        pytest.param("chain", marks=full),
    ],
)
def test_final_values_average_every_row_in_every_step(case):
    """Also of rows that no step looks up, though these cost nothing in the steps."""
    options, num_devices, others = CASES[case]
    optimizer = opt.adafactor(0.3, **options)
    if case == "chain":
        optimizer = optax.chain(optax.clip(0.5), optimizer)
    names = tuple(SIZES)
    plan = plan_of(names, optimizer, num_devices, **others)
    steps_of_update = options.get("gradient_accumulation_steps", 1)
    expected = {}
    for i, (tables, slots, rows) in enumerate(rows_after_each_step(plan, names, 6)):
        # The first update of Keras 3 begins the averages anew.
        begins = i <= steps_of_update and "ema_start" not in options
        for name in names:
            momentum = 0.0 if i == 0 or begins else 0.7
            old = expected.get(name, 0.0)
            expected[name] = momentum * old + (1 - momentum) * rows[name]
        if i not in (1, 3, 6):
            continue
        final, new_slots = te.functional.finalize_variable_values(tables, slots, plan)
        found = te.functional.unstack_tables(final, plan)
        for name in names:
            np.testing.assert_allclose(
                found[name], expected[name], rtol=1e-5, atol=1e-6
            )
        # The state fits the new rows: another call changes nothing.
        again, _ = te.functional.finalize_variable_values(final, new_slots, plan)
        for name, values in te.functional.unstack_tables(again, plan).items():
            np.testing.assert_allclose(values, found[name], rtol=1e-6, atol=1e-7)


def test_averages_need_no_pass_over_the_table():
    plan = one_table_plan(opt.adafactor(0.1, use_ema=True), 9, DIM, mesh_of(1))
    assert plan.stacks[0].optimizer.rows == "touched"
    overwrites = opt.adafactor(0.1, use_ema=True, ema_overwrite_frequency=2)
    plan = one_table_plan(overwrites, 9, DIM, mesh_of(1))
    assert plan.stacks[0].optimizer.rows == "every"


@pytest.mark.parametrize(
    ("name", "mode", "num_devices"),
    [
        pytest.param("adafactor_ema", "lazy", 8, marks=full),
        pytest.param("adafactor_ema_overwrite", "lazy", 1, marks=full),
        pytest.param("adafactor_tfkeras_ema", "exact", 3, marks=full),
    ],
)
def test_final_values_are_those_of_the_recorded_run(name, mode, num_devices):
    with np.load(GOLDEN / f"{name}.npz") as run:
        run = dict(run)
    meta = json.loads(str(run["meta"]))
    arguments = dict(meta["hyper_parameters"])
    if meta["implementation"] == "tf_keras":
        arguments["ema_start"] = "initial_values"
    optimizer = opt.adafactor(**arguments, mode=mode)
    plan = one_table_plan(optimizer, meta["V"], meta["D"], mesh_of(num_devices))
    tables, slots = initial_state(plan, run["table"][0])
    for step, (ids, gradients) in enumerate(zip(run["ids"], run["grads"], strict=True)):
        tables, slots = update(tables, slots, ids, gradients, plan)
        final, _ = te.functional.finalize_variable_values(tables, slots, plan)
        np.testing.assert_allclose(
            te.functional.unstack_tables(final, plan)["table"],
            run["slot__ema"][step + 1],
            rtol=2e-6,
            atol=1e-6,
        )


@full
def test_training_goes_on_from_final_values():
    """The root mean square of the table is that of the rows that were swapped in."""
    optimizer = opt.adafactor(0.3, use_ema=True, ema_momentum=0.2)
    plan = plan_of(("a", "b"), optimizer, 2)
    *_, (tables, slots, _) = rows_after_each_step(plan, ("a", "b"), 3)
    tables, slots = te.functional.finalize_variable_values(tables, slots, plan)
    rows = te.functional.unstack_tables(tables, plan)
    squares = te.functional.slot_values(slots, plan, "all")
    for name in ("a", "b"):
        np.testing.assert_allclose(
            squares[name]["squares/value"], np.sum(rows[name] ** 2), rtol=1e-5
        )


@full
def test_narrow_tables_are_rounded_to_their_averages():
    table = te.TableConfig(
        vocabulary_size=12, dim=DIM, name="t", combiner="sum", dtype=jnp.bfloat16
    )
    optimizer = opt.adafactor(0.3, use_ema=True, ema_momentum=0.5)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(2), optimizer=optimizer)
    tables, slots = initial_state_of_tables(plan, {"t": np.ones((12, DIM), np.float32)})
    ids, gradient = np.int32([1, 5]), np.ones((2, DIM), np.float32)
    for _ in range(3):
        tables, slots = update(tables, slots, ids, gradient, plan)
    final, slots = te.functional.finalize_variable_values(tables, slots, plan)
    averages = te.functional.slot_values(slots, plan)["t"]["averages"]
    found = np.float32(te.functional.unstack_tables(final, plan)["t"])
    np.testing.assert_array_equal(found, np.float32(averages.astype(jnp.bfloat16)))


def test_slots_without_averages_change_nothing():
    plan = plan_of(("b",), "adagrad", 1)
    tables, slots = initial_state_of_tables(plan, {"b": start_of("b")})
    found = te.functional.finalize_variable_values(tables, slots, plan)
    jax.tree.map(np.testing.assert_array_equal, found, (tables, slots))
    with pytest.raises(ValueError, match="slots must hold stack"):
        te.functional.finalize_variable_values(tables, {}, plan)


class Model(nnx.Module):
    """Two tables in two layers, and dense weights of rank 1, 2 and 3."""

    def __init__(self, rule, other_rule="sgd"):
        self.left = self._layer("a", rule)
        self.right = self._layer("b", other_rule)
        self.bias = nnx.Param(jnp.ones(DIM))
        self.kernel = nnx.Param(jnp.ones((DIM, 3)))
        self.heads = nnx.Param(jnp.ones((2, 3, 2)))

    def _layer(self, name, rule):
        table = te.TableConfig(
            vocabulary_size=SIZES[name], dim=DIM, combiner="sum", name=name
        )
        layer = te.TPUEmbedding(
            te.FeatureConfig(table=table, name=name),
            rule,
            mesh=mesh_of(2),
            rngs=nnx.Rngs(0),
        )
        layer.set_embedding_tables({name: start_of(name)})
        return layer

    def __call__(self, ids):
        rows = self.left(ids) * self.right(ids % SIZES["b"]) + self.bias[None]
        return jnp.einsum("bd,de,heo->b", rows, self.kernel[...], self.heads[...])


def dense_loss(params, ids):
    """The loss of `Model`, as a function of dense arrays."""
    rows = params["a"][ids] * params["b"][ids % SIZES["b"]] + params["bias"][None]
    return jnp.mean(
        jnp.einsum("bd,de,heo->b", rows, params["kernel"], params["heads"]) ** 2
    )


def dense_params():
    return {
        "a": jnp.asarray(start_of("a")),
        "b": jnp.asarray(start_of("b")),
        "bias": jnp.ones(DIM),
        "kernel": jnp.ones((DIM, 3)),
        "heads": jnp.ones((2, 3, 2)),
    }


def values_of(model):
    values = {
        **model.left.embedding_tables(),
        **model.right.embedding_tables(),
        "bias": model.bias[...],
        "kernel": model.kernel[...],
        "heads": model.heads[...],
    }
    return {name: np.asarray(value) for name, value in values.items()}


@nnx.jit
def train_step(model, optimizer, ids):
    loss, gradients = te.value_and_grad(lambda model: jnp.mean(model(ids) ** 2))(model)
    optimizer.update(model, gradients)
    return loss, te.gradients.global_norm(gradients)


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        # Gradients are summed in another order.
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.full
def test_one_adafactor_trains_and_finalizes_a_whole_model():
    """As if the tables were dense: one norm clips all, and all get averages."""
    rule = opt.adafactor(
        0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.6, mode="exact"
    )
    model = Model(rule, rule)
    optimizer = te.Optimizer(model, rule)
    params = dense_params()
    state = rule.init(params)
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(0, SIZES["a"], 6).astype(np.int32)
        loss, norm = train_step(model, optimizer, ids)
        expected, gradients = jax.value_and_grad(dense_loss)(params, ids)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert norm > 0.5  # Else nothing would be clipped.
        updates, state = rule.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        assert_same(values_of(model), params)
    optimizer.finalize_variable_values(model)
    assert_same(values_of(model), opt.finalize_variable_values(params, state)[0])


@pytest.mark.full
def test_the_norm_is_that_of_the_model_for_one_table_too():
    """Other tables and weights have other optimizers, and count all the same."""
    model = Model(opt.adafactor(0.1, global_clipnorm=0.5, mode="exact"))
    optimizer = te.Optimizer(model, optax.sgd(0.01))
    start = values_of(model)
    ids = np.arange(6, dtype=np.int32)
    train_step(model, optimizer, ids)
    gradients = jax.grad(dense_loss)(dense_params(), ids)
    factor = 0.5 / optax.global_norm(gradients)
    rule = opt.adafactor(0.1, mode="exact", epsilon_1=1e-30)
    rows = jnp.asarray(start["a"])
    updates, _ = rule.update(factor * gradients["a"], rule.init(rows), rows)
    found = values_of(model)
    np.testing.assert_allclose(found["a"], rows + updates, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        found["b"], start["b"] - 0.01 * gradients["b"], rtol=1e-4, atol=1e-5
    )


@pytest.mark.full
def test_tables_alone_are_clipped_by_their_common_norm():
    """Two stacks, through the functional calls; Keras clips over all variables."""
    tables = [
        te.TableConfig(
            vocabulary_size=SIZES[name],
            dim=DIM,
            combiner="sum",
            name=name,
            # Equal rules would share a stack; epsilon_2 moves no accumulator.
            optimizer=opt.adafactor(
                0.1, global_clipnorm=1.0, epsilon_1=0.1, epsilon_2=epsilon_2
            ),
        )
        for name, epsilon_2 in (("a", 1e-3), ("b", 2e-3))
    ]
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    plan = te.make_plan(features, mesh_of(2))
    assert len(plan.stacks) == 2
    tables, slots = initial_state_of_tables(plan, {n: start_of(n) for n in "ab"})
    ids = {"a": np.int32([3]), "b": np.int32([2])}
    cotangents = {n: np.full((1, DIM), x, np.float32) for n, x in (("a", 3), ("b", 4))}
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    np.testing.assert_allclose(te.gradients.global_norm(gradients), 10.0, rtol=1e-6)
    for norm, factor in [(None, 0.1), (20.0, 0.05), (0.5, 1.0)]:
        _, new_slots = te.functional.apply_gradients(
            tables, slots, gradients, plan, norm
        )
        for name, gradient in (("a", 3.0), ("b", 4.0)):
            found = te.functional.slot_values(new_slots, plan)[name]["row_accumulators"]
            np.testing.assert_allclose(
                found[ids[name][0]], (factor * gradient) ** 2 + 0.1, rtol=1e-5
            )


def test_tables_do_not_know_the_norm_of_collected_gradients():
    optimizer = opt.adafactor(0.1, global_clipnorm=1.0, gradient_accumulation_steps=2)
    with pytest.raises(
        ValueError, match=r"clip it by te.gradients.clip_by_global_norm.*'table'"
    ):
        one_table_plan(optimizer, 9, DIM, mesh_of(1))


def test_finalize_leaves_a_model_without_averages():
    model = Model("adagrad")
    optimizer = te.Optimizer(model, optax.adam(1e-3))
    before = nnx.state((model, optimizer))
    optimizer.finalize_variable_values(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state((model, optimizer)), before)
