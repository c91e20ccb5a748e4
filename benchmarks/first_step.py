"""Times a start of a training, from the process to its first step.

    python benchmarks/first_step.py [--rounds N] [--json FILE]
    python benchmarks/record.py FILE

A process trains a model with 26 features of 10,000 rows for one step. Each first start
has an empty cache of compiled programs, and the second start finds that of the first.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from measuring import report_results

import tpu_embedding as te

NUM_FEATURES, NUM_ROWS, DIM, BATCH = 26, 10_000, 16, 1024
STARTS: Final = ("first", "second")


class Model(nnx.Module):
    """A logit from the activations of all features, by an MLP."""

    def __init__(self, features: dict[str, te.FeatureConfig], rngs: nnx.Rngs):
        rule = te.optimizers.rowwise_adagrad(0.01)
        self.embedding = te.TPUEmbedding(features, rule, rngs=rngs)
        self.hidden = nnx.Linear(len(features) * DIM, 64, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, ids: dict[str, jax.Array]) -> jax.Array:
        """Returns the logits, `[batch]`."""
        activations = jnp.concatenate(list(self.embedding(ids).values()), axis=1)
        return self.last(nnx.relu(self.hidden(activations)))[:, 0]


@nnx.jit
def train_step(
    model: Model, optimizer: te.Optimizer, ids: dict[str, jax.Array], labels: jax.Array
) -> jax.Array:
    """Trains on a batch; returns its log loss."""

    def loss_of(model: Model) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(model(ids), labels).mean()

    loss, gradients = te.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train() -> None:
    """Trains the model for a step: what is timed."""
    features = {
        f"f{i:02d}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, name=f"t{i:02d}")
        )
        for i in range(NUM_FEATURES)
    }
    model = Model(features, nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-3))
    random = np.random.default_rng(0)
    ids = {name: random.integers(NUM_ROWS, size=BATCH) for name in features}
    labels = random.integers(2, size=BATCH).astype(np.float32)
    batch = te.inputs.shard_batch(
        (model.embedding.prepare(ids), labels), model.embedding.plan
    )
    jax.block_until_ready(train_step(model, optimizer, *batch))


def time_start(cache: str) -> float:
    """Returns the milliseconds of a new process that imports, compiles and trains.

    Args:
      cache: directory of the compiled programs, empty for a first start.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    code = "import first_step; first_step.train()"
    directory = pathlib.Path(__file__).parent
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=directory, check=True
    )
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    """Measures in turns."""
    parser = argparse.ArgumentParser(description="Times the start of a training.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {start: [] for start in STARTS}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for start in STARTS:
                times[start].append(time_start(cache))
    medians = {start: statistics.median(found) for start, found in times.items()}
    results: list[dict[str, Any]] = [
        {
            "program": "model",
            "start": start,
            "until_step_ms": median,
            "ratio": median / medians["first"],
        }
        for start, median in medians.items()
    ]
    report_results(
        arguments.json,
        "first_step",
        shapes={"rounds": arguments.rounds},
        results=results,
    )


if __name__ == "__main__":
    main()
