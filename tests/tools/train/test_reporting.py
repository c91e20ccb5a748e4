"""The opening lines of a run: one table of its tables."""

import optax

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools.train.reporting import format_tables


def opening_of(optimizer, num_devices, **options):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=16, name=name, **options)
        )
        for name, size in {"movie": 100_000, "user": 300_000}.items()
    }
    plan = te.make_plan(features, mesh_of(num_devices), optimizer=optimizer)
    return plan, format_tables(plan).splitlines()


def test_a_line_per_table():
    plan, (head, *tables, total) = opening_of(te.optimizers.adagrad(0.1), 8)
    assert head == "table  optimizer     rows  dim  memory per device  devices"
    assert tables == [
        "movie  Adagrad    100,000   16           1.53 MiB        8",
        "user   Adagrad    300,000   16           4.58 MiB        8",
    ]
    assert total == "8 devices, cpu; tables and slot variables take 6.10 MiB on each"
    assert plan.table_bytes_per_device + plan.slot_bytes_per_device == 400_000 * 16


def test_optimizers_are_named_by_their_state():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    for optimizer, name in {
        te.optimizers.adam(schedule): "Adam",
        optax.adam(0.1): "Adam",
        te.optimizers.sgd(0.1): "no slot variables",
        None: "none",
    }.items():
        _, (_, line, *_) = opening_of(optimizer, 1)
        assert line.startswith(f"movie  {name}  ")
