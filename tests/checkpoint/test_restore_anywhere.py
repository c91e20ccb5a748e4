"""Training that moves to other devices, stacks and layouts equals one that stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import OPTIMIZERS
from tests.tiers import quick_cases

SIZES = {"a": 101, "b": 37, "c": 5}
DIM, BATCH, STEPS = 8, 24, 20


def plan_of(optimizer, num_devices, hardware, *, reverse=False, apart=()):
    """A plan of all tables; those in `apart` have a stack of their own."""
    names = reversed(SIZES) if reverse else SIZES
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=SIZES[name],
                dim=DIM,
                combiner="sum",
                name=name,
                placement=te.Replicated() if name in apart else None,
            )
        )
        for name in names
    }
    return te.make_plan(
        features,
        mesh_of(num_devices),
        optimizer=optimizer,
        hardware=te.hardware.hardware_by_name(hardware),
    )


def batch_of(step):
    """Ids and targets of a step. Many ids occur twice."""
    random = np.random.default_rng(step)
    ids = {
        name: random.integers(0, max(2, size // 3), (BATCH, 2))
        for name, size in SIZES.items()
    }
    targets = {name: random.normal(size=(BATCH, DIM)) for name in SIZES}
    return ids, jax.tree.map(np.float32, targets)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=0)
def train_step(state, ids, targets, plan):
    result = te.functional.lookup(state["tables"], ids, plan)

    def loss_of(activations):
        losses = jax.tree.map(lambda a, t: jnp.mean((a - t) ** 2), activations, targets)
        return sum(losses[name] for name in sorted(losses))

    loss, cotangents = jax.value_and_grad(loss_of)(result.activations)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    tables, slots = te.functional.apply_gradients(
        state["tables"], state["slots"], gradients, plan
    )
    return {"tables": tables, "slots": slots, "step": state["step"] + 1}, loss


def init_state(plan, seed=0):
    tables = te.functional.init_tables(plan, jax.random.key(seed))
    return {
        "tables": tables,
        "slots": te.functional.init_slots(tables, plan),
        "step": jax.device_put(jnp.int32(0), plan.replicated),
    }


def train(state, plan, num_steps):
    losses = []
    for _ in range(num_steps):
        ids, targets = batch_of(int(state["step"]))
        state, loss = train_step(
            state, te.inputs.prepare_features(ids, plan), targets, plan
        )
        losses.append(float(loss))
    return state, losses


def values_of(state, plan):
    """All numbers of a state, by table and slot."""
    slots = te.functional.slot_values(state["slots"], plan, "all")
    return te.functional.unstack_tables(state["tables"], plan), slots


def check_that_training_moves(optimizer, tmp_path, old_plan, new_plan):
    state, _ = train(init_state(old_plan), old_plan, 5)
    before = values_of(state, old_plan)
    te.save(tmp_path / "saved", state, plan=old_plan)
    state, losses = train(state, old_plan, STEPS)
    moved = te.restore(tmp_path / "saved", init_state(new_plan, 1), plan=new_plan)
    jax.tree.map(np.testing.assert_array_equal, values_of(moved, new_plan), before)
    moved, moved_losses = train(moved, new_plan, STEPS)
    # Devices add up the gradients of a row in another order.
    np.testing.assert_allclose(moved_losses, losses, rtol=1e-6, atol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        values_of(moved, new_plan),
        values_of(state, old_plan),
    )


@pytest.mark.full
@pytest.mark.parametrize("name", quick_cases(OPTIMIZERS, "adagrad"))
def test_training_moves_to_other_devices(name, tmp_path):
    optimizer = OPTIMIZERS[name]
    check_that_training_moves(
        *(optimizer, tmp_path, plan_of(optimizer, 8, "cpu")),
        plan_of(optimizer, 3, "v5p", reverse=True, apart=("b",)),
    )
