"""Times a training step on dynamic tables, beside static tables of the same ids.

    python benchmarks/dynamic_steps.py [--setting one_hot bags wide] [--rounds N]
        [--steps K] [--json FILE]
    python benchmarks/record.py FILE

A step is insert_ids (dynamic tables only), lookup, gradients and Adagrad's update, with
donated tables. The ids of a batch are drawn log-uniformly; the static tables get their
ranks. New ids come in the first steps, and rarely later. Sides take turns.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any, Final

import jax
import numpy as np
from interleaved import Times
from list_options import AllValues
from measuring import write_document

import tpu_embedding as te

SIDES: Final = ("dynamic", "static")
NUM_BATCHES: Final = 6
PLACES_PER_ID: Final = 1.35


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicSetting:
    """Sizes of a step.

    Attributes:
      tables: number of tables, one feature each.
      dim: elements of a row.
      valence: ids per sample.
      batch: samples per step.
      capacity: places of a dynamic table.
    """

    tables: int
    dim: int
    valence: int
    batch: int
    capacity: int

    @property
    def num_ids(self) -> int:
        """Different ids of a table."""
        return int(self.capacity / PLACES_PER_ID)


SETTINGS: Final = {
    "one_hot": DynamicSetting(
        tables=26, dim=16, valence=1, batch=4096, capacity=200_000
    ),
    "bags": DynamicSetting(tables=4, dim=64, valence=20, batch=4096, capacity=200_000),
    "wide": DynamicSetting(tables=1, dim=128, valence=1, batch=16384, capacity=200_000),
    "tiny": DynamicSetting(tables=2, dim=8, valence=1, batch=64, capacity=1000),
}
"""26 one-hot features; bags of 20 ids; one table of wide rows. `tiny` is to try it."""


class Side:
    """Tables in training.

    Args:
      setting: sizes.
      ranks: int64 `[batches, tables, batch, valence]`.
      is_dynamic: True for dynamic tables.
    """

    def __init__(self, setting: DynamicSetting, ranks: np.ndarray, *, is_dynamic: bool):
        dynamic = te.Dynamic(capacity=setting.capacity)
        tables = [
            te.TableConfig(
                vocabulary_size=dynamic if is_dynamic else setting.num_ids,
                dim=setting.dim,
                name=f"table_{i}",
                combiner="sum",
            )
            for i in range(setting.tables)
        ]
        features = {
            f"feature_{i}": te.FeatureConfig(table=t) for i, t in enumerate(tables)
        }
        plan = te.make_plan(features, optimizer=te.optimizers.adagrad(0.1))
        ids_of_ranks = np.random.default_rng(1).integers(
            0, 2**63, setting.num_ids, np.int64
        )
        ids = ids_of_ranks[ranks] if is_dynamic else ranks
        self._batches = [
            te.inputs.prepare_features(dict(zip(features, of_batch, strict=True)), plan)
            for of_batch in ids
        ]
        rows = te.functional.init_tables(plan, jax.random.key(0))
        self._state = (rows, te.functional.init_slots(rows, plan))

        def step(tables: Any, slots: Any, features: Any) -> Any:
            if is_dynamic:
                result = te.functional.insert_ids(tables, slots, features, plan)
                tables, slots = result.tables, result.slots
                features = result.features
            out = te.functional.lookup(tables, features, plan)
            gradients = te.functional.compute_gradients(
                out.routing, out.activations, plan
            )
            return te.functional.apply_gradients(tables, slots, gradients, plan)

        self._step = jax.jit(step, donate_argnums=(0, 1))

    def train(self, number: int) -> float:
        """Runs a step; returns its seconds."""
        batch = self._batches[number % NUM_BATCHES]
        start = time.perf_counter()
        self._state = jax.block_until_ready(self._step(*self._state, batch))
        return time.perf_counter() - start


def run_setting(
    name: str, setting: DynamicSetting, *, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Trains both sides in turns; returns a result per side."""
    shape = (NUM_BATCHES, setting.tables, setting.batch, setting.valence)
    draws = np.random.default_rng(0).random(shape)
    ranks = (setting.num_ids**draws).astype(np.int64) - 1
    sides = {x: Side(setting, ranks, is_dynamic=x == SIDES[0]) for x in SIDES}
    for number in range(2 * NUM_BATCHES):
        for side in sides.values():
            side.train(number)
    times = {side: Times() for side in SIDES}
    for turn in range(rounds):
        for side in SIDES:
            times[side].seconds += [
                sides[side].train(turn * steps + i) for i in range(steps)
            ]
    static = times[SIDES[1]].median_ms
    return [
        {
            "setting": name,
            "side": side,
            **times[side].fields("step"),
            "ratio": times[side].median_ms / static,
        }
        for side in SIDES
    ]


def main() -> None:
    """Measures in turns; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Times steps on dynamic tables.")
    parser.add_argument(
        "--setting",
        nargs="+",
        action=AllValues,
        choices=SETTINGS,
        default=["one_hot", "bags", "wide"],
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns of each side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    for name in arguments.setting:
        results += run_setting(
            name, SETTINGS[name], rounds=arguments.rounds, steps=arguments.steps
        )
        for row in results[-2:]:
            print(
                f"{name:8} {row['side']:8} {row['step_ms']:8.2f} ms "
                f"{row['ratio']:5.2f}",
                flush=True,
            )
    write_document(
        arguments.json,
        "dynamic_steps",
        shapes={name: dataclasses.asdict(SETTINGS[name]) for name in arguments.setting},
        results=results,
    )


if __name__ == "__main__":
    main()
