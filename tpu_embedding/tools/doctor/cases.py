"""Train steps as in production, compared with NumPy row by row.

Each case trains one table on this host's devices. Every SparseCore asks every
SparseCore for the same number of ids, so a case can set a limit relative to this
number.
"""

import dataclasses
import functools
import math
import time
from typing import Any, Final, Literal

import jax
import numpy as np

import tpu_embedding as te
from tpu_embedding.hardware import MEBIBYTE, hardware_of_device
from tpu_embedding.types import PADDING_ROW_ID

Values = dict[str, np.ndarray]
"""The table, then its slot variables, by name. Arrays are float32 `[rows, dim]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A table, its optimizer and its ids.

    Attributes:
      valence: ids per sample. If more than 1, ids have weights, and some are padding.
      is_permuted: whether the mesh orders the devices differently from JAX.
      max_ids: `te.SparseCore.max_ids`, divided by the number of ids that a SparseCore
        requests from each SparseCore. With 0, the plan chooses the limit.
    """

    dim: int
    optimizer: Literal["adagrad", "adam"] = "adagrad"
    valence: int = 1
    is_permuted: bool = False
    max_ids: float = 0.0
    exchange: bool = True

    @property
    def backends(self) -> list[str]:
        # The XLA backend has no limit, and its programs always have an exchange.
        is_special = self.max_ids or not self.exchange
        return ["sparse_core"] if is_special else ["xla", "sparse_core"]


CASES: Final = {
    "dim 8, Adam": Case(dim=8, optimizer="adam"),
    "dim 32, Adagrad": Case(dim=32),
    "dim 64, Adagrad, 20 weighted ids": Case(dim=64, valence=20),
    "dim 128, Adagrad, permuted mesh": Case(dim=128, is_permuted=True),
    "dim 256, Adam": Case(dim=256, optimizer="adam"),
    "dim 128, Adagrad, counts at the limit": Case(dim=128, max_ids=1.0),
    "dim 24, Adam, minibatches": Case(dim=24, optimizer="adam", max_ids=0.25),
    "dim 128, Adagrad, no exchange": Case(dim=128, exchange=False),
}

# The number of ids and the table's bytes, per device. On a TPU, the ids are enough for
# SparseCores to sort them. The table exceeds a TensorCore's vector memory, which is at
# most 128 MiB. A step takes a few milliseconds, and its dispatch takes 0.1 ms.
_SIZES_ON_TPU: Final = 2**17, 160 * MEBIBYTE
_SIZES_ELSEWHERE: Final = 2**10, 2**18
_CORES_ELSEWHERE: Final = 2

_CHECKED_STEPS: Final = 2
_TIMED_STEPS: Final = 10

# Largest relative and absolute difference that rounding can cause. A missing gradient
# would change a row by at least 1e-2.
_TOLERANCE: Final = 1e-4

_RATE: Final = 0.5
_ACCUMULATOR: Final = 0.1
_BETAS: Final = 0.9, 0.99
_EPSILON: Final = 0.1  # Large, so that rounding of gradients barely changes a step.


def run_case(name: str, backend: str) -> dict[str, Any]:
    """Runs a few training steps, and compares all values with NumPy.

    In the result, `problem` is None if all rows are right, and `step` and `dispatch`
    are in milliseconds.
    """
    case, devices = CASES[name], np.array(jax.local_devices())
    hardware = hardware_of_device(devices[0])
    num_ids, num_bytes = _SIZES_ON_TPU if hardware.is_tpu else _SIZES_ELSEWHERE
    cores = hardware.cores_per_device or _CORES_ELSEWHERE
    ids_per_core = num_ids // (8 * cores * case.valence) * 8 * case.valence
    num_cores = cores * devices.size
    num_rows = num_bytes // (4 * case.dim) * devices.size
    ids, weights, cotangents = _draw_batch(case, num_cores, ids_per_core, num_rows)

    options: Any = backend
    if backend == "sparse_core":
        # A multiple of 8, as `te.SparseCore` requires.
        max_ids = 8 * math.ceil(case.max_ids * ids_per_core / num_cores / 8)
        options = te.SparseCore(max_ids=max_ids or None, exchange=case.exchange)
    if case.is_permuted:
        devices = np.roll(devices[::-1], 1)
    optimizer = te.optimizers.adagrad(_RATE, _ACCUMULATOR)
    if case.optimizer == "adam":
        optimizer = te.optimizers.adam(_RATE, *_BETAS, _EPSILON, bias_correction=True)
    table = te.TableConfig(
        vocabulary_size=num_rows,
        dim=case.dim,
        name="table",
        combiner="sum",
        initializer=te.initializers.normal(1.0),
    )
    plan = te.make_plan(
        {"ids": te.FeatureConfig(table=table)},
        jax.sharding.Mesh(devices, ("shard",)),
        optimizer=optimizer,
        backend=options,
    )
    if plan.stacks[0].backend.updates != backend:
        return {"problem": plan.stacks[0].backend.reason}
    dense = te.DenseIds(ids=ids, weights=weights if case.valence > 1 else None)
    batch = te.inputs.shard_batch(({"ids": dense}, {"ids": cotangents}), plan)
    before, after, answer = _train(plan, batch)
    # If the exchange took over, the comparison would say nothing about SparseCores.
    if backend == "sparse_core" and answer["rounds"] > 0:
        return {"problem": "the ids exceed the limit of an operation"}
    rows, expected = _expected(case, before, ids, weights, cotangents)
    problem = None
    for array, values in expected.items():
        may_differ = np.arange(len(values)) if array == "activations" else rows
        problem = problem or _difference(array, after[array], values, may_differ)
    text = (
        f"equal to NumPy; {answer['step']:.2f} ms per step, including "
        f"{answer['dispatch']:.2f} ms to dispatch it"
    )
    return answer | {"problem": problem, "text": text}


def make_step(plan: te.EmbeddingPlan) -> Any:
    """Jits `(tables, slots, ids, cotangents) -> (state, activations, rounds)`."""

    # Arguments are donated, as in production. The comparison can thus find a step that
    # reads rows after they were overwritten.
    @functools.partial(
        jax.jit, donate_argnums=(0, 1), compiler_options=plan.compiler_options
    )
    def step(tables, slots, ids, cotangents):
        result = te.functional.lookup(tables, ids, plan)
        # The barrier makes cotangents wait for the activations, as in a model.
        cotangents, activations = jax.lax.optimization_barrier(
            (cotangents, result.activations)
        )
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        new = te.functional.apply_gradients(tables, slots, gradients, plan)
        return new, activations, result.stats.rounds

    return step


def _train(
    plan: te.EmbeddingPlan, batch: tuple[Any, Any]
) -> tuple[Values, Values, dict[str, float]]:
    """Runs the checked steps, then times more steps."""
    step = make_step(plan)

    def values_of(tables: Any, slots: Any) -> Values:
        table = te.functional.unstack_tables(tables, plan)["table"]
        return {"table": table, **te.functional.slot_values(slots, plan)["table"]}

    tables = te.functional.init_tables(plan, jax.random.key(0))
    state = tables, te.functional.init_slots(tables, plan)
    before = values_of(*state)  # Read now, because the first step donates the state.
    for _ in range(_CHECKED_STEPS):
        state, activations, rounds = step(*state, *batch)
    after = {"activations": np.asarray(activations["ids"]), **values_of(*state)}

    begin = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        state, *_ = step(*state, *batch)
    dispatched = time.perf_counter()
    jax.block_until_ready(state)
    end = time.perf_counter()
    answer = {
        "rounds": int(rounds["stack_0"]),
        "step": 1000 * (end - begin) / _TIMED_STEPS,
        "dispatch": 1000 * (dispatched - begin) / _TIMED_STEPS,
    }
    return before, after, answer


def _draw_batch(
    case: Case, num_cores: int, ids_per_core: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws ids and weights, `[samples, valence]`, and cotangents `[samples, dim]`."""
    random = np.random.default_rng(case.dim)
    shape, rows_per_core = (num_cores, ids_per_core), num_rows // num_cores
    # Rows are dealt to SparseCores in turn, so the core that owns an id's row is the id
    # modulo `num_cores`. Each core asks every core equally often.
    turn, partition = np.divmod(np.arange(ids_per_core), num_cores)
    # Half of the ids are for a few rows, so many ids in a batch update the same row.
    num_hot = max(1, ids_per_core // num_cores // 8)
    hot = random.integers(-num_hot, num_hot, shape) % rows_per_core
    row = np.where(turn % 2, hot, random.integers(0, rows_per_core, shape))
    ids = random.permuted(row * num_cores + partition, axis=1)
    ids = ids.astype(np.int32).reshape(-1, case.valence)
    weights = np.ones(ids.shape, np.float32)
    if case.valence > 1:
        weights = random.uniform(0.5, 2, ids.shape).astype(np.float32)
        ids[random.random(ids.shape) < 0.25] = PADDING_ROW_ID
        weights[ids == PADDING_ROW_ID] = 0
    return ids, weights, random.standard_normal((len(ids), case.dim), np.float32)


def _expected(
    case: Case,
    before: Values,
    ids: np.ndarray,
    weights: np.ndarray,
    cotangents: np.ndarray,
) -> tuple[np.ndarray, Values]:
    """Computes the checked steps in NumPy. Also finds the rows that they look up."""
    # Updates only the rows that are looked up, because the whole table is large.
    order = np.argsort(ids, axis=None, kind="stable")
    order = order[ids.ravel()[order] != PADDING_ROW_ID]
    rows, starts = np.unique(ids.ravel()[order], return_index=True)
    gradients = weights.ravel()[order, None] * cotangents[order // case.valence]
    gradient = np.add.reduceat(gradients.astype(np.float64), starts)

    table, *slots = (values[rows].astype(np.float64) for values in before.values())
    # The last step computes activations before it updates the table.
    last_table = table
    for t in range(1, _CHECKED_STEPS + 1):
        last_table = table
        if case.optimizer == "adagrad":
            slots = [slots[0] + gradient**2]
            change = gradient / np.sqrt(slots[0])
        else:
            first, second = _BETAS
            momenta = first * slots[0] + (1 - first) * gradient
            velocities = second * slots[1] + (1 - second) * gradient**2
            slots = [momenta, velocities]
            change = momenta / np.sqrt(velocities + _EPSILON**2)
            change *= np.sqrt(1 - second**t) / (1 - first**t)
        table = table - _RATE * change

    # Padding ids can have any place, because their weight is 0.
    place = np.minimum(np.searchsorted(rows, ids), len(rows) - 1)
    pooled: Any = sum(
        weights[:, i, None] * last_table[place[:, i]] for i in range(case.valence)
    )
    expected = {name: values.copy() for name, values in before.items()}
    for values, new in zip(expected.values(), (table, *slots), strict=True):
        values[rows] = new
    return rows, {"activations": pooled.astype(np.float32), **expected}


def _difference(
    name: str, actual: np.ndarray, expected: np.ndarray, rows: np.ndarray
) -> str | None:
    """Describes wrong rows, if any. Only `rows` may have rounding differences."""
    # Bits are compared. As floats, NaN would differ from itself, and -0 would equal 0.
    is_wrong = actual.view(np.int32) != expected.view(np.int32)
    tolerance = _TOLERANCE * (1 + np.abs(expected[rows]))
    # The comparison is negated, so that NaN counts as wrong.
    is_wrong[rows] = ~(np.abs(actual[rows] - expected[rows]) <= tolerance)
    wrong_rows = np.flatnonzero(is_wrong.any(axis=1))
    if not wrong_rows.size:
        return None
    row = int(wrong_rows[0])
    column = int(np.argmax(is_wrong[row]))
    kind = "" if row in rows else ", which no sample looks up"
    return (
        f"{name}: {wrong_rows.size:,} of {len(actual):,} rows are wrong; the first is "
        f"row {row}{kind}: in column {column}, {actual[row, column]:.9g} instead of "
        f"{expected[row, column]:.9g}"
    )
