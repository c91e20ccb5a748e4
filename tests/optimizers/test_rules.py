"""What holds for every optimizer of tables: one table of them drives all tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rules import (
    initial_state,
    logical_slots,
    one_table_plan,
    update,
)

VOCABULARY_SIZE, DIM = 40, 8


def custom_adagrad(gradient, row, slots, learning_rate, _):
    accumulator = slots[0] + gradient**2
    return row - learning_rate * gradient / jnp.sqrt(accumulator), accumulator


OPTIMIZERS = {
    "sgd": te.optimizers.sgd(0.1),
    "adagrad": te.optimizers.adagrad(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adam": te.optimizers.adam(0.1),
    "momentum": te.optimizers.momentum(0.1, use_nesterov=True),
    "adagrad_momentum": te.optimizers.adagrad_momentum(0.1, momentum=0.5),
    "ftrl": te.optimizers.ftrl(0.5, l1_regularization_strength=0.01),
    "rmsprop": te.optimizers.rmsprop(0.05, momentum=0.3, centered=True, epsilon=1e-3),
    "proximal_adagrad": te.optimizers.proximal_adagrad(0.3, l1=0.01, l2=0.01),
    "adadelta": te.optimizers.adadelta(2.0, epsilon=1e-4),
    "lion": te.optimizers.lion(0.03),
    "bounded_adagrad": te.optimizers.bounded_adagrad(
        0.3, max_var_update=0.1, max_accumulator=5.0
    ),
    "frequency_aware_adagrad": te.optimizers.frequency_aware_adagrad(0.3, l2=0.01),
    "proximal_yogi": te.optimizers.proximal_yogi(0.1, l1=0.01, l2=0.01),
    "online_yogi": te.optimizers.online_yogi(0.01, l1=0.01),
    "partial_rowwise_adam": te.optimizers.partial_rowwise_adam(0.1, weight_decay=0.01),
    "lamb": te.optimizers.lamb(0.1, weight_decay=0.01),
    "partial_rowwise_lamb": te.optimizers.partial_rowwise_lamb(0.1),
    "rowwise_rmsprop": te.optimizers.rowwise_rmsprop(0.05),
    "rowwise_adagrad_decays": te.optimizers.rowwise_adagrad(0.1, weight_decay=0.01),
    "rowwise_adagrad_decoupled": te.optimizers.rowwise_adagrad(
        0.1, 0.0, epsilon=1e-8, weight_decay=0.01, weight_decay_mode="decoupled"
    ),
    "user_defined": te.optimizers.user_defined(
        custom_adagrad, 0.3, slot_names=("accumulators",), slot_initializers=(0.1,)
    ),
    "clippy_adagrad": te.optimizers.clippy_adagrad(
        0.3, variable_relative_threshold=0.5, absolute_threshold=0.1
    ),
    "adafactor": te.optimizers.adafactor(0.3, epsilon_2=0.1),
    "norm": optax.chain(optax.clip_by_global_norm(10.0), te.optimizers.adagrad(0.3)),
    "options": te.optimizers.with_options(
        te.optimizers.adagrad(0.3),
        clipvalue=(-1.0, None),
        weight_decay_factor=0.01,
        clip_weight_min=-3.0,
        clip_weight_max=3.0,
    ),
    "adam_bias_corrected": te.optimizers.adam(0.1, bias_correction=True),
    "schedule": te.optimizers.adagrad(optax.cosine_decay_schedule(0.1, 100)),
    "optax.sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "optax.adam": optax.adam(0.1),
    "optax.adamw": optax.adamw(0.1),
    "optax.lion": optax.lion(0.01),
    "optax.yogi": optax.yogi(0.1),
    "optax.rmsprop": optax.rmsprop(0.05, centered=True),
    "optax.adagrad": optax.adagrad(0.1),
    "optax.adabelief": optax.adabelief(0.1),
    "chain": optax.chain(optax.clip(0.5), optax.scale_by_adam(), optax.scale(-0.1)),
    "inject": optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=0.1),
}
# Equal to the dense rule also where rows are skipped: gradient 0 changes nothing.
WITHOUT_MEMORY = ("sgd", "adagrad", "schedule", "rowwise_adagrad")


def batches(num_steps, num_ids=24, seed=0, vocabulary_size=VOCABULARY_SIZE):
    generator = np.random.default_rng(seed)
    for _ in range(num_steps):
        ids = generator.integers(0, vocabulary_size, num_ids).astype(np.int32)
        yield ids, generator.normal(size=(num_ids, DIM)).astype(np.float32)


def start_values(seed=0):
    return np.random.default_rng(seed).normal(size=(VOCABULARY_SIZE, DIM))


def run(name, num_devices, steps, **options):
    plan = one_table_plan(
        OPTIMIZERS[name], VOCABULARY_SIZE, DIM, mesh_of(num_devices), **options
    )
    tables, slots = initial_state(plan, start_values())
    for ids, cotangents in steps:
        tables, slots = update(tables, slots, ids, cotangents, plan)
    return te.logical_values(tables, plan)["table"], logical_slots(slots, plan), slots


def run_dense(name, steps):
    """The same transformation on dense gradients of the whole table."""
    optimizer = OPTIMIZERS[name]
    table = jnp.asarray(start_values(), jnp.float32)
    state = optimizer.init(table)
    for ids, cotangents in steps:
        gradient = jnp.zeros_like(table).at[ids].add(cotangents)
        updates, state = optimizer.update(gradient, state, table)
        table = optax.apply_updates(table, updates)
    return table


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_dense_when_every_row_is_touched(name):
    every_row = np.arange(VOCABULARY_SIZE, dtype=np.int32)
    steps = [
        (
            np.concatenate([every_row, ids]),
            np.concatenate([start_values(i), cotangents]),
        )
        for i, (ids, cotangents) in enumerate(batches(4))
    ]
    steps = [(ids, np.float32(cotangents)) for ids, cotangents in steps]
    table, _, _ = run(name, 8, steps)
    # Sums of duplicates in another order, then divided by roots near zero.
    np.testing.assert_allclose(table, run_dense(name, steps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_equals_dense_for_any_touched_rows(name):
    steps = list(batches(4))
    table, _, _ = run(name, 8, steps)
    np.testing.assert_allclose(table, run_dense(name, steps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"capacity": 1}], ids=str)
@pytest.mark.parametrize("hardware", ["cpu", "v5p"])
@pytest.mark.parametrize("name", ["adam", "optax.sgd", "optax.adamw", "optax.lion"])
def test_every_row_equals_dense_for_any_touched_rows(name, hardware, options):
    """Also where each round has its own range of rows, and lines hold several."""
    steps = list(batches(3))
    plan = one_table_plan(
        te.optimizers.every_row(OPTIMIZERS[name]),
        VOCABULARY_SIZE,
        DIM,
        mesh_of(8),
        hardware=te.hardware_by_name(hardware),
        **options,
    )
    tables, slots = initial_state(plan, start_values())
    for ids, cotangents in steps:
        tables, slots = update(tables, slots, ids, cotangents, plan)
    np.testing.assert_allclose(
        te.logical_values(tables, plan)["table"],
        run_dense(name, steps),
        rtol=1e-4,
        atol=1e-5,
    )


STEP_GATED = {
    "apply_every": optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", STEP_GATED)
def test_step_gated_rules_need_every_row(name):
    """A row that waits for its turn would wait for its next lookup as well."""
    with pytest.raises(te.optimizers.NotRowLocalError, match="every_row"):
        one_table_plan(STEP_GATED[name], VOCABULARY_SIZE, DIM, mesh_of(1))


def test_multi_steps_on_every_row_equals_dense():
    optimizer = STEP_GATED["MultiSteps"]
    plan = one_table_plan(
        te.optimizers.every_row(optimizer), VOCABULARY_SIZE, DIM, mesh_of(8)
    )
    tables, slots = initial_state(plan, start_values())
    table = jnp.asarray(start_values(), jnp.float32)
    state = optimizer.init(table)
    for ids, cotangents in batches(4):
        tables, slots = update(tables, slots, ids, cotangents, plan)
        gradient = jnp.zeros_like(table).at[ids].add(cotangents)
        updates, state = optimizer.update(gradient, state, table)
        table = optax.apply_updates(table, updates)
    np.testing.assert_allclose(
        te.logical_values(tables, plan)["table"], table, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("hardware", ["cpu", "v5p"])
def test_slots_survive_outliers(hardware):
    """A slot that is replaced drops from 1e6 to 1e-6 without a trace of the former."""
    optimizer = optax.optimistic_gradient_descent(0.1)
    plan = one_table_plan(
        optimizer, 4, 2, mesh_of(2), hardware=te.hardware_by_name(hardware)
    )
    tables, slots = initial_state(plan, np.ones((4, 2)))
    ids = np.arange(4, dtype=np.int32)
    for size in (1e6, 1e-3, 1e-6):
        gradient = np.full((4, 2), size, np.float32)
        tables, slots = update(tables, slots, ids, gradient, plan)
    np.testing.assert_allclose(logical_slots(slots, plan)[0], 1e-6, rtol=1e-6)


def test_every_row_excludes_sequence():
    optimizer = te.optimizers.every_row(te.optimizers.in_sequence(OPTIMIZERS["sgd"]))
    with pytest.raises(ValueError, match="at once"):
        one_table_plan(optimizer, VOCABULARY_SIZE, DIM, mesh_of(1))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_same_numbers_everywhere(name):
    steps = list(batches(3))
    expected, expected_slots, _ = run(name, 1, steps)
    for num_devices, options in [
        (8, {"hardware": te.hardware_by_name("v6e")}),
        (3, {"capacity": 2}),
    ]:
        table, slots, _ = run(name, num_devices, steps, **options)
        np.testing.assert_allclose(table, expected, rtol=2e-5, atol=1e-5)
        for slot, expected_slot in zip(slots, expected_slots, strict=True):
            np.testing.assert_allclose(slot, expected_slot, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("hardware", ["cpu", "v5p"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_untouched_rows_and_slots_keep_their_bits(name, hardware):
    options = {"hardware": te.hardware_by_name(hardware)}
    first = list(batches(1))
    later = list(batches(1, seed=1, vocabulary_size=VOCABULARY_SIZE // 2))
    before = run(name, 8, first, **options)
    after = run(name, 8, first + later, **options)
    untouched = np.setdiff1d(np.arange(VOCABULARY_SIZE), later[0][0])
    for old, new in [(before[0], after[0]), *zip(before[1], after[1], strict=True)]:
        np.testing.assert_array_equal(
            old[untouched].view(np.int32), new[untouched].view(np.int32)
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_converges(name):
    """Rows follow a target under the loss |row - target|**2 / 2.

    On a dense array, which the layer equals when every row is touched; see above.
    """
    optimizer = OPTIMIZERS[name]
    target = jnp.float32(start_values(5))

    def step(carry, _):
        table, state = carry
        updates, state = optimizer.update(table - target, state, table)
        return (table + updates, state), None

    table = jnp.zeros((VOCABULARY_SIZE, DIM))
    (table, _), _ = jax.lax.scan(step, (table, optimizer.init(table)), length=60)
    left = table - target
    assert jnp.mean(left**2) < 0.35 * jnp.mean(target**2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_keeps_type_shape_and_sharding(name):
    plan = one_table_plan(OPTIMIZERS[name], VOCABULARY_SIZE, DIM, mesh_of(8))
    tables, slots = initial_state(plan, start_values())
    (ids, cotangents), *_ = batches(1)
    new_tables, new_slots = update(tables, slots, ids, cotangents, plan)
    for old, new in zip(
        jax.tree.leaves((tables, slots)),
        jax.tree.leaves((new_tables, new_slots)),
        strict=True,
    ):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


def test_learning_rate_changes_without_compiling():
    plan = one_table_plan(OPTIMIZERS["inject"], VOCABULARY_SIZE, DIM, mesh_of(8))
    tables, slots = initial_state(plan, np.zeros((VOCABULARY_SIZE, DIM)))
    (ids, cotangents), *_ = batches(1)
    tables, slots = update(tables, slots, ids, cotangents, plan)
    compiled = update._cache_size()
    moved = te.logical_values(tables, plan)["table"]
    state = slots["stack_0"]
    rate = jax.device_put(np.float32(0), state.hyperparams["learning_rate"].sharding)
    slots = {
        "stack_0": state._replace(
            hyperparams={**state.hyperparams, "learning_rate": rate}
        )
    }
    tables, slots = update(tables, slots, ids, cotangents, plan)
    np.testing.assert_array_equal(te.logical_values(tables, plan)["table"], moved)
    assert update._cache_size() == compiled


@pytest.mark.parametrize("capacity", [None, 1])
def test_count_advances_once_a_step_however_many_rounds(capacity):
    steps = list(batches(3))
    _, _, slots = run("adam_bias_corrected", 8, steps, capacity=capacity)
    assert slots["stack_0"][0].count == 3


MIXES_ROWS = {
    "global norm": optax.clip_by_global_norm(1.0),
    "trust ratio": optax.lamb(0.1),
    "noise": optax.add_noise(0.1, 0.9, 0),
    "centre all": optax.stateless(lambda u, p: u - u.mean()),
    "count of finite": optax.apply_if_finite(optax.sgd(0.1), 5),
    "sort": optax.stateless(lambda u, p: jnp.sort(u, axis=0)),
    "running sum": optax.stateless(lambda u, p: jnp.cumsum(u, axis=0)),
    "flattened": optax.stateless(lambda u, p: u.reshape(-1, 4).reshape(u.shape)),
    "shift": optax.stateless(lambda u, p: jnp.roll(u, 1, axis=0)),
    "state of all rows": optax.GradientTransformation(
        lambda p: jnp.max(jnp.abs(p)), lambda u, s, p=None: (u * s, s)
    ),
    "shifted by padding": optax.stateless(
        lambda u, p: jax.lax.pad(u, 0.0, [(1, -1, 0), (0, 0, 0)])
    ),
    "custom reduction": optax.stateless(
        lambda u, p: u + jax.lax.reduce(u, 0.0, jax.lax.add, (0,))[None, :]
    ),
    "number of rows": optax.stateless(lambda u, p: u / u.shape[0]),
    "by position": optax.stateless(lambda u, p: u * jnp.arange(u.shape[0])[:, None]),
}


@pytest.mark.parametrize("case", MIXES_ROWS)
def test_refuses_what_mixes_rows(case):
    with pytest.raises(te.optimizers.NotRowLocalError, match="not row-local"):
        te.optimizers.check_row_local(MIXES_ROWS[case], DIM)


ROW_LOCAL = {
    "centre each row": optax.stateless(lambda u, p: u - u.mean(1, keepdims=True)),
    "norm of each row": optax.stateless(
        lambda u, p: u / (jnp.linalg.norm(u, axis=1, keepdims=True) + 1)
    ),
    "rotation": optax.stateless(lambda u, p: u @ jnp.eye(DIM)),
    "sorted in row": optax.stateless(lambda u, p: jnp.sort(u, axis=1)),
    "columns": optax.stateless(lambda u, p: u * u[:, :1] + u[:, 1][:, None]),
    "joined columns": optax.stateless(
        lambda u, p: jnp.concatenate([u[:, 4:], u[:, :4]], axis=1)
    ),
    "product of rows": optax.stateless(
        lambda u, p: u * jnp.einsum("rd,rd->r", u, p)[:, None]
    ),
    "low precision": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "rprop": optax.rprop(0.1),
    "weight decay": optax.add_decayed_weights(0.1),
    "elementwise clip": optax.clip(1.0),
}


@pytest.mark.parametrize("case", ROW_LOCAL)
def test_accepts_what_treats_each_row_for_itself(case):
    te.optimizers.check_row_local(ROW_LOCAL[case], DIM)


def test_factored_state_is_refused_when_the_plan_is_made():
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=1)
    with pytest.raises(ValueError, match="one entry per row|row-local"):
        plan = one_table_plan(factored, VOCABULARY_SIZE, DIM, mesh_of(1))
        initial_state(plan, start_values())


@pytest.mark.parametrize("multiplies", [True, False])
def test_ftrl_without_an_accumulator_gives_no_nan(multiplies):
    """Zero accumulators, zero gradients, and a rate that ramps up from 0."""
    rate = optax.linear_schedule(0.0 if multiplies else 0.1, 0.1, 3)
    optimizer = te.optimizers.ftrl(
        rate,
        initial_accumulator_value=0.0,
        allow_zero_accumulator=True,
        multiply_linear_by_learning_rate=multiplies,
    )
    plan = one_table_plan(optimizer, VOCABULARY_SIZE, DIM, mesh_of(1))
    tables, slots = initial_state(plan, start_values())
    for i, (ids, cotangents) in enumerate(batches(4)):
        tables, slots = update(tables, slots, ids, cotangents * (i != 0), plan)
        assert np.isfinite(te.logical_values(tables, plan)["table"]).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: te.optimizers.adagrad(0.1, 0.0), "initial_accumulator_value"),
        (lambda: te.optimizers.rowwise_adagrad(0.1, -1.0), "initial_accumulator_value"),
        (lambda: te.optimizers.adam(0.1, beta_1=1.0), r"beta_1 must be in \[0, 1\)"),
        (lambda: te.optimizers.adam(0.1, beta_2=-0.1), "beta_2"),
        (lambda: te.optimizers.adam(0.1, epsilon=0.0), "epsilon must be positive"),
        (lambda: te.optimizers.ftrl(0.1, learning_rate_power=0.5), "not positive"),
        (lambda: te.optimizers.ftrl(0.1, beta=-1.0), "beta must be not negative"),
        (
            lambda: te.optimizers.ftrl(0.1, initial_accumulator_value=0.0),
            "initial_accumulator_value must be positive",
        ),
        (lambda: te.optimizers.rmsprop(0.1, epsilon=-1.0), "epsilon"),
        (lambda: te.optimizers.proximal_adagrad(0.1, l1=-1.0), "l1"),
        (
            lambda: te.optimizers.with_options(
                OPTIMIZERS["sgd"], clipvalue=1.0, use_gradient_accumulation=False
            ),
            "clipvalue bounds the summed gradient",
        ),
        (
            lambda: te.optimizers.with_options(OPTIMIZERS["sgd"], clipvalue=[1, 2]),
            "clipvalue must be a number or a pair",
        ),
        (
            lambda: te.optimizers.with_options(
                OPTIMIZERS["sgd"],
                weight_decay_factor=0.1,
                multiply_weight_decay_factor_by_learning_rate=True,
            ),
            "needs the rule's learning_rate",
        ),
    ],
)
def test_wrong_hyper_parameters(make, match):
    with pytest.raises(ValueError, match=match):
        make()
