"""Deltas of dynamic tables, by id: new and changed ids, and those that were evicted."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.export.dynamic_models import DynamicTrainer, dynamic_batch
from tpu_embedding.nn.set_tables import SetTables

ExportError = te.export.ExportError
RULE = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))


def trainer_of(**options):
    return DynamicTrainer(rule=RULE, **options)


def table_bytes(directory):
    return {x.name: x.read_bytes() for x in (directory / "tables").iterdir()}


def check_equals_fresh_export(trainer, base, later, **options):
    """Checks files, and what `export.json` says about tables but rounding errors."""
    te.export.save_tables(trainer.model, later, **options)
    assert table_bytes(base) == table_bytes(later)
    documents = [json.loads((x / "export.json").read_text()) for x in (base, later)]
    for document in documents:
        for entry in document["tables"].values():
            entry.pop("error", None)
    assert documents[0]["tables"] == documents[1]["tables"]
    assert documents[0]["files"] == documents[1]["files"]


@pytest.mark.parametrize(
    ("num_devices", "default_row", "dtype"),
    [
        (1, "learned", "float32"),
        pytest.param(3, "none", "float32", marks=pytest.mark.full),
        pytest.param(3, "learned", "int8", marks=pytest.mark.full),
    ],
)
def test_chain_with_evictions_equals_the_later_export(
    tmp_path, num_devices, default_row, dtype
):
    trainer = trainer_of(num_devices=num_devices, default_row=default_row).train(8)
    base = tmp_path / "base"
    te.export.save_tables(trainer.model, base, dtype=dtype, optimizer=trainer.optimizer)
    first, deltas = table_bytes(base), []
    for i in range(3):
        trainer.train()
        stats = trainer.model.embedding.dynamic_stats.get_value()["user"]
        assert int(stats.evictions) > 0
        deltas.append(tmp_path / f"delta{i}")
        te.export.save_delta(trainer.model, trainer.optimizer, deltas[-1])
        users = te.export.read_delta(deltas[-1]).tables["user"]
        assert len(users.evicted) == int(stats.evictions) and not users.is_whole
    for delta in deltas:
        te.export.apply_delta(base, delta)
    assert table_bytes(base) != first
    check_equals_fresh_export(trainer, base, tmp_path / "later", dtype=dtype)
    # A server that keeps a map of its own gets the same.
    stored = safetensors.numpy.load_file(base / "tables" / "user.safetensors")
    assert not set(users.evicted.tolist()) & set(stored["user:ids"].tolist())
    assert set(users.ids.tolist()) <= set(stored["user:ids"].tolist())


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    directory, trainer = tmp_path_factory.mktemp("chain"), trainer_of().train(8)
    te.export.save_tables(
        trainer.model, directory / "base", optimizer=trainer.optimizer
    )
    for i in range(2):
        trainer.train()
        delta = directory / f"delta{i}"
        te.export.save_delta(trainer.model, trainer.optimizer, delta)
    return trainer, directory


def refuses(base, delta, match):
    """Checks that a delta is refused, and the export stays as it is."""
    before = table_bytes(base), (base / "export.json").read_bytes()
    with pytest.raises(ExportError, match=match):
        te.export.apply_delta(base, delta)
    assert before == (table_bytes(base), (base / "export.json").read_bytes())


def test_wrong_order_is_refused(chain, tmp_path):
    _, directory = chain
    base = shutil.copytree(directory / "base", tmp_path / "base")
    refuses(base, directory / "delta1", "must follow")
    te.export.apply_delta(base, directory / "delta0")
    refuses(base, directory / "delta0", "applied to .* already")


def test_interrupted_delta_is_applied_again(chain, tmp_path, monkeypatch):
    trainer, directory = chain
    base = shutil.copytree(directory / "base", tmp_path / "base")
    write, calls = te.export.deltas._write_ids, []

    def write_once(*arguments):
        if calls:
            raise OSError("no space left")
        calls.append(write(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(te.export.deltas, "_write_ids", write_once)
        with pytest.raises(OSError, match="no space"):
            te.export.apply_delta(base, directory / "delta0")
    te.export.apply_delta(base, directory / "delta0")
    te.export.apply_delta(base, directory / "delta1")
    check_equals_fresh_export(trainer, base, tmp_path / "later")


def test_first_delta_after_a_restart_holds_all_ids(tmp_path):
    trainer, base = trainer_of().train(4), tmp_path / "base"
    te.export.save_tables(trainer.model, base, optimizer=trainer.optimizer)
    trainer.train(2)
    trainer.model.embedding.set_tables = SetTables()  # as in a new process
    for i, is_whole in enumerate((True, False)):
        delta = tmp_path / f"delta{i}"
        te.export.save_delta(trainer.model, trainer.optimizer, delta)
        assert te.export.read_delta(delta).tables["user"].is_whole is is_whole
        te.export.apply_delta(base, delta)
        check_equals_fresh_export(trainer, base, tmp_path / f"later{i}")
        trainer.train()


def test_ids_inserted_without_an_update_are_in_the_delta(tmp_path):
    trainer, base = trainer_of().train(), tmp_path / "base"
    te.export.save_tables(trainer.model, base, optimizer=trainer.optimizer)
    batch = trainer.model.embedding.prepare(dynamic_batch(48, first=500))
    trainer.optimizer.insert_ids(trainer.model, batch)
    te.export.save_delta(trainer.model, trainer.optimizer, tmp_path / "delta")
    users = te.export.read_delta(tmp_path / "delta").tables["user"]
    assert len(users.ids) == len(np.unique(dynamic_batch(48, first=500)["user"]))
    te.export.apply_delta(base, tmp_path / "delta")
    check_equals_fresh_export(trainer, base, tmp_path / "later")


def test_delta_without_changes_is_empty(tmp_path):
    trainer, base = trainer_of(default_row="learned").train(), tmp_path / "base"
    te.export.save_tables(trainer.model, base, optimizer=trainer.optimizer)
    te.export.save_delta(trainer.model, trainer.optimizer, tmp_path / "delta")
    assert not te.export.read_delta(tmp_path / "delta").tables
    before = table_bytes(base)
    te.export.apply_delta(base, tmp_path / "delta")
    assert table_bytes(base) == before


@pytest.mark.parametrize("steps_between", [0, 1])
def test_chain_goes_on_after_a_restore(tmp_path, steps_between):
    trainer, base = trainer_of().train(8), tmp_path / "base"
    te.export.save_tables(trainer.model, base, optimizer=trainer.optimizer)
    trainer.train(steps_between)
    te.save(tmp_path / "checkpoint", (trainer.model, trainer.optimizer))
    resumed = trainer_of()
    resumed.model, resumed.optimizer = te.restore(
        tmp_path / "checkpoint", (resumed.model, resumed.optimizer)
    )
    resumed.steps = trainer.steps
    # Room for ragged ids, which grows with the batches, changes the order of sums.
    resumed.model.embedding.buffer_sizes = trainer.model.embedding.buffer_sizes
    for each, name in ((trainer, "undisturbed"), (resumed, "resumed")):
        each.train(2)
        te.export.save_delta(each.model, each.optimizer, tmp_path / name)
    users = te.export.read_delta(tmp_path / "resumed").tables["user"]
    assert users.is_whole == bool(steps_between)
    same = table_bytes(tmp_path / "resumed") == table_bytes(tmp_path / "undisturbed")
    assert same == (not steps_between)
    te.export.apply_delta(base, tmp_path / "resumed")
    check_equals_fresh_export(trainer, base, tmp_path / "later")


def test_ids_inserted_before_a_checkpoint_are_not_those_of_the_export(tmp_path):
    trainer, base = trainer_of().train(4), tmp_path / "base"
    te.export.save_tables(trainer.model, base, optimizer=trainer.optimizer)
    batch = trainer.model.embedding.prepare(dynamic_batch(48, first=900))
    trainer.optimizer.insert_ids(trainer.model, batch)
    state = trainer.model, trainer.optimizer
    te.save(tmp_path / "checkpoint", state)
    trainer.model.embedding.set_tables = SetTables()  # as in a new process
    trainer.model, trainer.optimizer = te.restore(tmp_path / "checkpoint", state)
    te.export.save_delta(trainer.model, trainer.optimizer, tmp_path / "delta")
    assert te.export.read_delta(tmp_path / "delta").tables["user"].is_whole
    te.export.apply_delta(base, tmp_path / "delta")
    check_equals_fresh_export(trainer, base, tmp_path / "later")
