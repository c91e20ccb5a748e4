"""All functions that write an export, as functions of its path."""

import numpy as np
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

BATCH = {"movie": np.zeros((2, 3), np.int32)}


def layer_of(value, num_rows=9):
    """Returns a layer whose rows are all the same number."""
    table = te.TableConfig(
        vocabulary_size=num_rows,
        dim=8,
        initializer=te.initializers.constant(value),
        name="movie",
    )
    features = {"movie": te.FeatureConfig(table=table)}
    return te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def writers_of(directory, value, num_rows=9):
    """Returns a function per way to write a path; some read exports made here."""
    layers = [layer_of(x, num_rows) for x in (value, value + 1)]
    old, new, delta = (directory / f"{name}{value}" for name in ("old", "new", "delta"))
    te.export.save_tables(layers[0], old)
    te.export.save_tables(layers[1], new)
    te.export.save_delta(new, old, delta)
    return {
        "save": lambda path: te.export.save(layers[1], path, BATCH),
        "save_tables": lambda path: te.export.save_tables(layers[1], path),
        "save_delta": lambda path: te.export.save_delta(new, old, path),
        "apply_delta": lambda path: te.export.apply_delta(old, delta, path),
    }


WRITERS = ("save", "save_tables", "save_delta", "apply_delta")
