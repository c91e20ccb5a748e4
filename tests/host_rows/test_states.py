"""Rows on the host are saved, restored, set, exported and copied."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.host_rows.models import (
    batches,
    evaluate,
    expected,
    feed,
    fit,
    make,
    state_of,
    train,
)
from tests.host_rows.twins import check_equal
from tests.rejections import rejects
from tests.tiers import full_cases, quick_cases


@pytest.mark.full
def test_a_save_restores_on_other_devices_and_back(tmp_path):
    model, optimizer = make()
    data = batches(12)
    losses = fit(model, optimizer, data[:4])
    te.save(tmp_path / "a", (model, optimizer))
    losses += fit(model, optimizer, data[4:8])  # Saving changes nothing.
    check_equal((losses, state_of(model, optimizer)), expected(8))
    te.save(tmp_path / "b", (model, optimizer))

    # All rows on the devices, on other ones.
    on_devices = make(te.Sharded(), 3, seed=1)
    te.restore(tmp_path / "b", on_devices)
    check_equal(state_of(*on_devices), expected(8)[1])
    te.save(tmp_path / "c", on_devices)

    # Back, into a new model and into one that has trained on other things.
    for seed in range(2):
        host = make(te.HostRows(cache_rows=90, window=2), seed=seed)
        if seed:
            fit(*host, batches(3, seed=5))
        te.restore(tmp_path / "c", host)
        check_equal(state_of(*host), expected(8)[1])
        losses = expected(8)[0] + fit(*host, data[8:])
        check_equal((losses, state_of(*host)), expected(12))


@pytest.mark.full
def test_exports_and_deltas(tmp_path):
    pytest.importorskip("safetensors")
    model, optimizer = make()
    twin, twin_optimizer = make(te.Sharded(), 3)
    fit(model, optimizer, batches(6))
    te.save(tmp_path / "checkpoint", (model, optimizer))
    te.restore(tmp_path / "checkpoint", (twin, twin_optimizer))
    for name, exported in {"host": model, "devices": twin}.items():
        te.export.save_tables(exported, tmp_path / f"tables_{name}")
    files = [
        (tmp_path / f"tables_{name}" / "tables" / "user.safetensors").read_bytes()
        for name in ("host", "devices")
    ]
    assert files[0] == files[1]

    drawn = feed(batches(3, seed=1), model, optimizer)
    train(model, optimizer, next(drawn))
    te.export.save_tables(model, tmp_path / "newer")  # While a loop waits.
    te.export.save_delta(tmp_path / "newer", tmp_path / "tables_host", tmp_path / "d")
    te.export.apply_delta(tmp_path / "tables_host", tmp_path / "d", tmp_path / "made")
    name = "tables/user.safetensors"
    newer = (tmp_path / "newer" / name).read_bytes()
    assert (tmp_path / "made" / name).read_bytes() == newer != files[0]
    for batch in drawn:
        train(model, optimizer, batch)


@pytest.mark.full
def test_a_served_model(tmp_path):
    model, optimizer = make()
    fit(model, optimizer, batches(6))
    batch = {"user": np.arange(24, dtype=np.int32).reshape(8, 3) * 7}
    te.export.save(model, tmp_path / "served", batch)
    served = te.export.load(tmp_path / "served")(batch)
    (batch,) = feed([batch], model, optimizer)
    np.testing.assert_allclose(served, evaluate(model, batch), rtol=1e-5, atol=1e-6)


def copied(model, optimizer):
    """Returns copies by `nnx` with arrays of their own."""
    graph, state = nnx.split((model, optimizer))
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


COPIES = {
    "arrays": copied,
    "python": lambda *pair: copy.deepcopy(pair),
    "no arrays": lambda *pair: nnx.clone(pair),  # An exchange donates them.
}


def check_is_old(model, optimizer, directory):
    """Checks that no use of the rows of an old copy is silent."""
    for use in (
        model.embedding.embedding_tables,
        optimizer.slot_values,
        lambda: te.save(directory / "old", (model, optimizer)),
        lambda: te.export.save_tables(model, directory / "old_tables"),
        lambda: fit(model, optimizer, batches(3)),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            use()


@pytest.mark.parametrize("name", quick_cases(COPIES))
def test_an_old_copy_is_never_silently_wrong(tmp_path, name):
    model, optimizer = make()
    data = batches(12)
    fit(model, optimizer, data[:4])
    old = COPIES[name](model, optimizer)
    fit(model, optimizer, data[4:8])
    check_is_old(*old, tmp_path)
    check_equal(state_of(model, optimizer), expected(8)[1])
    fit(model, optimizer, data[8:])
    check_equal(state_of(model, optimizer), expected(12)[1])


@pytest.mark.full
@pytest.mark.parametrize("is_fed", [True, False])
def test_a_copy_that_trains(tmp_path, is_fed):
    """In a loop, the original becomes the old copy; other steps don't reach it."""
    model, optimizer = make()
    data = batches(12)
    fit(model, optimizer, data[:4])
    other = copied(model, optimizer)
    if is_fed:
        losses = expected(4)[0] + fit(*other, data[4:])
        check_equal((losses, state_of(*other)), expected(12))
        check_is_old(model, optimizer, tmp_path)
        return
    train(*other, data[3])  # Its rows are cached.
    other[0].embedding.embedding_tables()
    check_equal(state_of(model, optimizer), expected(4)[1])
    fit(model, optimizer, data[4:])
    check_equal(state_of(model, optimizer), expected(12)[1])


@pytest.mark.full
@pytest.mark.parametrize("only_slots", [False, True])
def test_a_state_of_an_earlier_step(tmp_path, only_slots):
    """Rolling back by a copy of the arrays raises, because the host went on."""
    model, optimizer = make()
    data = batches(12)
    fit(model, optimizer, data[:4])
    rolled_back = optimizer if only_slots else (model, optimizer)
    saved = jax.tree.map(jnp.copy, nnx.state(rolled_back))
    fit(model, optimizer, data[4:8])
    nnx.update(rolled_back, saved)
    if not only_slots:
        check_is_old(model, optimizer, tmp_path)
    with rejects(ValueError, fix="te.save"):
        fit(model, optimizer, data[8:])


@pytest.mark.parametrize("number", full_cases([0, 4], "0"))
@pytest.mark.full
def test_orbax_alone_never_restores_wrong_rows(tmp_path, number):
    """The cached lines and the map of one model mean nothing to another."""
    model, optimizer = make()
    fit(model, optimizer, batches(number))
    other = make(seed=1)
    leaves, tree = jax.tree.flatten(nnx.state(other))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = jax.tree.leaves(nnx.state((model, optimizer)))
        checkpointer.save(tmp_path / "a", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = checkpointer.restore(tmp_path / "a", leaves)
    nnx.update(other, tree.unflatten(leaves))
    check_is_old(*other, tmp_path)
    te.save(tmp_path / "b", (model, optimizer))
    te.restore(tmp_path / "b", other)  # It repairs them.
    check_equal(state_of(*other), expected(number)[1])


@pytest.mark.full
def test_a_failed_restore_changes_nothing(tmp_path):
    model, optimizer = make()
    fit(model, optimizer, batches(4))
    other = make(te.Sharded(), dtype="bfloat16")
    te.save(tmp_path / "a", other)
    with pytest.raises(te.checkpoint.CheckpointError):
        te.restore(tmp_path / "a", (model, optimizer))
    fit(model, optimizer, batches(12)[4:])
    check_equal(state_of(model, optimizer), expected(12)[1])
