"""Arithmetic on the lines of tables: an error for narrow rows, right for float32."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.rejections import rejects
from tests.tiers import each_once, with_ids

IDS = jnp.arange(8)


def layer_of(dtype, seed):
    table = te.TableConfig(vocabulary_size=10, dim=8, name="t", dtype=dtype)
    return te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(seed))


def averaged(dtype):
    """Returns a layer whose lines are averages, and the two layers that it averages."""
    layer, *sources = (layer_of(dtype, seed) for seed in (0, 0, 1))
    rows = [x.tables.get_value()["stack_0"] for x in sources]
    tables = layer.tables.get_value()
    tables["stack_0"] = optax.incremental_update(*rows, 0.25)
    layer.tables.set_value(tables)
    return layer, sources


USES = {
    "lookup": lambda layer: layer(IDS),
    "compiled": lambda layer: nnx.jit(lambda layer: layer(IDS))(layer),
    "tables": lambda layer: layer.embedding_tables(),
}


@pytest.mark.parametrize(
    ("use", "dtype"), each_once(with_ids(USES), ["bfloat16", "int8"])
)
def test_an_average_of_words_raises_at_its_use(dtype, use):
    layer, sources = averaged(dtype)
    with rejects(fix="layer.embedding_tables"):
        use(layer)
    # What the error says to write.
    new, old = (x.embedding_tables()["t"] for x in sources)
    repaired = layer_of(dtype, 2)
    repaired.set_embedding_tables({"t": 0.25 * new + 0.75 * old})
    # The values are rounded to 8 bits.
    np.testing.assert_allclose(
        repaired(IDS), (0.25 * new + 0.75 * old)[:8], rtol=2**-8, atol=2**-8
    )


def test_an_average_of_float32_lines_is_right():
    layer, (new, old) = averaged("float32")
    np.testing.assert_allclose(layer(IDS), 0.25 * new(IDS) + 0.75 * old(IDS), rtol=1e-6)
