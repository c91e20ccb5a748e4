"""Arrays of another plan are rejected, not read."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases


def make_plan(num_devices=2, names=("items", "users"), sizes=(12, 12)):
    features = {
        f"feature_{i}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=4, name=name)
        )
        for i, (name, size) in enumerate(zip(names, sizes, strict=True))
    }
    return te.make_plan(
        features, mesh_of(num_devices), optimizer=te.optimizers.adam(0.1)
    )


def arrays_of(plan):
    tables = te.functional.init_tables(plan, jax.random.key(0))
    return tables, te.functional.init_slots(tables, plan)


IDS = {"feature_0": np.arange(4), "feature_1": np.arange(4)}

OTHER_PLANS = {
    "renamed, so the order changes": (dict(names=("items", "a_users")), "'a_users'"),
    "other sizes of the same sum": (dict(sizes=(8, 16)), "'users'"),
    "other devices": (dict(num_devices=4), "2 shards of 13 rows"),
}


@pytest.mark.parametrize(
    "case", quick_cases(OTHER_PLANS, "other sizes of the same sum", every_case=True)
)
def test_arrays_of_another_plan_are_rejected(case):
    options, text = OTHER_PLANS[case]
    plan, other = make_plan(), make_plan(**options)
    tables, slots = arrays_of(plan)
    for call in (
        lambda: te.functional.lookup(tables, IDS, other),
        lambda: te.functional.init_slots(tables, other),
        lambda: te.functional.unstack_tables(tables, other),
        lambda: te.functional.with_table_values(tables, {}, other),
    ):
        with rejects(fix=text):
            call()

    def check_updates():
        other_tables, other_slots = arrays_of(other)
        result = te.functional.lookup(other_tables, IDS, other)
        gradients = te.functional.compute_gradients(
            result.routing, result.activations, other
        )
        with rejects(field="slots['stack_0']"):
            te.functional.apply_gradients(other_tables, slots, gradients, other)
        with rejects(field="tables['stack_0']"):
            te.functional.apply_gradients(tables, other_slots, gradients, other)

    jax.eval_shape(check_updates)  # The plans are compared before anything compiles.


def layer_of(num_devices, names=("items", "users")):
    plan = make_plan(num_devices, names)
    return te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))


def test_a_plain_restore_needs_the_same_plan(tmp_path):
    """The arrays of tables have equal shapes under both plans; their names differ."""
    saved, restored, other = layer_of(2), layer_of(2), layer_of(2, ("items", "a_users"))
    values = {"items": np.full((12, 4), 3.0, np.float32)}
    saved.set_embedding_tables(values)
    shapes = [
        [x.shape for x in jax.tree.leaves(layer.tables.get_value())]
        for layer in (saved, other)
    ]
    assert shapes[0] == shapes[1]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(saved))
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match=r"lines_2x13x4_\w+"):  # Orbax's error
            checkpointer.restore(tmp_path / "state", nnx.state(other))
        state = checkpointer.restore(tmp_path / "state", nnx.state(restored))
    nnx.update(restored, state)
    np.testing.assert_array_equal(restored.embedding_tables()["items"], values["items"])
