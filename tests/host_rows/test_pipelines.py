"""Loops over `te.host_rows` that are nested, left early, or look ahead."""

import itertools

import numpy as np
import pytest

import tpu_embedding as te
from tests.host_rows import models
from tests.host_rows.models import batches, evaluate, expected, feed, fit, make, train
from tests.host_rows.twins import check_equal
from tests.rejections import rejects
from tests.tiers import quick_cases


def check_trained(model, optimizer, losses, number, **options):
    """Checks losses and state after a number of batches."""
    expected_losses, state = expected(number, **options)
    assert losses == expected_losses
    check_equal(models.state_of(model, optimizer), state)


@pytest.mark.full
def test_evaluation_before_and_after_the_step():
    model, optimizer = make()
    twin, twin_optimizer = make(te.Sharded())
    others = batches(6, seed=1)

    def evaluate_all():
        for batch in feed(others, model, optimizer):
            np.testing.assert_array_equal(evaluate(model, batch), evaluate(twin, batch))

    losses = []
    for number, batch in enumerate(feed(batches(12), model, optimizer)):
        if number % 3 == 0:
            evaluate_all()
        losses.append(float(train(model, optimizer, batch)))
        train(twin, twin_optimizer, batch)
        if number % 4 == 1:
            evaluate_all()
    check_trained(model, optimizer, losses, 12)


class StopHere(Exception):
    pass


def interrupted(way, data):
    """Yields data, and raises in the middle for one way to end a loop."""
    for number, batch in enumerate(data):
        if way == "loader raises" and number == 8:
            raise StopHere
        yield batch


@pytest.mark.parametrize(
    "way",
    quick_cases(["break", "close", "body raises", "loader raises"], "break"),
)
def test_loops_left_early_continue(way):
    model, optimizer = make()
    data, losses = batches(12), []
    generator = feed(interrupted(way, data), model, optimizer)
    try:
        for number, batch in enumerate(generator):
            losses.append(float(train(model, optimizer, batch)))
            if number == 5:
                if way == "close":
                    generator.close()
                if way == "body raises":
                    raise StopHere
                if way == "break":
                    break
    except StopHere:
        pass
    del generator
    assert len(losses) <= 8
    losses += fit(model, optimizer, data[len(losses) :])
    check_trained(model, optimizer, losses, 12)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["stale", "exact"])
def test_pipelined_steps(mode):
    results = []
    for placement in (models.CACHE, te.Sharded()):
        model, optimizer = make(placement)
        step = te.PipelinedTrainStep(
            models.loss_of, features_of=lambda batch: batch, mode=mode
        )
        ahead = itertools.chain(feed(batches(12), model, optimizer), [None])
        losses = [
            float(step(model, optimizer, batch, next_batch))
            for batch, next_batch in itertools.pairwise(ahead)
        ]
        results.append((losses, models.state_of(model, optimizer)))
    check_equal(*results)
    if mode == "exact":
        check_equal(results[0], expected(12))


def add_gradients(model, optimizer, *batches):
    gradients = [te.grad(models.loss_of)(model, batch) for batch in batches]
    optimizer.update(model, te.gradients.add(*gradients))


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.full
def test_gradients_of_several_batches(number):
    """The rows of a batch and of the two before it are there."""
    results = []
    for placement in (models.CACHE, te.Sharded()):
        model, optimizer = make(placement)
        step = models.nnx.jit(add_gradients, donate_argnums=(0, 1))
        drawn = feed(batches(4 * number), model, optimizer)
        for several in itertools.batched(drawn, number):
            step(model, optimizer, *several)
        results.append(models.state_of(model, optimizer))
    check_equal(*results)


@pytest.mark.full
def test_too_many_batches_before_a_step():
    """An update with rows that have left raises, never silently loses them."""
    model, optimizer = make()
    data = [
        {"user": np.arange(i, i + 24, dtype=np.int32).reshape(8, 3)}
        for i in range(0, 240, 24)
    ]
    step = models.nnx.jit(add_gradients, donate_argnums=(0, 1))
    with rejects(ValueError, fix="features_of"):
        for several in itertools.batched(feed(data, model, optimizer), 5):
            step(model, optimizer, *several)
    with rejects(ValueError, fix="features_of"):  # Changes are lost.
        fit(model, optimizer, data[:1])


@pytest.mark.full
def test_two_loops_in_turn():
    """Each goes on where it was, after the other."""
    model, optimizer = make()
    data = batches(12)
    first, second = (feed(data[i::2], model, optimizer) for i in range(2))
    losses = [
        float(train(model, optimizer, batch))
        for pair in zip(first, second, strict=True)
        for batch in pair
    ]
    # Both were drawn before the first trained.
    check_trained(model, optimizer, losses, 12)


@pytest.mark.full
def test_largest_working_set():
    data = batches(12)
    sizes = [
        np.bincount(
            np.unique(np.concatenate([x["user"].ravel() for x in data[i : i + 3]])) % 2
        ).max()
        for i in range(10)
    ]
    cache_rows = 2 * max(sizes) - 1  # Rounded up to a multiple of the devices.
    model, optimizer = make(te.HostRows(cache_rows=cache_rows))
    check_trained(model, optimizer, fit(model, optimizer, data), 12)
    model, optimizer = make(te.HostRows(cache_rows=cache_rows - 1))
    trained = 0
    with rejects(ValueError, field="cache_rows", fix=f" {cache_rows},"):
        for batch in feed(data, model, optimizer):
            train(model, optimizer, batch)
            trained += 1
    assert trained == np.argmax(sizes) + 2
    twin, twin_optimizer = make(te.Sharded())
    fit(twin, twin_optimizer, data[:trained])
    check_equal(
        models.state_of(model, optimizer), models.state_of(twin, twin_optimizer)
    )


@pytest.mark.full
def test_files_of_tables(tmp_path):
    model, optimizer = make(te.HostRows(cache_rows=100, directory=tmp_path))
    check_trained(model, optimizer, fit(model, optimizer, batches(12)), 12)
    assert not any(tmp_path.iterdir())  # The file has no name.
