"""Batches of one feature, and their preparation."""

import functools

import numpy as np

import tpu_embedding as te
from tests.conftest import mesh_of

PADDING = te.inputs.PADDING_ROW_ID
VOCABULARY_SIZE = 10
TABLE = te.TableConfig(
    vocabulary_size=VOCABULARY_SIZE, dim=4, combiner="sum", name="table"
)


@functools.cache
def plan_of(num_devices=2, **options):
    config = {"the_feature": te.FeatureConfig(table=TABLE, **options)}
    return te.make_plan(config, mesh_of(num_devices))


def prepare(ids, weights=None, num_devices=2, **options):
    """Prepares a batch of one feature, `the_feature`."""
    if weights is not None:
        weights = {"the_feature": weights}
    plan = plan_of(num_devices, **options)
    return te.inputs.prepare_features({"the_feature": ids}, plan, weights)[
        "the_feature"
    ]


def dense(ids, weights=None):
    return te.DenseIds(ids=np.asarray(ids), weights=weights)


def ragged(values, row_splits, weights=None):
    return te.RaggedIds(
        values=np.asarray(values), row_splits=np.asarray(row_splits), weights=weights
    )


def sparse(indices, values, dense_shape=(3, 4), weights=None):
    return te.SparseIds(
        indices=np.asarray(indices).reshape(-1, len(dense_shape)),
        values=np.asarray(values),
        dense_shape=np.asarray(dense_shape),
        weights=weights,
    )


def bags_of(prepared, num_samples):
    """Returns the ids of each sample of a prepared batch, sorted."""
    if isinstance(prepared, te.inputs.ShardedRaggedIds):
        bags = [
            values[begin:end].tolist()
            for values, splits in zip(prepared.values, prepared.row_splits, strict=True)
            for begin, end in zip(splits[:-1], splits[1:], strict=True)
        ]
        assert not any(bags[num_samples:])
        bags = bags[:num_samples]
    else:
        ids = prepared.ids if isinstance(prepared, te.DenseIds) else prepared
        bags = ids.reshape(num_samples, -1).tolist()
    return [sorted(i for i in bag if i != PADDING) for bag in bags]


SPARSE = sparse([[0, 0], [2, 1], [2, 3]], [1, 2, 3])
RAGGED = ragged([1, 2, 3], [0, 1, 1, 3])
