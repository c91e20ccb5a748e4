"""Plans, layers and states of the tests."""

import jax
import numpy as np
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

SIZES = {"movie": 40, "user": 7}
RULE = te.optimizers.adagrad(0.1)


def features_of(sizes, dim, rules, dtypes=()):
    return {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size,
                dim=dim[name] if isinstance(dim, dict) else dim,
                name=name,
                optimizer=rules[name] if isinstance(rules, dict) else rules,
                dtype=dict(dtypes).get(name, "float32"),
            )
        )
        for name, size in sizes.items()
    }


def plan_of(sizes=SIZES, *, devices=2, dim=4, rules=RULE, dtypes=(), **options):
    features = features_of(sizes, dim, rules, dtypes)
    return te.make_plan(features, mesh_of(devices), **options)


def make_layer(shapes, rule=None, num_devices=2, *, dtype="float32", seed=0):
    """Returns a layer with a table of each shape `(rows, dim)`."""
    sizes, dims = ({k: shape[i] for k, shape in shapes.items()} for i in (0, 1))
    features = features_of(sizes, dims, rule, dict.fromkeys(sizes, dtype))
    return te.TPUEmbedding(features, mesh=mesh_of(num_devices), rngs=nnx.Rngs(seed))


def state_of(plan, seed=0):
    tables = te.functional.init_tables(plan, jax.random.key(seed))
    return {
        "tables": tables,
        "slots": te.functional.init_slots(tables, plan),
        "step": 3 + seed,
    }


def with_random_slots(state, plan):
    random = np.random.default_rng(0)
    values = te.functional.slot_values(state["slots"], plan)
    new = jax.tree.map(lambda x: random.uniform(1, 2, x.shape), values)
    return state | {"slots": te.functional.with_slot_values(state["slots"], new, plan)}


def numbers_of(state, plan):
    slots = te.functional.slot_values(state["slots"], plan, "all")
    return te.functional.unstack_tables(state["tables"], plan), slots


def check_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
