"""Exports of dynamic tables: ids are found read-only, or stand beside their rows."""

import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.states import make_layer
from tests.export.dynamic_models import (
    DynamicModel,
    DynamicTrainer,
    dynamic_batch,
    evaluated,
)
from tests.rejections import rejects

ExportError = te.export.ExportError


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, "learned"), id="learned"),
        pytest.param((2, "none"), id="2devices", marks=pytest.mark.full),
    ],
)
def trained(request):
    num_devices, default_row = request.param
    # A user that came once has no row, and trains the learned default row.
    options = {"admit": te.dynamic.AdmitAfter(2)}
    trainer = DynamicTrainer(
        num_devices=num_devices, default_row=default_row, **options
    )
    return trainer.train(3).model


@pytest.fixture(scope="module")
def served(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "served"
    te.export.save(trained, directory, dynamic_batch(16))
    return te.export.load(directory)


@pytest.mark.full(every_case=True)
def test_outputs_are_those_of_the_live_model(trained, served):
    batch = dynamic_batch(17, seed=9, first=100)
    outputs, wanted = served(batch), evaluated(trained, batch)
    assert set(outputs) == set(wanted)
    for name, values in wanted.items():
        # Sums of up to 4 rows in another order.
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


@pytest.mark.full(every_case=True)
def test_single_rows_are_equal_bit_for_bit_and_unknown_ids_read_the_default_row(
    trained, served
):
    found = te.functional.dynamic_rows(
        trained.embedding.tables.get_value(), trained.embedding.plan
    )["user"]
    batch = dynamic_batch(len(found.ids) + 2)
    unknown = np.uint64([7, 2**63 + 5])
    batch["user"] = np.concatenate([found.ids, unknown])
    outputs, wanted = served(batch)["user"], evaluated(trained, batch)["user"]
    np.testing.assert_array_equal(outputs, wanted)
    np.testing.assert_array_equal(outputs[-1], outputs[-2])


@pytest.mark.full
def test_strings_are_served_and_a_model_without_an_id(tmp_path):
    te.export.save(DynamicModel(), tmp_path / "served", dynamic_batch(8))
    batch = dynamic_batch(4) | {
        "user": te.inputs.fingerprint_ids(["ann", "bob", "ann", "eve é"])
    }
    assert not np.any(te.export.load(tmp_path / "served")(batch)["user"])


@pytest.mark.full
def test_narrow_rows_are_served(trained, tmp_path):
    te.export.save(trained, tmp_path / "served", dynamic_batch(8), dtype="int8")
    served = te.export.load(tmp_path / "served")
    batch = dynamic_batch(8, seed=3)
    outputs, wanted = served(batch)["user"], evaluated(trained, batch)["user"]
    # Half of a step of the widest row's 255, of each value that is added up.
    rows = trained.embedding.embedding_tables()["user"]
    step = np.ptp(rows, axis=1).max() / 255
    np.testing.assert_allclose(outputs, wanted, rtol=0, atol=0.51 * step)


class Sharing(DynamicModel):
    """Looks the same ids up in a dynamic and in a static table."""

    def __call__(self, ids):
        return self.embedding({"user": ids, "tag": ids})


def test_ids_of_dynamic_and_static_tables_need_two_inputs(tmp_path):
    with rejects(ExportError, field="'ids'"):
        te.export.save(Sharing(), tmp_path / "served", np.arange(4))


def test_name_of_the_ids_of_another_table_is_refused(tmp_path):
    layer = make_layer({"user": (te.Dynamic(capacity=9), 4), "user:ids": (9, 4)})
    with rejects(ExportError, field="tables", value=["user:ids"]):
        te.export.save_tables(layer, tmp_path / "tables")
