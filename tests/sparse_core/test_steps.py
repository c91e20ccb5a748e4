"""The backend `sparse_core` against `xla`: steps of whole layers, on emulated devices.

Other tests compare `xla` with the dense reference. Here each case runs under both
backends: activations, tables and slot variables must be equal up to rounding.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import OPTIMIZERS
from tests.tiers import matrix, quick_cases, with_ids
from tpu_embedding.tools.compile_report import hlo

BATCH, STEPS = 20, 3
TOLERANCE = dict(rtol=2e-5, atol=1e-6)  # Sums of float32 in another order.
ADAGRAD = te.optimizers.adagrad(0.1)


def plan_of(features, backend, num_devices=2, optimizer=ADAGRAD, **options):
    mesh = mesh_of(num_devices)
    return te.make_plan(features, mesh, optimizer=optimizer, backend=backend, **options)


def features_of(dim=4):
    combiners = {30: "mean", 7: "sqrtn", 300: "sum"}
    tables = [
        te.TableConfig(vocabulary_size=n, dim=dim, combiner=combiner, name=f"t{n}")
        for n, combiner in combiners.items()
    ]
    return {
        "one": te.FeatureConfig(table=tables[0], out_of_range_ids="drop"),
        "bag": te.FeatureConfig(table=tables[1]),
        "again": te.FeatureConfig(table=tables[0]),
        "wide": te.FeatureConfig(table=tables[2]),
        "sequence": te.FeatureConfig(table=tables[2], max_sequence_length=3),
    }


def few_features(**options):
    """Returns two of the features, for cases that vary something else."""
    features = features_of(**options)
    return {name: features[name] for name in ("bag", "wide")}


def batch_of(step):
    """Returns ids of all forms."""
    draw = np.random.default_rng(step)
    wide = draw.integers(0, 300, (BATCH, 6)).astype(np.int32)
    lengths = draw.integers(0, 4, BATCH)
    return {
        "one": draw.integers(-1, 31, BATCH).astype(np.int32),
        "bag": te.RaggedIds.from_lists(
            [draw.integers(0, 7, n).tolist() for n in lengths],
            [draw.normal(size=n).tolist() for n in lengths],
        ),
        "again": te.DenseIds(
            ids=draw.integers(0, 30, (BATCH, 2)).astype(np.int32),
            weights=draw.uniform(0.5, 2, (BATCH, 2)).astype(np.float32),
        ),
        "wide": wide,
        "sequence": te.RaggedIds.from_lists(
            [draw.integers(0, 300, n).tolist() for n in lengths]
        ),
    }


def prepared(batches, plan):
    """Returns batches of one size, so that a step compiles once."""
    names = [feature.name for feature in plan.features]
    batches = [{name: batch[name] for name in names} for batch in batches]
    sizes = te.inputs.BufferSizes()
    for batch in batches:
        te.inputs.prepare_features(batch, plan, sizes=sizes)
    return [te.inputs.prepare_features(x, plan, sizes=sizes) for x in batches]


def step_of(plan):
    @jax.jit
    def step(tables, slots, features):
        result = te.functional.lookup(tables, features, plan)
        # A loss whose derivative differs from sample to sample, and from step to step.
        cotangents = jax.tree.map(lambda x: 1 + jnp.sin(3 * x), result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
        return tables, slots, result.activations, result.stats

    return step


def values_of(tables, slots, plan):
    """Returns tables, and slot variables, in natural row order, by name."""
    return (
        te.functional.unstack_tables(tables, plan),
        te.functional.slot_values(slots, plan),
    )


def start(plan):
    tables = te.functional.init_tables(plan, jax.random.key(0))
    return tables, te.functional.init_slots(tables, plan)


def run(plan, batches):
    """Returns all activations and the last values, and each step's rounds."""
    tables, slots = start(plan)
    step = step_of(plan)
    activations, rounds = [], []
    for features in prepared(batches, plan):
        tables, slots, of_step, stats = step(tables, slots, features)
        activations.append(of_step)
        rounds.append({name: int(n) for name, n in stats.rounds.items()})
    return (activations, values_of(tables, slots, plan)), rounds


def check(features, batches, backend, **options):
    """Runs both backends, and returns the plan and the rounds under `backend`."""
    expected, _ = run(plan_of(features, "xla", **options), batches)
    plan = plan_of(features, backend, **options)
    found, rounds = run(plan, batches)
    assert_close(found, expected)
    return plan, rounds


def assert_close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), found, expected
    )


@pytest.fixture
def promoting():
    """Lets optax multiply floats by counts of steps."""
    with jax.numpy_dtype_promotion("standard"):
        yield


BATCHES = [batch_of(step) for step in range(STEPS)]
EVERY_ROW = {"every_row": te.optimizers.every_row(te.optimizers.adam(0.1))}


@functools.cache
def exchange_on_one_device():
    return run(plan_of(features_of(), "xla", num_devices=1), BATCHES)[0]


@pytest.mark.parametrize(
    ("num_devices", "cores"), quick_cases(matrix([1, 2, 3, 8], [2, 4]), "2-2")
)
def test_devices_and_combiners(num_devices, cores):
    """The numbers equal the exchange's on one device."""
    plan = plan_of(features_of(), te.SparseCore(cores=cores, max_ids=512), num_devices)
    found, rounds = run(plan, BATCHES)
    assert_close(found, exchange_on_one_device())
    rows, start_rows = (x[0]["t300"] for x in (found[1], values_of(*start(plan), plan)))
    touched = np.unique([batch["wide"] for batch in BATCHES])
    touched = np.union1d(touched, [x for b in BATCHES for x in b["sequence"].values])
    untouched = np.setdiff1d(np.arange(300), touched)
    assert untouched.size
    np.testing.assert_array_equal(rows[untouched], start_rows[untouched])
    assert [stack.backend.updates for stack in plan.stacks] == ["sparse_core"]
    assert rounds == [{"stack_0": 0}] * STEPS


@pytest.mark.parametrize("name", quick_cases(["adam", "chain", "schedule"]))
def test_elementwise_rules_run_on_sparse_cores(name, promoting):
    optimizer = OPTIMIZERS[name]
    features = few_features()
    plan, rounds = check(features, BATCHES, "sparse_core", optimizer=optimizer)
    assert plan.stacks[0].backend.updates == "sparse_core", plan.stacks[0].backend
    assert rounds == [{"stack_0": 0}] * STEPS


@pytest.mark.parametrize("name", quick_cases(["lamb", "adafactor", "every_row"]))
def test_other_rules_run_on_the_exchange(name, promoting):
    optimizer = (OPTIMIZERS | EVERY_ROW)[name]
    features = few_features(dim=20)
    plan, _ = check(features, BATCHES, "sparse_core", optimizer=optimizer)
    backend = plan.stacks[0].backend
    assert (backend.lookups, backend.updates) == ("sparse_core", "xla"), backend


@pytest.mark.full
def test_64_bit_types_do_not_change_a_step():
    features = few_features()
    plain, _ = run(plan_of(features, "sparse_core"), BATCHES[:1])
    with jax.enable_x64(True):
        assert_close(run(plan_of(features, "sparse_core"), BATCHES[:1])[0], plain)


def hot_batch(num_devices, rows, cores=2, samples=10):
    """Returns a batch in which every sample asks for all rows.

    Args:
      num_devices: devices that share it.
      rows: ids of the feature "wide".
      cores: SparseCores per device.
      samples: samples of a core.
    """
    return {"wide": np.tile(rows, (num_devices * cores * samples, 1)).astype(np.int32)}


ONE_ROW = np.zeros(1)
SIX_ROWS = 5 + 32 * np.arange(6)  # of one SparseCore, on up to 8 devices of 4
WIDE = {"wide": features_of()["wide"]}


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "2"))
@pytest.mark.parametrize("one_device", quick_cases([False, True], "True"))
def test_a_row_beyond_the_limit_takes_the_exchange(one_device, num_devices):
    """The middle step of three takes the exchange, on the same rows."""
    hot = hot_batch(num_devices, ONE_ROW)
    size = hot["wide"].shape[0]
    spread = {"wide": np.arange(size, dtype=np.int32)[:, None]}
    if one_device:
        on_first = np.arange(size)[:, None] < size // num_devices
        hot = {"wide": np.where(on_first, hot["wide"], spread["wide"])}
    batches = [spread, hot, spread]
    backend = te.SparseCore(cores=2, max_ids=8)
    _, rounds = check(WIDE, batches, backend, num_devices=num_devices)
    assert [n["stack_0"] > 0 for n in rounds] == [False, True, False]


@pytest.mark.full
@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "2"))
def test_minibatches_change_no_bit(num_devices):
    """The gradients of a row are summed in one order, whatever the limit."""
    draw = np.random.default_rng(0)
    size = 20 * num_devices
    batches = [{"wide": draw.zipf(1.3, (size, 1)).astype(np.int32) % 300} for _ in "ab"]
    results = [
        run(plan_of(WIDE, te.SparseCore(cores=2, max_ids=n), num_devices), batches)
        for n in (16, 4096)
    ]
    (found, rounds), (expected, _) = results
    assert rounds == [{"stack_0": 0}] * 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3], "2"))
def test_without_the_exchange_a_step_beyond_the_limit_changes_nothing(num_devices):
    optimizer = ADAGRAD  # It counts no steps.
    backend = te.SparseCore(cores=2, max_ids=8, exchange=False)
    plan = plan_of(WIDE, backend, num_devices, optimizer)
    tables, slots = start(plan)
    step = step_of(plan)
    hot, fits = hot_batch(num_devices, ONE_ROW), hot_batch(num_devices, SIX_ROWS[:1])
    fits = {"wide": np.arange(hot["wide"].size, dtype=np.int32)[:, None]}
    hot, fits = (te.inputs.prepare_features(x, plan) for x in (hot, fits))
    new_tables, new_slots, activations, stats = step(tables, slots, hot)
    assert int(stats.rounds["stack_0"]) == 1
    assert np.all(np.isnan(activations["wide"]))
    jax.tree.map(
        np.testing.assert_array_equal, (new_tables, new_slots), (tables, slots)
    )
    *after, activations, stats = step(new_tables, new_slots, fits)
    assert int(stats.rounds["stack_0"]) == 0
    other = plan_of(WIDE, "xla", num_devices, optimizer)
    *expected, wanted, _ = step_of(other)(*start(other), fits)
    assert_close(values_of(*after, plan), values_of(*expected, other))
    assert_close(activations, wanted)


COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter")


@pytest.mark.full
def test_loops_of_several_stacks_have_no_collectives():
    """XLA:CPU deadlocks if devices run collectives of two loops in different orders."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=300, dim=dim, name=name)
        )
        for name, dim in {"narrow": 4, "wide": 8}.items()
    }
    plan = plan_of(features, te.SparseCore(cores=2, max_ids=8, exchange=False))
    assert len(plan.stacks) == 2
    ids = dict.fromkeys(features, jnp.zeros((32, 2), jnp.int32))
    compiled = step_of(plan).lower(*start(plan), ids).compile()
    module = hlo.parse_module(compiled.as_text())

    def inside(name, seen):
        """Yields all instructions that a computation runs."""
        if name in seen or name not in module.computations:
            return
        for instruction in module.computations[name].values():
            yield instruction
            for inner in re.findall(r"=\{?%([\w.\-]+)", instruction.text):
                yield from inside(inner, seen | {name})

    instructions = [x for c in module.computations.values() for x in c.values()]
    assert any(x.base_opcode in COLLECTIVES for x in instructions)
    bodies = [x.called("body") for x in instructions if x.opcode == "while"]
    assert bodies
    in_loops = [x.text for body in bodies for x in inside(body, frozenset())]
    assert [x for x in in_loops if any(f" {c}(" in x for c in COLLECTIVES)] == []


class Skipping(nnx.Module):
    """A layer whose stacks may be limited, counted, moved in every step or unused."""

    RULES = {
        "wide": None,
        "other": optax.adam(0.1),
        "bfloat16": te.optimizers.every_row(optax.sgd(0.1, momentum=0.9)),
        "unused": te.optimizers.adam(0.1),
    }

    def __init__(self, num_devices):
        backend = te.SparseCore(cores=2, max_ids=8, exchange=False)
        features = {
            name: te.FeatureConfig(
                table=te.TableConfig(
                    vocabulary_size=300,
                    dim=8 if name == "other" else 4,
                    dtype=jnp.bfloat16 if name == "bfloat16" else jnp.float32,
                    optimizer=rule,
                    name=name,
                )
            )
            for name, rule in self.RULES.items()
        }
        plan = plan_of(features, backend, num_devices, te.optimizers.adam(0.1))
        assert any(stack.backend.must_run_all for stack in plan.stacks)
        self.layer = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(16, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids):
        rows = self.layer(ids)
        rows = jnp.concatenate([rows[name] for name in sorted(rows)], 1)
        return self.linear(self.norm(rows))


@nnx.jit
def skipping_step(model, optimizer, ids):
    compute = te.value_and_grad(lambda model: jnp.sum(model(ids) ** 2))
    loss, gradients = compute(model)
    optimizer.update(model, gradients)
    return loss, te.gradients.is_whole(gradients)


def trained_on(batches, num_devices, tx):
    model = Skipping(num_devices)
    optimizer = te.Optimizer(model, tx)
    results = [skipping_step(model, optimizer, ids) for ids in batches]
    return (model, optimizer), results


@pytest.mark.full
@pytest.mark.parametrize("num_devices", quick_cases([1, 2, 3, 8], "1"))
@pytest.mark.parametrize("skips", quick_cases([False, True], "True"))
def test_without_the_exchange_a_step_beyond_the_limit_is_skipped(num_devices, skips):
    """No table, slot, count, dense parameter, moment or running average changes."""
    tx = optax.apply_if_finite(optax.adam(0.1), 1) if skips else optax.adam(0.1)
    size = 32 * num_devices
    draw = np.random.default_rng(0)
    fits = {
        name: (np.arange(size) + draw.integers(99)).astype(np.int32)
        for name in ("wide", "other", "bfloat16")
    }
    hot = fits | {"wide": np.zeros(size, np.int32)}
    skipped, results = trained_on([fits, hot, hot, fits], num_devices, tx)
    assert [bool(is_whole) for _, is_whole in results] == [True, False, False, True]
    is_nan = [bool(jnp.isnan(loss)) for loss, _ in results]
    assert is_nan == [False, True, True, False]
    expected, _ = trained_on([fits, fits], num_devices, tx)
    found, wanted = (
        (
            nnx.state(model, (nnx.Param, nnx.BatchStat)),
            model.layer.embedding_tables(),
            nnx.state(optimizer),
        )
        for model, optimizer in (skipped, expected)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.full
def test_without_the_exchange_sums_of_incomplete_lookups_are_skipped():
    """The sum of the gradients has a fallback, but the lookups had none."""
    backend = te.SparseCore(cores=2, max_ids=8, exchange=False)
    plan = plan_of(WIDE, backend)
    tables, slots = start(plan)

    @jax.jit
    def gradients_of(ids):
        result = te.functional.lookup(tables, {"wide": ids}, plan)
        return te.functional.compute_gradients(result.routing, result.activations, plan)

    @jax.jit
    def apply(gradients):
        return te.functional.apply_gradients(
            tables, slots, gradients, plan, only_if=jnp.array(True)
        )

    partial, whole = map(
        gradients_of,
        (np.zeros((64, 1), np.int32), np.arange(64, dtype=np.int32)[:, None]),
    )
    total = te.gradients.add(partial, whole)
    zeros = jax.tree.map(jnp.zeros_like, whole)
    parts = [partial, whole, total, te.gradients.scale(total, 0.5), zeros]
    is_whole = [bool(te.gradients.is_whole(x)) for x in parts]
    assert is_whole == [False, True, False, False, True]
    for gradients in (partial, total):
        jax.tree.map(np.testing.assert_array_equal, apply(gradients), (tables, slots))
    found, wanted = apply(te.gradients.add(whole, zeros)), apply(whole)
    (table,) = te.functional.unstack_tables(found[0], plan).values()
    (initial,) = te.functional.unstack_tables(tables, plan).values()
    assert (table[:64] != initial[:64]).any(axis=1).all()
    assert_close(found, wanted)


@pytest.mark.full
def test_without_the_exchange_sums_of_gradients_lose_no_id():
    """Each lookup fits, and the sum of their gradients does not."""
    hot = {"wide": np.zeros((32, 1), np.int32)}  # 8 ids of each SparseCore
    results = []
    for backend in (te.SparseCore(cores=2, max_ids=8, exchange=False), "xla"):
        plan = plan_of(WIDE, backend)
        tables, slots = start(plan)
        features = te.inputs.prepare_features(hot, plan)
        lookups = [te.functional.lookup(tables, features, plan) for _ in "ab"]
        gradients = te.gradients.add(
            *(
                te.functional.compute_gradients(x.routing, x.activations, plan)
                for x in lookups
            )
        )
        updated = te.functional.apply_gradients(tables, slots, gradients, plan)
        results.append(values_of(*updated, plan))
        assert backend == "xla" or int(lookups[0].stats.rounds["stack_0"]) == 0
    assert_close(*results)


@pytest.mark.full
def test_without_the_exchange_steps_of_infinite_rates_are_counted():
    """As `te.functional.finite_rates` promises: rows stay, and the count advances."""
    optimizer = optax.sgd(lambda count: 0.1 / count)
    results = []
    for backend in (te.SparseCore(exchange=False), "xla"):
        plan = plan_of(WIDE, backend, optimizer=optimizer)
        tables, slots = start(plan)
        features = te.inputs.prepare_features(hot_batch(2, SIX_ROWS), plan)
        for _ in range(2):
            tables, slots, _, _ = step_of(plan)(tables, slots, features)
        results.append((te.functional.unstack_tables(tables, plan), slots))
    assert_close(*(tables for tables, _ in results))
    counts = [jax.tree.leaves(slots) for _, slots in results]
    assert [[int(x) for x in leaves] for leaves in counts] == [[2], [2]]


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    "weights",
    with_ids(
        {"nan": [np.nan, 1], "inf": [np.inf, 1], "cancels": [np.inf, -np.inf]}
        | {"overflows": [3e38, 3e38]}
    ),
)
def test_a_weight_that_is_not_finite_takes_the_exchange(weights):
    """Under `jit` nobody rejects it; a bad sample spoils its own row alone."""
    features = {"again": features_of()["again"]}
    ids = np.zeros((BATCH, 2), np.int32) + np.arange(BATCH, dtype=np.int32)[:, None]
    of_ids = np.ones((BATCH, 2), np.float32)
    of_ids[3] = weights
    batch = {"again": te.DenseIds(ids=jnp.asarray(ids), weights=jnp.asarray(of_ids))}
    results = []
    for backend in ("sparse_core", "xla"):
        plan = plan_of(features, backend)
        tables, slots = start(plan)
        tables, slots, activations, stats = step_of(plan)(tables, slots, batch)
        values, _ = values_of(tables, slots, plan)
        results.append((activations, values))
        assert int(stats.rounds["stack_0"]) > 0
        is_bad = ~np.isfinite(activations["again"]).all(axis=1)
        np.testing.assert_array_equal(is_bad, np.arange(BATCH) == 3)
    assert_close(*results)


@pytest.mark.parametrize(
    "beyond",
    quick_cases(["update", "lookup", "both", "neither"]),
)
def test_lookup_and_update_choose_on_their_own(beyond):
    """The gradient of two lookups is one batch for the update; or only one is used."""
    features, hot = WIDE, hot_batch(2, ONE_ROW)
    first, second = (
        {"wide": np.arange(n, n + 40, dtype=np.int32)[:, None]} for n in (0, 20)
    )
    if beyond in ("lookup", "both"):
        first = hot

    def step_of_two(plan, features):
        tables, slots = start(plan)

        @jax.jit
        def step(tables, slots, features):
            results = [te.functional.lookup(tables, x, plan) for x in features]
            parts = [
                te.functional.compute_gradients(x.routing, x.activations, plan)
                for x in results
            ]
            used = parts if beyond in ("update", "both") else parts[1:]
            gradients = te.gradients.add(*used)
            updated = te.functional.apply_gradients(tables, slots, gradients, plan)
            rounds = [x.stats.rounds["stack_0"] for x in results]
            return *updated, [x.activations for x in results], rounds

        prepared = [te.inputs.prepare_features(x, plan) for x in features]
        tables, slots, activations, rounds = step(tables, slots, prepared)
        return (values_of(tables, slots, plan), activations), rounds

    backend = te.SparseCore(cores=2, max_ids=8)
    (found, rounds), (expected, _) = (
        step_of_two(plan_of(features, x), (first, second)) for x in (backend, "xla")
    )
    assert [int(n) > 0 for n in rounds] == [beyond in ("lookup", "both"), False]
    assert_close(found, expected)


@pytest.mark.full
def test_nothing_is_compiled_twice():
    plan = plan_of(WIDE, te.SparseCore(cores=2, max_ids=16))
    tables, slots = start(plan)
    step = step_of(plan)
    spread = {"wide": np.arange(240, dtype=np.int32).reshape(40, 6)}
    for batch in [spread, hot_batch(2, SIX_ROWS), spread]:
        features = te.inputs.prepare_features(batch, plan)
        tables, slots, _, _ = step(tables, slots, features)
    assert step._cache_size() == 1


def test_a_checkpoint_goes_from_one_backend_to_the_other(tmp_path):
    plans = {name: plan_of(features_of(), name) for name in ("xla", "sparse_core")}
    kept = {}
    for name, plan in plans.items():
        model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(1))
        te.save(tmp_path / name, model)
        kept[name] = model.embedding_tables()
    for name, plan in plans.items():
        other = "xla" if name == "sparse_core" else "sparse_core"
        model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(2))
        te.restore(tmp_path / other, model)
        jax.tree.map(
            np.testing.assert_array_equal, model.embedding_tables(), kept[other]
        )


class Model(nnx.Module):
    def __init__(self, plan, rngs):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=rngs)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, features):
        return sum(self.head(x).sum() for x in self.embedding(features).values())


@pytest.mark.full
def test_a_flax_model_trains_in_a_pipeline():
    features = few_features()
    batches = [{name: batch[name] for name in features} for batch in BATCHES]

    def loss_fn(model, batch):
        return jnp.square(model(batch) - 1)

    def train(plan):
        model = Model(plan, nnx.Rngs(0))
        optimizer = te.Optimizer(model, optax.sgd(1e-3))
        prepared = [model.embedding.prepare(batch) for batch in batches]
        step = te.PipelinedTrainStep(loss_fn, features_of=lambda batch: batch)
        pairs = zip(prepared, [*prepared[1:], None], strict=True)
        losses = [step(model, optimizer, *pair) for pair in pairs]
        return losses, model.embedding.embedding_tables()

    found, expected = (train(plan_of(features, x)) for x in ("sparse_core", "xla"))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )
