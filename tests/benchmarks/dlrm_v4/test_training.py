"""Trains DLRM v4 through the layer, and compares it with runs of MLPerf's reference."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from dlrm_v4_model import DLRMv4Config
from flax import nnx
from hstu_layers import HSTUSizes

from tests.benchmarks.dlrm_v4.golden_runs import (
    check,
    error,
    golden,
    golden_name,
    under,
)
from tests.conftest import mesh_of
from tpu_embedding import optimizers
from tpu_embedding.inputs.prepare import shard_batch
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.train import (
    RunConfig,
    warm_up,
)
from tpu_embedding.tools.train.run_steps import (
    init_train_state,
    make_run_plan,
    make_train_step,
    prepare_batch,
)
from tpu_embedding.types import RaggedIds

RUN = golden("training")
STEPS = [under(RUN, f"step{i}/") for i in range(RUN["steps"])]
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
    micro_batch_size=2,
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
        name: len(array) for name, array in tables(under(RUN, "initial.table.")).items()
    }

    def train_batch(self, step):
        inputs = under(STEPS[step], "input.")
        ids = under(inputs, "ids.")
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


CONFIG = RunConfig(
    name="golden",
    data=None,  # opened already
    batch_size=BATCH_SIZE,
    model=DLRMv4Config(hstu=SIZES),
    loss="log_loss",
    loss_weight=0.2,
    num_steps=len(STEPS),
    table_learning_rate=float(RUN["base_learning_rate"]),
    dense_learning_rate=float(RUN["base_learning_rate"]),
    make_table_optimizer=lambda run: optimizers.rowwise_adagrad(
        warm_up(run.table_learning_rate, int(RUN["warmup_steps"])),
        initial_accumulator_value=0.0,
        epsilon=1e-8,
    ),
    make_dense_optimizer=lambda run: optax.adam(
        warm_up(run.dense_learning_rate, int(RUN["warmup_steps"])),
        b1=0.95,
        b2=0.999,
        eps=1e-8,
    ),
    max_dense_norm=1.0,
)


@pytest.mark.full
def test_training_steps_are_those_of_the_reference():
    data, config = GoldenData(), CONFIG

    def dense_params(model):
        """Returns the variables of the dense part by their names in the file."""
        return {
            golden_name(".".join(map(str, path))): variable
            for path, variable in nnx.to_flat_state(nnx.state(model.hstu, nnx.Param))
        }

    plan = make_run_plan(config, data, mesh_of(2))
    graph, state = init_train_state(config, data, plan)
    model, optimizer = nnx.merge(graph, state)
    for name, variable in dense_params(model).items():
        initial = RUN[f"initial.weight.{name}"]
        assert variable.shape == initial.shape
        variable.set_value(jax.device_put(initial, plan.replicated))
    model.embedding.set_embedding_tables(tables(under(RUN, "initial.table.")))
    state = nnx.state((model, optimizer))
    step = make_train_step(graph, state, config, plan)
    for i, wanted in enumerate(STEPS):
        batch = prepare_batch(data.train_batch(i), plan, model=config.model)
        state, metrics = step(state, shard_batch(batch, plan))
        assert error(metrics["loss"], wanted["loss"]) <= TOLERANCE
        model, optimizer = nnx.merge(graph, state)
        weights = {n: v.get_value() for n, v in dense_params(model).items()}
        check(weights, under(wanted, "weight."), TOLERANCE)
        rows = model.embedding.embedding_tables()
        check(rows, tables(under(wanted, "table.")), TOLERANCE)
        slots = {
            name: values["accumulators"]
            for name, values in optimizer.slot_values().items()
        }
        check(slots, tables(under(wanted, "slot.")), TOLERANCE)


def test_another_number_of_contextual_features_is_rejected():
    model = DLRMv4Config(hstu=dataclasses.replace(SIZES, num_contextual=7))
    with pytest.raises(ValueError, match="8.* 7"):
        model.feature_config(GoldenData())
