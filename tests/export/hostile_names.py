"""Random models whose features, tables and attributes have hostile names."""

import dataclasses
import random

import jax.numpy as jnp
import numpy as np
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

NAMES = (
    *("w", "w/values", "w/row_splits", "w/weights", "w/ids", "w_values", "w/", "/w"),
    *("w%2Fvalues", "%", "%2F", "/", "//", "a/b", "a b", "a.b", "a_b", "a\\b", "a\nb"),
    *(".", "..", "../a", "~", "-", ":", "t", "t:ids", "_x", "__x", "x_", "$(x)"),
    *("é", "e\u0301", "年齢", "年/齢", "😀", "\0", "a" * 90, "é" * 90),
    *("features", "output", "self", "inputs", "batch", "places", "values", "ids"),
    *("__metadata__", "\ud800"),
)
"""Names of features, tables, attributes and dense inputs."""

KINDS = ("dense", "weighted", "ragged", "weighted_ragged", "array")
ROWS, DIM, BATCH = 7, 2, 3
TRACKED = te.optimizers.track_touched_rows(te.optimizers.sgd(0.1))


@dataclasses.dataclass(frozen=True)
class Names:
    """The names in a model.

    Attributes:
      layers: attribute to names of features of each layer; each feature has a table.
      tables: name of a feature to the name of its table in its layer.
      kinds: name of an input to one of `KINDS`.
      nested: names of inputs that are split at their slashes into dicts of dicts.
    """

    layers: dict[str, list[str]]
    tables: dict[str, str]
    kinds: dict[str, str]
    nested: frozenset[str]

    @classmethod
    def of_seed(cls, seed):
        draw = random.Random(seed)
        family = [name for name in NAMES if name.startswith(("w", "a", "t"))]
        pool = draw.choice([family, NAMES])
        inputs = draw.sample(pool, draw.choice([1, 2, 3]))
        kinds = {name: draw.choice(KINDS) for name in inputs}
        kinds[inputs[0]] = draw.choice(KINDS[:-1])
        features = [name for name in inputs if kinds[name] != "array"]
        attributes = draw.sample(NAMES, draw.choice([1, 2]))
        layers = {k: features[i :: len(attributes)] for i, k in enumerate(attributes)}
        layers = {k: found for k, found in layers.items() if found}
        names = draw.sample(NAMES, len(features))
        nested = frozenset(x for x in inputs if "/" in x and draw.random() < 0.3)
        return cls(layers, dict(zip(features, names, strict=True)), kinds, nested)

    def all(self):
        return {*self.layers, *self.tables, *self.tables.values(), *self.kinds}

    def batch(self, seed):
        """Returns the inputs by name, and what the model gives for each."""
        draw = np.random.default_rng(seed)
        return {k: leaf_of(kind, draw) for k, kind in self.kinds.items()}

    def nest(self, batch):
        """Returns the inputs as the model takes them."""
        nest = {}
        for name, leaf in batch.items():
            *outer, last = name.split("/") if name in self.nested else [name]
            place = nest
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = leaf
        return nest

    def leaf(self, nest, name):
        for key in name.split("/") if name in self.nested else [name]:
            nest = nest[key]
        return nest


def leaf_of(kind, draw):
    if kind == "array":
        return draw.standard_normal((BATCH, DIM)).astype(np.float32)
    ids = draw.integers(0, ROWS, (BATCH, DIM))
    weights = draw.uniform(0.5, 1.5, ids.shape).astype(np.float32)
    if kind == "dense":
        return ids
    if kind == "weighted":
        return te.DenseIds(ids=ids, weights=weights)
    weights = weights.tolist() if kind == "weighted_ragged" else None
    return te.RaggedIds.from_lists(ids.tolist(), weights)


class Named(nnx.Module):
    """Looks up all features, and multiplies all other inputs by a parameter of each."""

    def __init__(self, names, rngs):
        self.names = names
        self.layers = nnx.Dict(
            {k: layer_of(names, found, rngs) for k, found in names.layers.items()}
        )
        arrays = [name for name, kind in names.kinds.items() if kind == "array"]
        scales = {name: nnx.Param(jnp.float32(i + 2)) for i, name in enumerate(arrays)}
        self.scales = nnx.Dict(scales)

    def __call__(self, features):
        outputs = {}
        for attribute, found in self.names.layers.items():
            leaves = {name: self.names.leaf(features, name) for name in found}
            outputs |= self.layers[attribute](leaves)
        for name, scale in self.scales.items():
            outputs[name] = self.names.leaf(features, name) * scale
        return outputs

    def expected(self, batch):
        """Returns the outputs, computed by NumPy."""
        outputs = {k: batch[k] * scale.get_value() for k, scale in self.scales.items()}
        for attribute, found in self.names.layers.items():
            tables = self.layers[attribute].embedding_tables()
            for name in found:
                leaf, table = batch[name], tables[self.names.tables[name]]
                ids = getattr(leaf, "values", getattr(leaf, "ids", leaf))
                rows = table[np.reshape(ids, (BATCH, DIM))]
                weights = getattr(leaf, "weights", None)
                if weights is not None:
                    rows = rows * np.reshape(weights, (BATCH, DIM, 1))
                outputs[name] = rows.sum(axis=1)
        return outputs


def layer_of(names, features, rngs):
    """Returns a layer with one table for each of some features."""
    config = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=ROWS, dim=DIM, combiner="sum", name=names.tables[name]
            )
        )
        for name in features
    }
    return te.TPUEmbedding(config, TRACKED, mesh=mesh_of(1), rngs=rngs)


def check_random_exports(seeds, directory, save, call):
    """Exports a model for each seed, and compares its outputs with NumPy's.

    Args:
      seeds: seeds of the names.
      directory: empty directory.
      save: `te.export.save` or a function like it.
      call: `(path, nest) -> outputs`; calls an export with a nest of inputs.
    """

    def check(names, model, path):
        save(model, path, names.nest(names.batch(0)))
        batch = names.batch(1)
        outputs, expected = call(path, names.nest(batch)), model.expected(batch)
        assert set(outputs) == set(expected)
        for name, values in expected.items():
            # Sums of two products in another order.
            np.testing.assert_allclose(outputs[name], values, rtol=1e-6)

    check_each(seeds, directory, check)


def check_each(seeds, directory, check):
    """Calls `check(names, model, path)` for each seed: it passes, or refuses the names.

    A refusal holds one of the names, and leaves no file. At most a fifth are refused.
    """
    num_refused = 0
    for seed in seeds:
        names, path = Names.of_seed(seed), directory / str(seed)
        try:
            check(names, Named(names, nnx.Rngs(seed)), path)
        except ValueError as error:
            num_refused += 1
            is_ours = isinstance(error, te.export.ExportError)
            assert is_ours or "Config.name must be" in str(error), error
            assert any(repr(name)[1:-1] in str(error) for name in names.all()), error
            assert not path.exists()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {names}") from error
    assert num_refused <= len(seeds) / 5
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]
