"""A process that saves states to one path, one after the other, until it is killed.

    python -m tests.checkpoint.overwriting_worker DIRECTORY

All values of a state are the number of its save. Run by `test_concurrent_saves.py`.
"""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import tpu_embedding as te


@functools.cache
def plan():
    features = {
        # Tables of different dims lie in stacks of their own.
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=2000, dim=dim, name=name)
        )
        for name, dim in {"a": 8, "b": 16, "c": 24, "d": 32}.items()
    }
    return te.make_plan(features, Mesh(np.asarray(jax.devices()[:1]), ("shard",)))


@functools.cache
def _shapes():
    tables = jax.eval_shape(te.functional.init_tables, plan(), jax.random.key(0))
    return {"tables": tables, "dense": jax.ShapeDtypeStruct((1000,), np.float32)}


def _state_of(number):
    return jax.tree.map(lambda x: jnp.full(x.shape, number, x.dtype), _shapes())


def restored_numbers(directory):
    """Restores a state, and returns the numbers of the saves that it comes from."""
    state = te.restore(directory, _shapes(), plan=plan())
    tables = te.functional.unstack_tables(state["tables"], plan())
    values = [*tables.values(), state["dense"]]
    return {float(number) for each in values for number in np.unique(each)}


def save(directory, number):
    """Saves a state, in place of an earlier one; returns the refusal, if any."""
    try:
        te.save(directory, _state_of(number), plan=plan(), overwrite=True)
    except te.checkpoint.CheckpointError as error:
        return str(error)
    return ""


def main(directory):
    for number in itertools.count(1):
        save(directory, number)


if __name__ == "__main__":
    main(sys.argv[1])
