"""Times the training of DLRM v4 with unique rows, beside a row per event.

    python benchmarks/unique_rows.py [--setting small wide content] [--rounds N]
        [--steps K] [--json FILE]
    python benchmarks/record.py FILE

Both sides are one model with equal parameters. With unique rows, the MLPs of the
content run once per item. Without, each event has its rows of item, artist and album,
by `FeatureConfig.max_sequence_length`, and its MLPs. Both train on the same batches of
the synthetic log, and must have the same losses. They take turns of some steps, from a
batch in NumPy to updated parameters. The memory is what XLA allocates for a step beside
its arguments: tables, slot variables, dense parameters and the batch.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from interleaved import Times
from list_options import AllValues
from measuring import write_document

import tpu_embedding as te
from tpu_embedding.tools import train
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.data.yambda.synthetic_yambda import SMALL_HISTORY
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.models import DLRMv4Config
from tpu_embedding.tools.train.models.dlrm_v4 import EVENT_FEATURES, DLRMv4
from tpu_embedding.tools.train.models.hstu import (
    HSTUInputs,
    Samples,
    longest_sequence,
)
from tpu_embedding.tools.train.models.model import Outputs, click_outputs

CONFIG: Final = "dlrm_v4_small"
SIDES: Final = ("unique rows", "a row per event")
TOLERANCE: Final = 1e-4
"""Of losses after some steps, relative: sums in another order, in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSetting:
    """Sizes that differ from those of `dlrm_v4_small`.

    Attributes:
      batch: samples per step.
      events: events of a history.
      hstu: fields of `HSTUSizes`.
      data: fields of the synthetic log.
    """

    batch: int
    events: int
    hstu: dict[str, int]
    data: dict[str, int] = dataclasses.field(default_factory=dict)


SETTINGS: Final = {
    "small": SequenceSetting(batch=64, events=126, hstu={}),
    "wide": SequenceSetting(
        batch=64,
        events=63,
        hstu={
            "dim": 512,
            "num_layers": 3,
            "num_heads": 4,
            "head_dim": 128,
            "token_hidden_size": 256,
            "item_hidden_size": 512,
        },
    ),
    "content": SequenceSetting(
        batch=64,
        events=63,
        hstu={
            "dim": 512,
            "num_layers": 1,
            "num_heads": 1,
            "head_dim": 16,
            "token_hidden_size": 256,
            "item_hidden_size": 512,
        },
    ),
    "tiny": SequenceSetting(
        batch=8,
        events=9,
        hstu={"dim": 8, "num_layers": 1, "head_dim": 4},
        data={"num_users": 30, "events_per_user": 40, "num_days": 8},
    ),
}
"""Histories of `dlrm_v4_small`; the dimensions of MLPerf's model; and these with one
narrow layer, so that the content takes most of the time. `tiny` is to try the command.
"""


class RowPerEvent(DLRMv4):
    """The model with ordinary features: a row, and the MLPs of the content, per event.

    The candidate takes its place behind the history before the MLPs. So no value is
    expanded behind them.
    """

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        """Returns what `DLRMv4` returns for a training batch."""
        rows = self.embedding(features)
        lengths = dense["history_length"]
        num_samples, width = dense["action_weight"].shape
        num_events = width + 1
        is_candidate = (jnp.arange(num_events) == lengths[:, None])[..., None]

        def events(name: str) -> jax.Array:
            history = jnp.pad(rows[name]["history"], ((0, 0), (0, 1), (0, 0)))
            candidate = rows[name]["candidate"][:, None]
            return jnp.where(is_candidate, candidate, history).reshape(
                num_samples * num_events, -1
            )

        def expand(values: jax.Array, index: jax.Array) -> jax.Array:
            values = values.reshape(num_samples, num_events, -1)
            if index.shape[1] == 1:  # the candidate
                return jnp.take_along_axis(values, lengths[:, None, None], axis=1)
            return values

        items, artists, albums = map(events, EVENT_FEATURES)
        places = jnp.zeros((num_samples, width), jnp.int32)  # `expand` knows them
        inputs = HSTUInputs(
            items=items,
            artists=artists,
            albums=albums,
            samples=Samples(
                numbers=jnp.arange(num_samples),
                contextual=jnp.stack(
                    [rows[n] for n in self.contextual_features], axis=1
                ),
                history=places,
                lengths=lengths,
                candidate=places[:, 0],
                actions=dense["action_weight"],
                times=dense["action_timestamp"],
                query_times=dense["query_time"],
            ),
        )
        normalizer = longest_sequence(lengths, len(self.contextual_features))
        return click_outputs(self.hstu(inputs, expand, normalizer=normalizer))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPerEventConfig(DLRMv4Config):
    """Hyperparameters of `RowPerEvent`."""

    def feature_config(self, data: Any) -> dict[str, Any]:
        """Returns the features of `DLRMv4Config`, two for each table of events."""
        features: dict[str, Any] = dict(super().feature_config(data))
        for name in EVENT_FEATURES:
            table = features[name].table
            features[name] = {
                "history": te.FeatureConfig(
                    table=table, max_sequence_length=data.history_length
                ),
                "candidate": te.FeatureConfig(table=table),
            }
        return features

    def build(self, data: Any, plan: te.EmbeddingPlan, *, rngs: nnx.Rngs) -> DLRMv4:
        """Returns the model with initial parameters."""
        contextual = tuple(n for n in data.table_sizes if n not in EVENT_FEATURES)
        return RowPerEvent(self.hstu, contextual, data.history_length, plan, rngs=rngs)


class Side:
    """A model in training.

    Attributes:
      temporary_bytes: memory of a step beside its arguments, per device.
      losses: of all steps.
    """

    def __init__(self, config: train.RunConfig, data: Any, batch: Batch):
        self._plan = train.make_run_plan(config, data)
        self._sizes = te.inputs.BufferSizes()
        graph, self._state = train.init_train_state(config, data, self._plan)
        step = train.make_train_step(
            graph,
            config.loss,
            loss_weight=config.loss_weight,
            max_dense_norm=config.max_dense_norm,
        )
        self._step = train.jit_train_step(step, self._state, self._plan)
        compiled = self._step.lower(self._state, self._put(batch)).compile()
        self.temporary_bytes = compiled.memory_analysis().temp_size_in_bytes
        self.losses: list[float] = []

    def train(self, batch: Batch) -> float:
        """Trains on a batch; returns the seconds from NumPy to new parameters."""
        start = time.perf_counter()
        self._state, metrics = self._step(self._state, self._put(batch))
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - start
        self.losses.append(float(metrics.loss))
        return seconds

    def _put(self, batch: Batch) -> Batch:
        return put_batch(batch, self._plan, "batch", self._sizes)


def configs_of(setting: SequenceSetting) -> dict[str, train.RunConfig]:
    """Returns the run of each side."""
    config: Any = train.load_config(CONFIG)  # whose source and model are known
    history = dataclasses.replace(
        SMALL_HISTORY, history_length=setting.events, min_history=setting.events
    )
    config = dataclasses.replace(
        config,
        batch_size=setting.batch,
        data=dataclasses.replace(config.data, history=history, **setting.data),
    )
    # One micro-batch, so that an event's row is where its sample is.
    hstu = dataclasses.replace(
        config.model.hstu, micro_batch_size=setting.batch, **setting.hstu
    )
    models = (DLRMv4Config(hstu=hstu), RowPerEventConfig(hstu=hstu))
    return {
        side: dataclasses.replace(config, model=model)
        for side, model in zip(SIDES, models, strict=True)
    }


def repeated_share(batch: Batch) -> float:
    """Returns the share of the ids of events that are there already."""
    features: Any = batch.features
    ids = [
        np.concatenate(
            [features[name]["history"].values, np.ravel(features[name]["candidate"])]
        )
        for name in EVENT_FEATURES
    ]
    return 1 - sum(len(np.unique(x)) for x in ids) / sum(map(len, ids))


def run_setting(
    name: str, setting: SequenceSetting, *, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Trains both sides in turns.

    Returns:
      A result per side.

    Raises:
      RuntimeError: if the losses differ.
    """
    configs = configs_of(setting)
    config = configs[SIDES[0]]
    data = config.data.open(None, batch_size=setting.batch, seed=config.seed)
    batches = [data.train_batch(i) for i in range(steps)]
    # A larger buffer of unique ids compiles the step anew, so all batches run before
    # the turns.
    sides = {side: Side(configs[side], data, batches[0]) for side in SIDES}
    for side in sides.values():
        for batch in batches:
            side.train(batch)
    times = {side: Times() for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            times[side].seconds += [sides[side].train(batch) for batch in batches]
        print(
            f"  {name}, round {number + 1} of {rounds}, ms: "
            + ", ".join(
                f"{side} {1e3 * np.median(found.seconds[-steps:]):.1f}"
                for side, found in times.items()
            ),
            flush=True,
        )
    unique, plain = (np.array(sides[side].losses) for side in SIDES)
    difference = float(np.max(np.abs(unique - plain) / np.abs(plain)))
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"The losses of both sides must differ by at most {TOLERANCE}, relative, "
            f"got {difference}; one of the models is wrong."
        )
    share = float(np.mean([repeated_share(batch) for batch in batches]))
    return [
        {
            "setting": name,
            "side": side,
            **times[side].fields("step"),
            "samples_per_second": 1e3 * setting.batch / times[side].median_ms,
            "ratio": times[SIDES[1]].median_ms / times[side].median_ms,
            "temporary_bytes": sides[side].temporary_bytes,
            "repeated_share": share,
            "max_loss_difference": difference,
        }
        for side in SIDES
    ]


def main() -> None:
    """Measures in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times unique rows.")
    parser.add_argument(
        "--setting",
        nargs="+",
        action=AllValues,
        choices=SETTINGS,
        default=["small", "wide", "content"],
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for name in arguments.setting:
        results += run_setting(
            name, SETTINGS[name], rounds=arguments.rounds, steps=arguments.steps
        )
    for row in results:
        print(
            f"{row['setting']:6} {row['side']:15} {row['step_ms']:9.2f} ms "
            f"{row['samples_per_second']:10,.0f}/s {row['ratio']:5.2f} "
            f"{row['temporary_bytes'] / 1e6:8.1f} MB "
            f"{row['repeated_share']:.1%} repeat"
        )
    write_document(
        arguments.json,
        "unique_rows",
        shapes={name: dataclasses.asdict(SETTINGS[name]) for name in arguments.setting},
        results=results,
    )


if __name__ == "__main__":
    main()
