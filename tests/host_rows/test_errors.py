"""Nothing is silent: habits and mistakes that would lose rows raise."""

import functools
import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.host_rows import models
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
from tests.host_rows.test_order import disjoint_batches
from tests.host_rows.twins import check_equal
from tests.rejections import rejects
from tests.tiers import full_cases
from tpu_embedding.host_rows import stack
from tpu_embedding.host_rows.stack import HostStack

LOST = "features_of"  # The error says what it must return.


def test_a_step_without_the_loop():
    """Its activations are NaN, it is counted, and the next loop raises."""
    model, optimizer = make()
    data = batches(12)
    loss = train(model, optimizer, data[0])
    assert np.isnan(loss)
    missing = model.embedding.stats.missing_rows
    # Both devices may ask for a row.
    num_rows = len(np.unique(data[0]["user"]))
    assert num_rows <= int(missing["stack_0"]) <= 2 * num_rows
    for use in (
        lambda: fit(model, optimizer, data),
        lambda: fit(model, optimizer, data),  # It stays.
        model.embedding.embedding_tables,
    ):
        with rejects(ValueError, fix=LOST):
            use()


def test_features_of_cannot_end_the_loop():
    model, optimizer = make()
    with rejects(RuntimeError):
        list(feed(batches(2), model, optimizer, features_of=lambda _: next(iter([]))))


@pytest.mark.full
def test_an_error_of_the_batches_comes_after_the_batches_before_it():
    """Batches are drawn early, but never after the error."""
    model, optimizer = make()
    data = batches(12)
    loader = iter([*data[:7], None, "not drawn"])

    def draw():
        if (batch := next(loader)) is None:
            raise OSError
        return batch

    with pytest.raises(OSError) as raised:
        fit(model, optimizer, iter(draw, ""))
    assert raised.traceback[-1].name == "draw"
    assert next(loader) == "not drawn"
    assert int(optimizer.dense.step.get_value()) == 7
    fit(model, optimizer, data[7:])
    check_equal(state_of(model, optimizer), expected(12)[1])


@pytest.mark.full
def test_an_iterator_is_not_called_after_its_end():
    """A loader that reads from a queue would wait forever."""
    model, optimizer = make()
    loader = iter([*batches(3), None, "not drawn"])

    class Queue:
        def __iter__(self):
            return self

        def __next__(self):
            if (batch := next(loader)) is None:
                raise StopIteration
            return batch

    assert len(fit(model, optimizer, Queue())) == 3
    assert next(loader) == "not drawn"


@pytest.mark.full
def test_an_evaluation_without_the_loop():
    """The next loop raises at its start or end; nothing is lost, and it goes on."""
    model, optimizer = make()
    data = batches(12)
    fit(model, optimizer, data[:4])
    with rejects(ValueError, fix=LOST):
        for batch in feed(data[4:], model, optimizer):
            train(model, optimizer, batch)
            assert np.isnan(evaluate(model, batches(1, seed=7)[0])).any()
    trained = int(optimizer.dense.step.get_value())
    assert trained < 12
    fit(model, optimizer, data[trained:])
    check_equal(state_of(model, optimizer), expected(12)[1])


@pytest.mark.full
def test_the_last_batch_of_a_loop_is_checked():
    model, optimizer = make()
    data = batches(4)
    with rejects(ValueError, fix=LOST):
        for number, batch in enumerate(feed(data, model, optimizer)):
            train(model, optimizer, batch)
            if number == 3:
                evaluate(model, batches(1, seed=7)[0])


WRONG = {
    "too large": (ValueError, np.arange(240, dtype=np.int32).reshape(8, 30)),
    "floats": (TypeError, np.zeros((8, 3))),
}


@pytest.mark.full
@pytest.mark.parametrize("name", full_cases(WRONG, "floats"))
def test_a_batch_that_does_not_fit(name):
    """The batches before it have trained, and others train afterwards."""
    model, optimizer = make()
    data, (error, ids) = batches(12), WRONG[name]
    losses = []
    with rejects(error):
        for batch in feed([*data[:3], {"user": ids}, *data], model, optimizer):
            losses.append(float(train(model, optimizer, batch)))
    assert len(losses) == 3
    losses += fit(model, optimizer, data[3:])
    check_equal((losses, state_of(model, optimizer)), expected(12))


def test_a_model_made_inside_jit():
    with rejects(ValueError):
        fit(*nnx.jit(make)(), batches(3))


@pytest.mark.full
def test_a_model_of_shapes(tmp_path):
    """Its rows come from a checkpoint."""
    model, optimizer = make()
    data = batches(12)
    fit(model, optimizer, data[:4])
    te.save(tmp_path / "a", (model, optimizer))
    abstract = nnx.eval_shape(make)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        fit(*abstract, data)
    graph, state = nnx.split(abstract)
    plan = abstract[0].embedding.plan
    restored = nnx.merge(graph, te.restore(tmp_path / "a", state, plan=plan))
    losses = expected(4)[0] + fit(*restored, data[4:])
    check_equal((losses, state_of(*restored)), expected(12))


@pytest.mark.full
def test_the_first_optimizer_after_a_second():
    model, first = make()
    with rejects(ValueError):
        fit(model, None, batches(2))
    fit(model, first, batches(2))
    second = te.Optimizer(model, optax.adam(1e-2))
    with rejects(ValueError):
        fit(model, first, batches(2))
    fit(model, second, batches(2))
    with rejects(ValueError, fix="te.save"):
        first.slot_values()


@pytest.mark.full
def test_a_model_without_an_optimizer():
    model = models.Model(models.CACHE)
    twin = models.Model(te.Sharded())
    for batch in te.host_rows(batches(6), model, features_of=lambda batch: batch):
        np.testing.assert_array_equal(evaluate(model, batch), evaluate(twin, batch))


def test_models_without_a_layer():
    with rejects(ValueError, fix="te.TPUEmbedding"):
        next(te.host_rows([], nnx.Linear(1, 1, rngs=nnx.Rngs(0)), features_of=len))


TABLE = functools.partial(
    te.TableConfig, vocabulary_size=100, dim=4, name="t", placement=models.CACHE
)


@pytest.mark.parametrize(
    ("fix", "options", "plan_options"),
    [
        ("every_row", {}, {"optimizer": te.optimizers.every_row(optax.adam(0.1))}),
        ("te.inputs.hash_ids", {"vocabulary_size": te.Dynamic(capacity=64)}, {}),
        ("backend", {}, {"backend": "sparse_core"}),
        ("TableConfig.dtype", {"dtype": "int8"}, {}),
        ("use_ema", {}, {"optimizer": te.optimizers.adafactor(0.1, use_ema=True)}),
    ],
)
def test_plans_of_what_is_not_supported(fix, options, plan_options):
    with rejects(ValueError, fix=fix):
        te.make_plan(te.FeatureConfig(table=TABLE(**options)), **plan_options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_rows", 0),
        ("cache_rows", 1.5),
        ("cache_rows", None),
        ("window", 0),
        ("window", 65),
        ("directory", 3),
    ],
)
def test_arguments(field, value):
    with rejects(ValueError, field=field, value=value):
        te.HostRows(**{"cache_rows": 10, field: value})


def test_top_k():
    model, _ = make()
    queries = jnp.ones((2, models.DIM))
    with rejects((TypeError, ValueError)):
        te.nn.top_k(model.embedding, queries, 3)


@pytest.mark.full
def test_empty_batches():
    """Batches without ids, and a loop without batches."""
    model, optimizer = make()
    twin = make(te.Sharded())
    nothing = {"user": np.full((8, 3), te.inputs.PADDING_ROW_ID)}
    data = [nothing, nothing, *batches(3), nothing]
    assert fit(model, optimizer, []) == []
    assert fit(model, optimizer, data) == fit(*twin, data)
    check_equal(state_of(model, optimizer), state_of(*twin))


@pytest.mark.full
def test_a_restore_after_a_failed_exchange_with_a_pending_write(tmp_path, monkeypatch):
    """The failed batch writes nothing, but the batch before it still does."""
    write_back, exchange = HostStack._write_back, HostStack.exchange
    may_write, num_written = threading.Event(), []

    def waiting_write_back(self, batch, left):
        if batch == 6:
            num_written.append(len(left))
            assert may_write.wait(timeout=60)
        write_back(self, batch, left)

    def failing_exchange(self, table, state, fetched):
        if fetched.plans[0].batch < 7:
            return exchange(self, table, state, fetched)
        monkeypatch.setattr(stack, "swap_program", lambda _: None)
        try:
            return exchange(self, table, state, fetched)
        finally:
            may_write.set()

    monkeypatch.setattr(HostStack, "_write_back", waiting_write_back)
    monkeypatch.setattr(HostStack, "exchange", failing_exchange)
    model, optimizer = make(te.HostRows(cache_rows=80, window=1))
    te.save(tmp_path / "saved", (model, optimizer))
    saved = state_of(model, optimizer)
    with pytest.raises(TypeError):
        fit(model, optimizer, disjoint_batches(12))
    restore = threading.Thread(
        target=te.restore, args=(tmp_path / "saved", (model, optimizer)), daemon=True
    )
    restore.start()
    restore.join(timeout=60)
    assert not restore.is_alive()
    assert num_written[0] > 0
    check_equal(state_of(model, optimizer), saved)
