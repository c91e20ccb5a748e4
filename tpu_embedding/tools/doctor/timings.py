"""Times the step of `benchmarks/compiler_estimate.py`, and checks a sort.

The step has one id per sample and table, and uses Adagrad. Ids are drawn from a Zipf
distribution, modulo the number of rows.
"""

import contextlib
import statistics
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tpu_embedding.hardware import hardware_of_device
from tpu_embedding.sparse_core.partitioned_ids import sort_words
from tpu_embedding.tools.doctor.cases import make_step

SHAPES: Final = {"tables": 26, "rows": 100_000, "dim": 128, "batch": 16_384}
# Shapes for devices other than TPUs.
SMALL_SHAPES: Final = {"tables": 3, "rows": 1_000, "dim": 16, "batch": 512}

_ROUNDS: Final = 7
_STEPS: Final = 20

_NUM_SORTED: Final = 2**17


def time_step(backend: Any, profile: str) -> dict[str, Any]:
    """Times steps. Records a profile in the directory `profile`, unless it is ""."""
    is_tpu = hardware_of_device(jax.devices()[0]).is_tpu
    shapes = SHAPES if is_tpu else SMALL_SHAPES
    features = {}
    for i in range(shapes["tables"]):
        size: Any = {"vocabulary_size": shapes["rows"], "dim": shapes["dim"]}
        table = te.TableConfig(**size, combiner="sum", name=f"t{i:02d}")
        features[table.name] = te.FeatureConfig(table=table)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("shard",))
    plan = te.make_plan(features, mesh, optimizer="adagrad", backend=backend)
    random = np.random.default_rng(0)
    batch = shapes["batch"], shapes["dim"]
    ids = {
        name: (random.zipf(1.05, batch[0]) % shapes["rows"]).astype(np.int32)
        for name in features
    }
    cotangents = {name: random.standard_normal(batch, np.float32) for name in features}
    batch = te.inputs.shard_batch((ids, cotangents), plan)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    state = tables, te.functional.init_slots(tables, plan)
    begin = time.perf_counter()
    step = make_step(plan).lower(*state, *batch).compile()
    compile_seconds = time.perf_counter() - begin
    state, _, exchanged = jax.block_until_ready(step(*state, *batch))
    milliseconds = []
    with jax.profiler.trace(profile) if profile else contextlib.nullcontext():
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            for _ in range(_STEPS):
                state, *_ = step(*state, *batch)
            # Waits only after all steps, so the host's time counts only if the host is
            # slower than the devices.
            jax.block_until_ready(state)
            milliseconds.append(1e3 * (time.perf_counter() - begin) / _STEPS)
    updates, num_rounds = plan.stacks[0].backend.updates, max(exchanged.values())
    text = (
        f"{statistics.median(milliseconds):.3f} ms ({min(milliseconds):.3f} to "
        f"{max(milliseconds):.3f}) on {jax.device_count()} devices, compiled in "
        f"{compile_seconds:.0f} s"
    )
    # 0 rounds mean that SparseCores looked up the rows without the exchange.
    if backend == "sparse_core" and not (
        is_tpu and updates == backend and not num_rounds
    ):
        text += "; not on SparseCores"
    return {
        "problem": None,
        "text": text,
        "milliseconds": milliseconds,
        "compile_seconds": compile_seconds,
        "rounds": int(num_rounds),
        "updates": updates,
        **shapes,
    }


def check_sort() -> dict[str, Any]:
    """Compares the sort that SparseCores need with NumPy's sort."""
    # Many words are equal, to check that the sort is stable.
    words = np.random.default_rng(0).integers(0, 2**12, _NUM_SORTED, np.uint32)
    on_device, sort = jnp.asarray(words), jax.jit(sort_words)
    expected = np.argsort(words, kind="stable")
    found, positions = map(np.asarray, sort(on_device))
    begin = time.perf_counter()
    jax.block_until_ready(sort(on_device))
    milliseconds = 1e3 * (time.perf_counter() - begin)
    wrong = (found != words[expected]) | (positions != expected)
    problem = f"{wrong.sum():,} of {_NUM_SORTED:,} ids are at wrong positions"
    return {
        "problem": problem if wrong.any() else None,
        "text": f"{_NUM_SORTED:,} ids are in NumPy's order",
        "milliseconds": milliseconds,
    }
