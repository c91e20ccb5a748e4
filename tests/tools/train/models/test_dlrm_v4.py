"""Trains DLRM v4 through the layer, and compares it with runs of MLPerf's reference."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import quick_cases
from tests.tools.train.models.hstu.golden_runs import (
    check,
    error,
    golden,
    golden_name,
    part,
)
from tpu_embedding import optimizers
from tpu_embedding.plan.shard_map import EMBEDDING_SCOPE
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.batch_part import slice_batch
from tpu_embedding.tools.train import (
    RunConfig,
    apply_overrides,
    init_train_state,
    jit_train_step,
    load_config,
    make_run_plan,
    make_train_step,
    train,
    warm_up,
)
from tpu_embedding.tools.train.loop.ahead_of_time import abstract_step
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.models import DLRMv4Config
from tpu_embedding.tools.train.models.dlrm_v4 import EVENT_FEATURES
from tpu_embedding.tools.train.models.hstu import (
    HSTU,
    HSTUInputs,
    HSTUSizes,
    Samples,
    longest_sequence,
)
from tpu_embedding.types import PADDING_ROW_ID, RaggedIds

RUN = golden("training")
STEPS = [part(RUN, f"step{i}/") for i in range(RUN["steps"])]
BATCH_SIZE = len(STEPS[0]["input.label"])
# As stated for the golden files.
TOLERANCE = 1e-4

SIZES = HSTUSizes(
    dim=32,
    num_layers=2,
    num_heads=2,
    head_dim=16,
    token_hidden_size=40,
    item_hidden_size=512,
    num_contextual=8,
    num_positions=32,
    num_time_buckets=2048,
    input_dropout=0.0,
    dropout=0.0,
    block_size=8,
    dtype="float32",
)


def table_name(name):
    """Returns the table of a feature of the file."""
    return f"{name}_id" if name in ("item", "artist", "album") else name


def tables(arrays):
    return {table_name(name): array for name, array in arrays.items()}


class GoldenData:
    """The batches of the reference's run."""

    batch_size = BATCH_SIZE
    history_length = 16
    table_sizes = {
        name: len(array) for name, array in tables(part(RUN, "initial.table.")).items()
    }

    def train_batch(self, step):
        inputs = part(STEPS[step], "input.")
        ids = part(inputs, "ids.")
        row_splits = np.concatenate([[0], np.cumsum(inputs["lengths"])])

        def padded(values):
            array = np.zeros((BATCH_SIZE, self.history_length), np.int32)
            is_event = np.arange(self.history_length) < inputs["lengths"][:, None]
            array[is_event] = values
            return array

        events = {
            table_name(name): {
                "history": RaggedIds(values=ids.pop(name), row_splits=row_splits),
                "candidate": ids.pop(f"candidate_{name}"),
            }
            for name in ("item", "artist", "album")
        }
        return Batch(
            features=events | ids,
            dense={
                "history_length": inputs["lengths"].astype(np.int32),
                "action_weight": padded(inputs["action_weight"]),
                "action_timestamp": padded(inputs["history_times"]),
                "query_time": inputs["query_time"].astype(np.int32),
            },
            labels=inputs["label"].astype(np.float32),
            weights=np.ones(BATCH_SIZE, np.float32),
        )


@dataclasses.dataclass(frozen=True)
class GoldenSource:
    def open(self, data_dir, *, batch_size, seed):
        return GoldenData()


WARM_UP_STEPS = int(RUN["warmup_steps"])

CONFIG = RunConfig(
    name="golden",
    data=GoldenSource(),
    batch_size=BATCH_SIZE,
    model=DLRMv4Config(hstu=SIZES),
    loss="log_loss",
    loss_weight=0.2,
    num_steps=len(STEPS),
    table_learning_rate=float(RUN["base_learning_rate"]),
    dense_learning_rate=float(RUN["base_learning_rate"]),
    make_table_optimizer=lambda run: optimizers.rowwise_adagrad(
        warm_up(run.table_learning_rate, WARM_UP_STEPS),
        initial_accumulator_value=0.0,
        epsilon=1e-8,
    ),
    make_dense_optimizer=lambda run: optax.adam(
        warm_up(run.dense_learning_rate, WARM_UP_STEPS), b1=0.95, b2=0.999, eps=1e-8
    ),
    max_dense_norm=1.0,
)


def with_hstu(**changes):
    """Returns the config, with other sizes of HSTU."""
    hstu = dataclasses.replace(SIZES, **changes)
    return dataclasses.replace(CONFIG, model=DLRMv4Config(hstu=hstu))


def dense_params(model):
    """Returns the variables of the dense part by their names in the file."""
    return {
        golden_name(".".join(map(str, path))): variable
        for path, variable in nnx.to_flat_state(nnx.state(model.hstu, nnx.Param))
    }


@pytest.mark.parametrize("num_devices", quick_cases([1, 3], "3"))
def test_training_steps_are_those_of_the_reference(num_devices):
    data, config = GoldenData(), with_hstu(micro_batch_size=2)
    plan = make_run_plan(config, data, mesh_of(num_devices))
    graph, state = init_train_state(config, data, plan)
    model, optimizer = nnx.merge(graph, state)
    for name, variable in dense_params(model).items():
        initial = RUN[f"initial.weight.{name}"]
        assert variable.shape == initial.shape
        variable.set_value(jax.device_put(initial, plan.replicated))
    model.embedding.set_embedding_tables(tables(part(RUN, "initial.table.")))
    state = nnx.state((model, optimizer))
    step = make_train_step(
        graph,
        config.loss,
        loss_weight=config.loss_weight,
        max_dense_norm=config.max_dense_norm,
    )
    step = jit_train_step(step, state, plan)
    for i, wanted in enumerate(STEPS):
        state, metrics = step(state, put_batch(data.train_batch(i), plan, "batch"))
        assert error(metrics.loss, wanted["loss"]) <= TOLERANCE
        model, optimizer = nnx.merge(graph, state)
        weights = {n: v.get_value() for n, v in dense_params(model).items()}
        check(weights, part(wanted, "weight."), TOLERANCE)
        rows = model.embedding.embedding_tables()
        check(rows, tables(part(wanted, "table.")), TOLERANCE)
        slots = {
            name: values["accumulators"]
            for name, values in optimizer.slot_values().items()
        }
        check(slots, tables(part(wanted, "slot.")), TOLERANCE)


LENGTHS = np.array([3, 0, 16, 1, 9, 16, 0])  # of histories, up to the maximum
# So large that a row's rounding is nothing beside its step.
TWIN_RATE = 2.0**30


def twin_batch():
    """Returns a batch whose ids repeat, padded; 7 samples do not divide by 2, 3 or 8.

    An item has one artist and one album.
    """
    rng = np.random.default_rng(0)
    sizes, width = GoldenData.table_sizes, GoldenData.history_length
    is_event = np.arange(width) < LENGTHS[:, None]
    of_item = {
        name: rng.integers(0, sizes[name], sizes["item_id"])
        for name in EVENT_FEATURES[1:]
    } | {"item_id": np.arange(sizes["item_id"])}
    shape = (len(LENGTHS), width + 1)
    items = np.minimum(rng.geometric(0.1, shape), sizes["item_id"]) - 1
    events = {
        name: {
            "history": np.where(is_event, ids[items[:, :-1]], PADDING_ROW_ID),
            "candidate": ids[items[:, -1]],
        }
        for name, ids in of_item.items()
    }
    contextual = {
        name: rng.integers(0, size, len(LENGTHS))
        for name, size in sizes.items()
        if name not in EVENT_FEATURES
    }
    times = np.cumsum(rng.integers(1, 5000, is_event.shape), axis=1)
    dense = {
        "history_length": LENGTHS,
        "action_weight": rng.integers(0, 8, is_event.shape) * is_event,
        "action_timestamp": times * is_event,
        "query_time": times[:, -1] + 7,
    }
    return Batch(
        features=events | contextual,
        dense={name: x.astype(np.int32) for name, x in dense.items()},
        labels=rng.integers(0, 2, len(LENGTHS)).astype(np.float32),
        weights=np.ones(len(LENGTHS), np.float32),
    )


def loss_of(logits, batch):
    return optax.sigmoid_binary_cross_entropy(logits, batch.labels).mean()


def twin_loss(tables, hstu, batch):
    """Computes the loss from a row per event of each table, and an MLP per event."""
    num_samples = len(LENGTHS)
    places = np.arange(num_samples * (GoldenData.history_length + 1))
    history, candidate = np.split(places, [num_samples * GoldenData.history_length])
    rows = {}
    for name, ids in batch.features.items():
        ids = np.concatenate([np.ravel(x) for x in jax.tree.leaves(ids)])
        if name in EVENT_FEATURES:  # candidates are first
            ids = np.roll(ids, -num_samples)
        rows[name] = jnp.take(tables[name], ids, axis=0, mode="fill", fill_value=0)
    items, artists, albums = (rows.pop(name) for name in EVENT_FEATURES)
    inputs = HSTUInputs(
        items=items,
        artists=artists,
        albums=albums,
        samples=Samples(
            numbers=jnp.arange(num_samples),
            contextual=jnp.stack(list(rows.values()), axis=1),
            history=jnp.asarray(history.reshape(num_samples, -1)),
            lengths=jnp.asarray(LENGTHS),
            candidate=jnp.asarray(candidate),
            actions=jnp.asarray(batch.dense["action_weight"]),
            times=jnp.asarray(batch.dense["action_timestamp"]),
            query_times=jnp.asarray(batch.dense["query_time"]),
        ),
    )
    logits = hstu(
        inputs,
        lambda values, index: values[index],
        normalizer=longest_sequence(inputs.samples.lengths, SIZES.num_contextual),
    )
    return loss_of(logits, batch)


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "3"))
def test_table_gradients_are_those_of_a_row_per_event(num_devices):
    batch = twin_batch()
    config = dataclasses.replace(
        with_hstu(micro_batch_size=2),
        make_table_optimizer=lambda run: optimizers.sgd(TWIN_RATE),
        make_dense_optimizer=lambda run: optax.sgd(0.0),
    )
    plan = make_run_plan(config, GoldenData(), mesh_of(num_devices))
    model, optimizer = nnx.merge(*init_train_state(config, GoldenData(), plan))
    initial = model.embedding.embedding_tables()
    graph, state = nnx.split(HSTU(SIZES, rngs=nnx.Rngs(1)))
    nnx.update(model.hstu, jax.device_put(state, plan.replicated))
    wanted_loss, wanted = jax.jit(
        jax.value_and_grad(
            lambda tables: twin_loss(tables, nnx.merge(graph, state, copy=True), batch)
        )
    )({name: jnp.asarray(rows) for name, rows in initial.items()})

    @nnx.jit
    def step(model, optimizer, batch):
        def loss_fn(model):
            return loss_of(model(batch.features, batch.dense).scores, batch)

        loss, gradients = te.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    loss = step(model, optimizer, put_batch(batch, plan, "batch"))
    assert error(loss, wanted_loss) <= 1e-6
    rows = model.embedding.embedding_tables()
    found = {n: (initial[n] - rows[n]) / TWIN_RATE for n in rows}
    # Tolerance: one bit more or less in each row moves a gradient by up to 1.4e-6 of
    # its norm. The measured errors are below 1e-6.
    errors = {
        name: np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        for name, gradient in wanted.items()
    }
    print(f"largest error {max(errors.values()):.1e}")  # shown by `pytest -rP`
    assert max(errors.values()) <= 2e-6, errors


def golden_run(config, num_devices):
    """Returns losses, gradients and scores of a run from the initial tables."""
    data = GoldenData()
    plan = make_run_plan(config, data, mesh_of(num_devices))
    graph, state = init_train_state(config, data, plan)
    model, optimizer = nnx.merge(graph, state)
    model.embedding.set_embedding_tables(tables(part(RUN, "initial.table.")))

    @nnx.jit
    def train_step(model, optimizer, batch):
        def mean_loss(model):
            scores = model(batch.features, batch.dense).scores
            losses = optax.sigmoid_binary_cross_entropy(scores, batch.labels)
            return jnp.mean(losses)

        loss, gradients = te.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return loss, gradients.dense

    batches = [put_batch(data.train_batch(i), plan, "batch") for i in range(len(STEPS))]
    losses, dense = zip(
        *[train_step(model, optimizer, batch) for batch in batches], strict=True
    )
    found = {"losses": np.stack(losses)}
    leaves, _ = jax.tree_util.tree_flatten_with_path(dense[0])
    found |= {f"gradient {jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
    for name, values in optimizer.slot_values().items():  # sums of squared gradients
        found[f"slots of {name}"] = values["accumulators"]
    found |= model.embedding.embedding_tables()
    model.eval()
    scores = nnx.jit(type(model).__call__)(model, batches[0].features, batches[0].dense)
    return found | {"evaluated": scores.scores}


@functools.cache
def run_of_whole_batches(**dropout):
    return golden_run(with_hstu(micro_batch_size=BATCH_SIZE, **dropout), 1)


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "2"))
def test_micro_batches_change_nothing_but_the_rounding(num_devices):
    """With dropout, too. Each of 2 devices has 3 samples, so a fourth fills them up."""
    dropout = dict(input_dropout=0.2, dropout=0.1)
    found = golden_run(with_hstu(micro_batch_size=2, **dropout), num_devices)
    whole = run_of_whole_batches(**dropout)
    gradients = {name: g for name, g in whole.items() if name.startswith("gradient")}
    assert gradients
    # Tolerances: float32 rounding of sums in another order, and over four steps.
    check(found, gradients, 2e-6)
    check(found, whole, 1e-5)
    assert error(found["losses"], run_of_whole_batches()["losses"]) > 1e-4


@pytest.mark.parametrize("num_samples", [4, 6])
def test_the_loss_on_explicit_axes_of_which_one_splits_the_batch(num_samples):
    """The batch is split over one axis of two, and so are the logits."""
    data = GoldenData()
    shape = np.asarray(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(shape, ("a", "b"), axis_types=(AxisType.Explicit,) * 2)

    def loss_on(mesh, batch_axes):
        features = CONFIG.model.feature_config(data)
        plan = te.make_plan(
            features, mesh, optimizer=optimizers.sgd(1.0), batch_axes=batch_axes
        )
        batch = slice_batch(data.train_batch(0), range(num_samples))
        batch = put_batch(batch, plan, "batch")
        with jax.set_mesh(mesh):
            model = CONFIG.model.build(data, plan, rngs=nnx.Rngs(0, dropout=0))
            model.embedding.set_embedding_tables(tables(part(RUN, "initial.table.")))
            scores = nnx.jit(type(model).__call__)(
                model, batch.features, batch.dense
            ).scores
            losses = optax.sigmoid_binary_cross_entropy(scores, batch.labels)
            return float(jnp.mean(losses))

    # Tolerance: float32 rounding of sums in another order.
    np.testing.assert_allclose(
        loss_on(mesh, ("a",)), loss_on(mesh_of(1), None), rtol=1e-5
    )


def padded_histories(batch):
    """Returns the features of a batch as they are served: without ragged ids."""
    lengths = batch.dense["history_length"]
    is_event = np.arange(GoldenData.history_length) < lengths[:, None]

    def pad(ids):
        if not isinstance(ids, RaggedIds):
            return ids
        padded = np.full(is_event.shape, PADDING_ROW_ID, np.int32)
        padded[is_event] = ids.values
        return padded

    return jax.tree.map(
        pad, batch.features, is_leaf=lambda ids: isinstance(ids, RaggedIds)
    )


def test_an_evaluated_score_does_not_depend_on_the_other_samples():
    data = GoldenData()
    plan = make_run_plan(CONFIG, data, mesh_of(1))
    model, _ = nnx.merge(*init_train_state(CONFIG, data, plan))
    model.embedding.set_embedding_tables(tables(part(RUN, "initial.table.")))
    whole = data.train_batch(0)
    sample = int(np.argmin(whole.dense["history_length"]))
    alone = slice_batch(whole, range(sample, sample + 1))
    batches = [put_batch(batch, plan, "batch") for batch in (whole, alone)]

    def difference():
        scores = [model(batch.features, batch.dense).scores for batch in batches]
        return abs(float(scores[0][sample] - scores[1][0]))

    assert difference() > 1e-4  # in training, as in the benchmark
    model.eval()
    assert difference() < 1e-6  # float32 rounding
    evaluated = model(batches[0].features, batches[0].dense).scores
    rows = jax.tree.map(jnp.asarray, tables(part(RUN, "initial.table.")))
    model.embedding.start_recording("serving", rows)
    served = model(padded_histories(whole), batches[0].dense).scores
    np.testing.assert_allclose(served, evaluated, rtol=0, atol=1e-6)


SMALL = [
    "batch_size=10",  # does not divide by 3
    "num_steps=3",
    "evaluate_every=0",
    "checkpoint_every=0",
    "data.num_users=30",
    "data.events_per_user=40",
    "data.num_days=8",
    "data.history.history_length=9",
    "data.history.min_history=0",
    "model.hstu.dim=8",
    "model.hstu.num_layers=1",
    "model.hstu.head_dim=4",
    "model.hstu.token_hidden_size=8",
    "model.hstu.item_hidden_size=8",
    "model.hstu.input_dropout=0.2",
    "model.hstu.dropout=0.1",
    "table_learning_rate=0.1",
]


@pytest.mark.full
def test_a_run_with_dropout_has_the_same_metrics_on_any_number_of_devices(tmp_path):
    config = apply_overrides(load_config("dlrm_v4_small"), SMALL)
    one, three = (train(config, tmp_path / str(n), mesh=mesh_of(n)) for n in (1, 3))
    assert one.metric == "auc"
    assert 0.5 < one.teacher < 1
    assert one.target_met in (True, False)
    # Tolerance: float32 rounding of sums in another order, over three steps.
    np.testing.assert_allclose(
        three.metrics["log_loss"], one.metrics["log_loss"], rtol=1e-5
    )


def test_no_collective_lies_within_the_micro_batches():
    small = [*SMALL, "model.hstu.micro_batch_size=2"]
    config = apply_overrides(load_config("dlrm_v4_small"), small)
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, mesh_of(2))
    step, state, batch = abstract_step(config, data, plan)
    program = step.lower(state, batch).compile().as_text()
    lines = re.findall(r".* (?:all-|reduce-scatter|collective-).*op_name=.*", program)
    names = [re.search(r'op_name="([^"]*)"', line)[1] for line in lines]
    in_loops = [name for name in names if "while" in name]
    assert all(EMBEDDING_SCOPE in name for name in in_loops)
    backward = r"transpose\(jvp\([^)]*\)\)/shard_map"
    assert any(re.search(f"{backward}/psum", name) for name in names)
    assert re.search(rf'op_name="[^"]*{backward}/while[^"]*dot_general"', program)


def test_another_number_of_contextual_features_is_refused():
    model = DLRMv4Config(hstu=dataclasses.replace(SIZES, num_contextual=7))
    with pytest.raises(ValueError, match="per sample, 8, got 7"):
        model.feature_config(GoldenData())


def test_initial_rows_lie_within_the_root_of_the_number_of_rows():
    features = DLRMv4Config(hstu=SIZES).feature_config(GoldenData())
    assert list(features) == list(GoldenData.table_sizes)
    layer = te.TPUEmbedding(features, "sgd", mesh=mesh_of(1), rngs=nnx.Rngs(0))
    for name, rows in layer.embedding_tables().items():
        limit = len(rows) ** -0.5
        assert 0.98 * limit < np.abs(rows).max() <= limit, name
