"""Bits equal the same training with all rows on the devices.

Tables, slot variables, totals, counts and the activations of every step are compared.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows.twins import Run, check_equal, twins, zipf_ids
from tests.tiers import full_cases, matrix, quick_cases

ROWS = {"a": 301, "b": 133}  # Two tables of a stack, with gaps for 2, 3 and 8 devices.
BATCH = 10
RULES = {
    "sgd": te.optimizers.sgd(0.1),
    "adagrad": te.optimizers.adagrad(0.05),
    "rowwise": te.optimizers.rowwise_adagrad(0.05),
    "adam": te.optimizers.lazy_adam(0.01),
    "ftrl": te.optimizers.ftrl(0.05),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.01, 9), momentum=0.9),
    "adafactor": te.optimizers.adafactor(0.1),
    "in_sequence": te.optimizers.in_sequence(te.optimizers.adagrad(0.05)),
}
DEVICES = [pytest.param(n, id=f"{n}devices") for n in (1, 2, 3, 8)]
CACHE = te.HostRows(cache_rows=100)  # of each table


def tables_of(placements, dim=5, dtype=jnp.float32, **options):
    """Returns one table per name; `placements` may be one for all."""
    if not isinstance(placements, dict):
        placements = dict.fromkeys(ROWS, placements)
    return {
        name: te.TableConfig(
            vocabulary_size=size,
            dim=dim,
            name=name,
            combiner=combiner,
            dtype=dtype,
            placement=placements[name],
            **options,
        )
        for (name, size), combiner in zip(ROWS.items(), ("sum", "mean"), strict=True)
    }


def config_of(placement, **options):
    """Two tables in a stack, and two features of the first."""
    tables = tables_of(placement, **options)
    tables["c"] = tables["a"]
    return {name: te.FeatureConfig(table=table) for name, table in tables.items()}


def batches_of(plan, number, seed=0, size=BATCH):
    """Draws dense batches for `config_of`."""
    draw = np.random.default_rng(seed)
    return [
        {
            "a": zipf_ids(draw, (size, 3), ROWS["a"]),
            "b": zipf_ids(draw, (size, 2), ROWS["b"]),
            "c": zipf_ids(draw, (size,), ROWS["a"]),
        }
        for _ in range(number)
    ]


@pytest.mark.parametrize(
    ("rule", "num_devices", "dtype"),
    quick_cases(
        matrix(RULES, DEVICES, ["float32", "bfloat16"]),
        "rowwise-2devices-bfloat16",
    ),
)
def test_rules(rule, num_devices, dtype):
    host = twins(
        lambda placement: config_of(placement, dtype=dtype),
        batches_of,
        CACHE,
        num_devices,
        optimizer=RULES[rule],
    )
    (stack,) = host.hosts.values()
    assert 0 < stack.num_fetched < stack.num_ids
    assert (
        stack.num_fetched > stack.stack.layout.num_rows * num_devices
    )  # Rows have left.


@pytest.mark.full
@pytest.mark.parametrize("num_devices", full_cases(DEVICES[:3], "2devices", "3devices"))
def test_more_misses_than_an_exchange_holds(num_devices):
    """The first batch is small, and sets the size of all exchanges."""
    placement = te.HostRows(cache_rows=1500)

    def config_of(placement):
        table = te.TableConfig(
            vocabulary_size=6000, dim=3, name="a", placement=placement
        )
        return te.FeatureConfig(table=table)

    def batches_of(plan, number):
        draw = np.random.default_rng(0)
        return [
            draw.integers(0, 6000, size, np.int32)
            for size in (8, 480, 480, 8, 480, 8, 8, 480, 480)
        ]

    host = twins(
        config_of, batches_of, placement, num_devices, optimizer=RULES["adagrad"]
    )
    (stack,) = host.hosts.values()
    assert stack.exchange_rows == 256
    assert stack.num_fetched > 4 * 450


@pytest.mark.parametrize("dim", full_cases([1, 40, 128, 200], "1", "128", "200"))
@pytest.mark.full
def test_dims(dim):
    """Rows that share a line, fill one, or take several."""
    twins(
        lambda placement: config_of(placement, dim=dim, dtype="bfloat16"),
        batches_of,
        CACHE,
        2,
        optimizer=RULES["rowwise"],
    )


@pytest.mark.full
def test_extreme_values_keep_their_bits():
    """Rows travel as bits: also NaN, infinities, denormals and negative zeros."""
    plan = te.make_plan(config_of(CACHE), mesh_of(2), optimizer=RULES["momentum"])
    run = Run(plan=plan)
    draw = np.random.default_rng(0)
    values = {}
    for name, size in ROWS.items():
        words = draw.integers(0, 2**32, (size, 5), np.uint32)
        words[::7] = 0x80000000
        words[1::7] = 0x7FC12345
        words[2::7] = draw.integers(1, 2**22, words[2::7].shape)
        words[3::7] = 0xFF800000
        values[name] = words.view(np.float32)
    stores = run.hosts["stack_0"].shards.stores
    for table in plan.stacks[0].tables:
        words = values[table.name].view(np.uint32)
        local, shards = np.divmod(table.row_offset + np.arange(len(words)), 2)
        for shard, store in enumerate(stores):
            rows, new = local[shards == shard], words[shards == shard]
            store.write_words(rows, new, slice(0, 5))
            store.write_words(rows, new, slice(5, 10))
    for batch in run.batches(batches_of(plan, 12)):
        run.evaluate(batch)
    state = run.state()
    check_equal(state["tables"], values)
    traces = {name: slots["trace"] for name, slots in state["slots"].items()}
    check_equal(traces, values)
