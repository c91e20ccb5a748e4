"""The opening lines of a run, and the records that a resumed run keeps."""

import json

import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools.train.reporting import drop_repeated_records, format_tables
from tpu_embedding.tools.train.run_directory import RECORDS_FILE, read_records


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
    assert total == "8 devices, cpu; tables and slot variables take 6.10 MiB per device"
    num_rows = 50_001  # One row of the stack is between the tables.
    bytes_of_each = plan.table_bytes_per_device, plan.slot_bytes_per_device
    assert bytes_of_each == (num_rows * 16 * 4, num_rows * 16 * 4)


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


@pytest.mark.parametrize(
    ("step", "evaluates", "kept"),
    [
        (0, False, []),
        (2, False, ["train 2", "evaluation 2"]),
        (2, True, ["train 2"]),
        (4, True, ["train 2", "evaluation 2", "train 4"]),
        (4, False, ["train 2", "evaluation 2", "train 4", "evaluation 4", "result 4"]),
    ],
)
def test_a_resumed_run_drops_the_records_that_it_repeats(
    tmp_path, step, evaluates, kept
):
    start = {"run": {"seed": 3}, "origin": None}
    records = [start]
    for done in (2, 4):
        records += [
            {"step": done, name: {"x": 0.5}} for name in ("train", "evaluation")
        ]
    records.append({"result": {"step": 4}})
    lines = [json.dumps(record) for record in records]
    (tmp_path / RECORDS_FILE).write_text("\n".join([*lines, '{"step": 5, "tr']))
    drop_repeated_records(tmp_path, step, evaluates=evaluates)
    first, *others = read_records(tmp_path / RECORDS_FILE)
    assert first == start
    found = [(set(x) - {"step"}, x.get("step", 4)) for x in others]
    assert [f"{name} {done}" for (name,), done in found] == kept
    assert [path.name for path in tmp_path.iterdir()] == [RECORDS_FILE]
