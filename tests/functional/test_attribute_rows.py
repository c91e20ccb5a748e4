"""Rows of attributes of unique items, such as the artist of each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import with_ids
from tpu_embedding.types import PADDING_ROW_ID

NUM_ROWS, DIM, LENGTH = 8, 4, 5
# Item `i` has artist `ARTISTS[i]`; others never occur.
ARTISTS = np.array([4, 4, 0, 6, 2, 2, 2, 5])
# Empty, repeated, and of the maximum length; 5 does not divide by the devices.
HISTORIES = [[0, 1, 0], [], [7, 3, 7, 0, 2], [3], [5, 4, 6, 6]]
CANDIDATES = np.array([3, 2, 0, 0, 6])
FEATURES = {
    name: te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, name=name),
        unique_rows=True,
        max_sequence_length=LENGTH,
    )
    for name in ("artist", "item")
}
IDS = {
    name: {
        "history": [[int(of_item[i]) for i in items] for items in HISTORIES],
        "candidate": of_item[CANDIDATES],
    }
    for name, of_item in (("artist", ARTISTS), ("item", np.arange(NUM_ROWS)))
}
PADDED = np.array([items + [-1] * (LENGTH - len(items)) for items in HISTORIES])
EVENTS = np.concatenate([PADDED, CANDIDATES[:, None]], axis=1)
KERNEL = np.linspace(-1, 1, 2 * DIM * 3, dtype=np.float32).reshape(2 * DIM, 3)


def two_axes(kind):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("a", "b"), axis_types=(kind, kind))


MESHES = list(
    with_ids(
        {
            "explicit": (two_axes(AxisType.Explicit), ("a",)),
        }
    )
)


def layer_on(mesh, batch_axes=None):
    plan = te.make_plan(
        FEATURES, mesh, optimizer=te.optimizers.sgd(1.0), batch_axes=batch_axes
    )
    return te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))


@nnx.jit
def artists_of(layer, batch):
    rows = layer(batch)
    return rows["item"].attribute_rows(rows["artist"])


def loss_of_events(of_items):
    """A loss of the content of all events, and of the candidates."""
    return jnp.sum(of_items["history"] ** 2) + jnp.sum(of_items["candidate"] ** 3)


def dense_loss(tables):
    rows = [tables["item"][EVENTS], tables["artist"][ARTISTS[EVENTS]]]
    content = jnp.tanh(jnp.concatenate(rows, axis=2) @ KERNEL)
    content = jnp.where((EVENTS >= 0)[..., None], content, 0.0)
    return loss_of_events({"history": content[:, :-1], "candidate": content[:, -1]})


@pytest.mark.parametrize(("mesh", "batch_axes"), MESHES)
def test_a_step_equals_that_of_one_row_per_event(mesh, batch_axes):
    layer = layer_on(mesh, batch_axes)
    optimizer = te.Optimizer(layer, optax.sgd(1.0))
    before = {k: jnp.asarray(v) for k, v in layer.embedding_tables().items()}

    @nnx.jit
    def step(layer, optimizer, batch):
        def loss_fn(layer):
            rows = layer(batch)
            items, artists = rows["item"], rows["artist"]
            both = [items.rows, items.attribute_rows(artists)]
            content = jnp.tanh(jnp.concatenate(both, axis=1) @ KERNEL)
            return loss_of_events(items.expand(content))

        loss, gradients = te.value_and_grad(loss_fn)(layer)
        optimizer.update(layer, gradients)
        return loss

    with jax.set_mesh(mesh):
        loss = step(layer, optimizer, layer.prepare(IDS))
        after = layer.embedding_tables()
    wanted, gradients = jax.value_and_grad(dense_loss)(before)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for name, gradient in gradients.items():
        wanted = np.asarray(before[name] - gradient)
        # Tolerance: float32 rounding of the rows' sums over events, of about 10.
        np.testing.assert_allclose(after[name], wanted, rtol=1e-6, atol=2e-6)


def test_the_smallest_of_several_artists_counts_and_none_is_zero():
    layer = layer_on(mesh_of(1))
    artists = np.array([[6, 2], [PADDING_ROW_ID, 3]])
    batch = layer.prepare({"item": np.array([[1, 1], [5, 7]]), "artist": artists})
    found = artists_of(layer, batch)[:3]  # of the items 1, 5 and 7
    table = layer.embedding_tables()["artist"]
    np.testing.assert_array_equal(found, [table[2], np.zeros(DIM), table[3]])


@pytest.mark.parametrize(
    ("artists", "message"),
    [
        ([3, 4], r"has shape \(2, 2\) on 1 device\(s\), and that of .* \(2,\) on 1"),
        ({"history": np.array([[1, 2], [3, 4]])}, r"\{'history': \(2, 2\)\}"),
    ],
)
def test_attributes_in_other_places_are_refused(artists, message):
    layer = layer_on(mesh_of(1))
    batch = layer.prepare({"item": np.array([[1, 2], [3, 4]]), "artist": artists})
    with pytest.raises(ValueError, match=message):
        artists_of(layer, batch)


def test_an_attribute_without_unique_rows_is_refused():
    layer = layer_on(mesh_of(1))
    rows = layer(layer.prepare(IDS))
    with pytest.raises(TypeError, match=r"got an array.*Write items.attribute_rows"):
        rows["item"].attribute_rows(rows["artist"].rows)
