"""Lookups in whole tables, as an exported program does them."""

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.functional.serving_lookup import serve

functional = te.functional
IDS = np.array([2**40 + 3, 3, -(2**35), 2**63 - 1, 2**32 - 1])


def test_numpy_ids_of_a_dynamic_table_keep_their_upper_words():
    users = te.TableConfig(vocabulary_size=te.Dynamic(capacity=64), dim=4, name="user")
    config = te.FeatureConfig(table=users)
    plan = te.make_plan(config, mesh_of(1), optimizer="sgd")
    tables = functional.init_tables(plan, jax.random.key(0))
    slots = functional.init_slots(tables, plan)
    ids = functional.Ids64.of_array(IDS)
    result = functional.insert_ids(tables, slots, ids, plan)
    expected = functional.lookup(result.tables, result.features, plan).activations
    whole = {
        "user": jnp.asarray(functional.unstack_tables(result.tables, plan)["user"]),
        "user:ids": result.tables["stack_0:ids"].keys,
    }
    found, _ = serve(whole, IDS, plan)
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(found[:, 0])) == len(IDS)
