"""Other features on the same tables, and subsets of a nest."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

USER = te.TableConfig(vocabulary_size=7, dim=3, name="user")
ITEM = te.TableConfig(vocabulary_size=5, dim=3, name="item")
WIDE = te.TableConfig(vocabulary_size=5, dim=1, name="wide")
NAMELESS = te.TableConfig(vocabulary_size=4, dim=2)


def feature(table, **options):
    return te.FeatureConfig(table=table, **options)


CONFIG = {
    "user": {"id": feature(USER), "history": [feature(ITEM), feature(USER)]},
    "item": [feature(ITEM), feature(WIDE)],
    "other": feature(NAMELESS),
}


def plan_of(config=None, **options):
    return te.make_plan(CONFIG if config is None else config, mesh_of(2), **options)


def names(plan):
    return [f.name for f in plan.features]


def test_with_features_keeps_all_but_the_features():
    plan = plan_of(optimizer=optax.sgd(0.1))
    other = plan.with_features(
        [feature(ITEM, max_sequence_length=3), feature(NAMELESS, name="n")]
    )
    assert [f.table for f in other.features] == [ITEM, NAMELESS]
    assert names(other) == ["0", "n"]
    assert (
        dataclasses.replace(
            other, features=plan.features, feature_tree=plan.feature_tree
        )
        == plan
    )
    assert other.stacks is plan.stacks


def test_with_features_lists_every_table_that_is_missing():
    others = {
        "right": feature(USER),
        "unknown": feature(te.TableConfig(vocabulary_size=9, dim=3, name="shop")),
        "changed": feature(dataclasses.replace(ITEM, combiner="sum")),
    }
    with rejects(field="feature_config", value=others) as error:
        plan_of().with_features(others)
    text = str(error.value)
    assert "'unknown'" in text and "'changed'" in text and "'right'" not in text


SUBSETS = {
    "all": (
        {"user": {"id": 1, "history": [2, 3]}, "item": [4, 6], "other": 5},
        ["item/0", "item/1", "other", "user/history/0", "user/history/1", "user/id"],
    ),
    "one key": ({"item": [4, 6]}, ["item/0", "item/1"]),
    "list": ({"user": {"history": [2, 3]}}, ["user/history/0", "user/history/1"]),
    "empty part": ({"user": {}, "other": 5}, ["other"]),
}


@pytest.mark.parametrize(("batch", "expected"), SUBSETS.values(), ids=SUBSETS)
def test_plan_for_a_subset(batch, expected):
    plan = plan_of()
    subset, leaves = plan.match(batch)
    assert names(subset) == expected
    assert (subset is plan) == (len(expected) == len(plan.features))
    again, _ = plan.match(batch)
    assert (subset, hash(subset)) == (again, hash(again))
    # Lookups keep their places, and activations come back in the nest of the batch.
    assert set(subset.features) <= set(plan.features)
    nest = subset.unflatten(leaves)
    assert jax.tree.leaves(nest) == jax.tree.leaves(batch)
    assert subset.match(nest) == (subset, leaves)


WRONG = {
    "unknown key": {"item": 1, "shop": 2},
    "unknown nested key": {"user": {"age": 2}},
    "shorter list": {"user": {"history": [1]}},
    "longer list": {"user": {"history": [1, 2, 3]}},
    "tuple for list": {"user": {"history": (1, 2)}},
    "leaf for dict": {"user": 1},
    "list": [1, 2, 3],
    "nothing": {},
    "nothing nested": {"user": {}},
    "none": None,
    "array": np.arange(3),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_nests_are_rejected(case):
    with rejects(field="weights", value=WRONG[case]):
        plan_of().match(WRONG[case], "weights")
