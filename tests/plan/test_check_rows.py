"""Arrays of another plan are refused, not read."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of


def make_plan(
    num_devices=2, names=("items", "users"), sizes=(12, 12), dim=4, dtype=jnp.float32
):
    features = {
        f"feature_{i}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=dim, name=name, dtype=dtype)
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
    "renamed, so the order changes": (
        dict(names=("items", "a_users")),
        [
            "the array has table 'items' in rows 0 to 12",
            "the plan has table 'a_users' in rows 0 to 12",
            "table 'items' in rows 13 to 25",
        ],
    ),
    "other sizes of the same sum": (
        dict(sizes=(8, 16)),
        ["the array has table 'items' in rows 0 to 12", "table 'users'"],
    ),
    "other devices": (
        dict(num_devices=4),
        ["the array has 2 shards of 13 rows", "the plan has 4 shards of 7"],
    ),
}


@pytest.mark.parametrize("case", OTHER_PLANS)
def test_arrays_of_another_plan_are_refused(case):
    options, texts = OTHER_PLANS[case]
    plan, other = make_plan(), make_plan(**options)
    tables, slots = arrays_of(plan)
    calls = {
        "tables": lambda: te.functional.lookup(tables, IDS, other),
        "init": lambda: te.functional.init_slots(tables, other),
        "values": lambda: te.functional.unstack_tables(tables, other),
        "set": lambda: te.functional.with_table_values(tables, {}, other),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="made for another plan") as raised:
            call()
        for text in texts:
            assert text in str(raised.value)

    def check_updates():
        other_tables, other_slots = arrays_of(other)
        result = te.functional.lookup(other_tables, IDS, other)
        gradients = te.functional.compute_gradients(
            result.routing, result.activations, other
        )
        match = "was made for another"
        with pytest.raises(ValueError, match=rf"slots\['stack_0'\] {match}"):
            te.functional.apply_gradients(other_tables, slots, gradients, other)
        with pytest.raises(ValueError, match=rf"tables\['stack_0'\] {match}"):
            te.functional.apply_gradients(tables, other_slots, gradients, other)

    jax.eval_shape(check_updates)  # The plans are compared before anything compiles.


def layer_of(num_devices, names=("items", "users")):
    plan = make_plan(num_devices, names)
    return te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))


def test_plain_restore_under_another_plan_raises(tmp_path):
    """The arrays of tables have equal shapes under both plans; their names differ."""
    saved = layer_of(2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(saved))
    layer = layer_of(2, ("items", "a_users"))
    wanted = nnx.state(layer)
    shapes = [x.shape for x in jax.tree.leaves(saved.tables.get_value())]
    assert shapes == [x.shape for x in jax.tree.leaves(layer.tables.get_value())]
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match=r"lines_2x13x4_\w+"):
            checkpointer.restore(tmp_path / "state", wanted)


def test_plain_restore_under_the_same_plan(tmp_path):
    saved, restored = layer_of(2), layer_of(2)
    values = {"items": np.full((12, 4), 3.0, np.float32)}
    saved.set_embedding_tables(values)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(saved))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "state", nnx.state(restored))
    nnx.update(restored, state)
    np.testing.assert_array_equal(restored.embedding_tables()["items"], values["items"])
