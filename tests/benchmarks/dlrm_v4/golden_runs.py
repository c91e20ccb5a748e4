"""Compares modules with runs of MLPerf's reference of `dlrm_v4_hstu`.

The files in `tests/golden/dlrm_v4` hold weights, inputs, cotangents, outputs and
gradients of the PyTorch reference in float32. Samples follow each other there;
here they are padded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.conftest import GOLDEN

# Errors relative to the largest value of an array. A float64 program that follows the
# formulas is off by up to 5e-7 and 1.6e-6, and its float32 form by up to 7e-6.
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5


@functools.cache
def golden(name):
    with np.load(GOLDEN / "dlrm_v4" / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def under(arrays, prefix):
    """Returns the arrays whose names start with a prefix, by the rest of the name."""
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def with_weights(module, weights, name_of=lambda name: name):
    """Returns the module with the weights of a file, by their names there."""
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        array = weights[name_of(".".join(map(str, path)))]
        assert variable.shape == array.shape
        variable.set_value(jnp.asarray(array))
    return module


def golden_name(path):
    """Returns the name in the file of a weight of `HSTU`."""
    module, _, rest = path.partition(".")
    if module == "layers":
        return f"stu{rest}"
    if module in ("token_encoder", "position_encoder"):
        return rest
    return {"user_encoder": "post"}.get(module, module) + f".{rest}"


def run(function, module, inputs, cotangents, name_of=lambda name: name):
    """Returns outputs, and gradients by inputs and weights, as dicts by name.

    Args:
        function: `(module, inputs) -> outputs`, of dicts of arrays.
        module: Module with the weights.
        inputs: Float arrays by name.
        cotangents: Derivatives by the outputs, by name; others have none.
        name_of: Name of a weight in the file, given its path.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def outputs_and_gradients(params, inputs, cotangents):
        def outputs_of(params, inputs):
            return function(nnx.merge(graph, params, rest), inputs)

        outputs, pull_back = jax.vjp(outputs_of, params, inputs)
        zeros = jax.tree.map(jnp.zeros_like, outputs)
        return outputs, pull_back(zeros | cotangents)

    cotangents = {name: jnp.asarray(array) for name, array in cotangents.items()}
    outputs, (by_params, by_inputs) = outputs_and_gradients(params, inputs, cotangents)
    by_weights = {
        name_of(".".join(map(str, path))): variable.get_value()
        for path, variable in nnx.to_flat_state(by_params)
    }
    return outputs, by_inputs | by_weights


def error(got, wanted):
    """Returns the largest difference relative to the largest wanted value."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    return np.max(np.abs(got - wanted)) / np.max(np.abs(wanted))


def check(got, wanted, tolerance):
    """Checks that the wanted arrays are there, and within the tolerance."""
    assert set(got) >= set(wanted), set(wanted) - set(got)
    errors = {name: error(got[name], array) for name, array in wanted.items()}
    worst = max(errors, key=errors.get)
    print(f"largest error {errors[worst]:.1e} in {worst}")  # shown by `pytest -rP`
    assert errors[worst] <= tolerance, errors


def pad(values, lengths, width=None):
    """Returns `[batch, width, ...]` from samples that follow each other."""
    return jnp.take(values, places(lengths, width), axis=0, mode="fill", fill_value=0)


def places(lengths, width=None):
    """Returns the index of each padded place among all; their number at padding."""
    width = max(lengths) if width is None else width
    index = (np.cumsum(lengths) - lengths)[:, None] + np.arange(width)
    return np.where(np.arange(width) < lengths[:, None], index, sum(lengths))
