"""The program of the doctor's children: `devices`, or `rows` with a backend.

The last line of the output is the answer, in JSON.
"""

import json
import sys
import time
from typing import Any, Final

import jax
import numpy as np

import tpu_embedding as te
from tpu_embedding.plan.backend import BackendName

RATE: Final = 0.5
NUM_ROWS: Final = 1000
NUM_IDS: Final = 512
NUM_CALLS: Final = 10


def main() -> None:
    """Prints the answer to the question of the command line."""
    question, *backend = sys.argv[1:]
    if question == "devices":
        answer = describe_devices()
    else:
        answer = check_rows("sparse_core" if "sparse_core" in backend else "xla")
    print(json.dumps(answer))


def describe_devices() -> dict[str, Any]:
    """Returns platform, kinds of all devices, and memory of this host's devices."""
    memory = [(device.memory_stats() or {}) for device in jax.local_devices()]
    return {
        "platform": jax.default_backend(),
        "kinds": [device.device_kind for device in jax.devices()],
        "memory": [stats.get("bytes_limit") for stats in memory],
    }


def check_rows(backend: BackendName) -> dict[str, Any]:
    """Compares a train step with the same step in NumPy, row by row.

    Args:
      backend: looks the rows up, and updates them.

    Returns:
      `problem`, or None if all rows are right, and `times`: pairs of a dim and the
      milliseconds of a step. Rows of 32 and of 128 values are looked up and updated by
      Adagrad.
    """
    times = []
    for dim in (32, 128):
        problem, milliseconds = _check_dim(dim, backend)
        if problem is not None:
            return {"problem": f"dim {dim}: {problem}"}
        times.append((dim, milliseconds))
    return {"problem": None, "times": times}


def _check_dim(dim: int, backend: BackendName) -> tuple[str | None, float]:
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("shard",))
    table = te.TableConfig(
        vocabulary_size=NUM_ROWS,
        dim=dim,
        name="table",
        combiner="sum",
        initializer=te.initializers.normal(1.0),
    )
    plan = te.make_plan(
        {"ids": te.FeatureConfig(table=table)},
        mesh,
        optimizer=te.optimizers.adagrad(RATE, initial_accumulator_value=1.0),
        backend=backend,
    )
    if plan.stacks[0].backend.updates != backend:
        return plan.stacks[0].backend.reason, 0.0

    @jax.jit
    def step(tables, slots, ids, cotangents):
        result = te.functional.lookup(tables, ids, plan)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        new = te.functional.apply_gradients(tables, slots, gradients, plan)
        return result.activations["ids"], new, result.stats.rounds["stack_0"]

    random = np.random.default_rng(dim)
    ids = random.integers(0, NUM_ROWS // 4, (NUM_IDS, 2), np.int32)
    cotangents = random.standard_normal((NUM_IDS, dim), np.float32)
    tables = te.functional.init_tables(plan, jax.random.key(dim))
    old = te.functional.unstack_tables(tables, plan)["table"]
    slots = te.functional.init_slots(tables, plan)
    arguments = tables, slots, {"ids": ids}, {"ids": cotangents}
    activations, (new, _), rounds = jax.block_until_ready(step(*arguments))
    if backend == "sparse_core" and int(rounds) > 0:
        return "the ids are beyond the limit of an operation", 0.0
    seconds = []
    for _ in range(NUM_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        seconds.append(time.perf_counter() - begin)
    updated = te.functional.unstack_tables(new, plan)["table"]
    gradient = np.zeros((NUM_ROWS, dim))
    np.add.at(gradient, ids, cotangents[:, None].astype(np.float64))
    expected = old - RATE * gradient / np.sqrt(1.0 + gradient**2)
    pairs = {
        "a lookup": (np.asarray(activations), old[ids].sum(axis=1)),
        "an update": (np.asarray(updated), expected),
    }
    for name, (actual, wanted) in pairs.items():
        is_wrong = ~np.isclose(actual, wanted, rtol=1e-5, atol=1e-5).all(axis=1)
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            return f"{name} gives {is_wrong.sum()} wrong rows, the first is {row}", 0.0
    return None, 1000 * float(np.median(seconds))


if __name__ == "__main__":
    main()
