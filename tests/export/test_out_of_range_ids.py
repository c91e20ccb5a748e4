"""A served program reads the rows for ids out of range that the layer reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import each_once
from tpu_embedding.export.saved_model import _to_int32

ROWS = 9
PADDING = int(te.inputs.PADDING_ROW_ID)
TABLE = te.TableConfig(vocabulary_size=ROWS, dim=2, combiner="sum", name="movie")
WIDE = [ROWS, PADDING - 1, PADDING, 2**31, 2**32 + 3, 2**62, -1, -(2**31), -(2**63), 5]
VALUES = {
    "int64": np.array(WIDE),
    "uint64": np.array([2**63, 2**64 - 1, PADDING, 2**31, 5], np.uint64),
    "int32": np.array([ROWS, -1, PADDING - 1, PADDING, 5], np.int32),
}
POLICIES = ("clip", "drop", "error")


def ragged(ids):
    return te.RaggedIds(values=ids, row_splits=np.arange(len(ids) + 1))


def sparse(ids):
    indices = np.stack([np.arange(len(ids)), np.zeros(len(ids), int)], axis=1)
    return te.SparseIds(indices=indices, values=ids, dense_shape=(len(ids), 1))


FORMS = {
    "dense": np.asarray,
    "ragged": ragged,
    "sparse": sparse,
    "lists": lambda ids: [[int(i)] for i in ids],
    "dense_as_ragged": lambda ids: ids[:, None],
}


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Layer and served program by the policy and the kind of the program's ids."""
    found = {}
    for policy in POLICIES:
        features = {"movie": te.FeatureConfig(table=TABLE, out_of_range_ids=policy)}
        layer = te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))
        for kind in ("dense", "ragged"):
            path = tmp_path_factory.mktemp("export") / "served"
            te.export.save(layer, path, {"movie": FORMS[kind](np.arange(4))})
            found[policy, kind] = layer, te.export.load(path)
    return found


@pytest.mark.full
@pytest.mark.parametrize(("policy", "form", "name"), each_once(POLICIES, FORMS, VALUES))
def test_a_served_program_reads_what_the_layer_reads(layers, policy, form, name):
    values = VALUES[name]
    layer, served = layers[policy, "dense" if form == "dense" else "ragged"]
    batch = {"movie": FORMS[form](values)}
    try:
        expected = layer(layer.prepare(batch))["movie"]
    except (TypeError, ValueError) as error:  # NumPy reads lists with 2**63 as floats.
        with rejects(type(error), fix="'movie'"):
            served(batch)
        return
    np.testing.assert_array_equal(served(batch)["movie"], expected)


@pytest.mark.parametrize(
    ("kind", "padding"), [("dense_ids", PADDING), ("ragged_ids", PADDING - 1)]
)
def test_a_saved_model_keeps_ids_at_their_end(kind, padding, monkeypatch):
    """TensorFlow's functions, in the words of JAX."""

    class Words:
        where, int32 = jnp.where, jnp.int32
        cast = staticmethod(lambda x, dtype: x.astype(dtype))

    monkeypatch.setattr("tpu_embedding.export.saved_model._tensorflow", lambda: Words)
    with jax.enable_x64(True):
        found = _to_int32(jnp.array(WIDE), kind)
    high = PADDING - 1
    assert found.tolist() == [ROWS, high, padding, high, high, high, -1, -1, -1, 5]
