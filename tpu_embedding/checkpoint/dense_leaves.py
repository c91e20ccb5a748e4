"""Saves and restores all leaves of a state that are no tables, by orbax.

Random keys are saved as their numbers. Files then hold no type of JAX.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from tpu_embedding.checkpoint.errors import CheckpointError


def check_dtypes(leaves: Mapping[str, Any]) -> None:
    """Refuses leaves of a dtype that no file can hold, such as uint4 or text.

    Args:
      leaves: path to array, shape or number.

    Raises:
      TypeError: if there are any.
    """
    stored = {
        name: leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        for name, leaf in with_elements(leaves).items()
        if not _is_key(leaf)
    }
    wrong = [f"{dtype} at {k!r}" for k, dtype in stored.items() if not _is_known(dtype)]
    if wrong:
        raise TypeError(
            f"Leaves of a state must have dtypes that files can hold, got "
            f"{', '.join(wrong)}. Save numbers as another dtype, such as uint8, and "
            "texts and other JSON values by description=."
        )


def _is_known(dtype: np.dtype) -> bool:
    try:
        ts.dtype(dtype.name)
    except ValueError:
        return False
    return True


def with_elements(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves that are no empty arrays, which orbax refuses to write.

    Args:
      leaves: path to array, shape or number.
    """
    return {name: leaf for name, leaf in leaves.items() if 0 not in np.shape(leaf)}


async def start_writing_leaves(
    handler: ocp.StandardCheckpointHandler,
    directory: epath.Path,
    leaves: Mapping[str, Any],
) -> list[Any]:
    """Copies leaves to the host, and starts to write them.

    Args:
      handler: writes a pytree by Orbax.
      directory: gets the leaves.
      leaves: path to leaf, at least one, all `with_elements`.

    Returns:
      The ends of the writes.
    """
    data = {name: _stored(leaf) for name, leaf in leaves.items()}
    args = ocp.args.StandardSave(unflatten_dict(data, sep="."))
    return await handler.async_save(directory, args=args) or []


def restored_leaves(
    directory: epath.Path, leaves: Mapping[str, Any], sharding: jax.sharding.Sharding
) -> dict[str, Any]:
    """Returns leaves from a directory, with the types and shardings of the given ones.

    Args:
      directory: holds the leaves.
      leaves: path to array, shape or number; the directory may hold others.
      sharding: placement of leaves whose shape has none.

    Raises:
      CheckpointError: if they cannot be read.
    """
    stored = with_elements(leaves)
    empty = {
        name: _empty(leaf, sharding)
        for name, leaf in leaves.items()
        if name not in stored
    }
    if not stored:
        return empty
    targets = {name: _target(leaf, sharding) for name, leaf in stored.items()}
    wanted = unflatten_dict(targets, sep=".")
    args = ocp.args.PyTreeRestore(
        wanted,
        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    handler = ocp.PyTreeCheckpointHandler()
    try:
        read = flatten_dict(handler.restore(directory, args=args), sep=".")
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = str(error).partition("\n")[0]
        raise CheckpointError(
            f"The arrays in {directory} have the right checksums, and orbax cannot "
            f"read them: {type(error).__name__}: {text} Restore with the version of "
            "orbax that saved them, or only the tables by dense='keep'."
        ) from error
    finally:
        handler.close()
    return empty | {name: _leaf(read[name], x) for name, x in stored.items()}


def _empty(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """Returns an array without elements, which the files do not hold."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding or sharding)


def _stored(leaf: Any) -> Any:
    """Returns the array or number of Python that the files hold for a leaf."""
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if not isinstance(data, jax.Array):
        return data
    # Orbax would cut it into as many slices as there are devices, each by a program of
    # its own. One process gains nothing from that.
    if _is_of_process(data) or (data.is_fully_addressable and data.is_fully_replicated):
        return np.array(data)  # A copy: the next step may donate the array.
    return data


def _is_of_process(leaf: Any) -> bool:
    """Returns True for an array of which each of several processes has a copy.

    Such are random keys and parameters that were not put on the devices of all. Orbax
    writes them as arrays of the host only.
    """
    return (
        isinstance(leaf, jax.Array)
        and jax.process_count() > 1
        and leaf.is_fully_addressable
    )


def _target(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """Returns shape, type and sharding of what the files hold for a leaf."""
    if isinstance(leaf, np.generic | np.ndarray | bool | int | float):
        return _stored(leaf)
    if _is_of_process(leaf):
        return _stored(leaf)
    sharding = leaf.sharding or sharding
    if _is_key(leaf):
        if isinstance(leaf, jax.Array):
            sharding = jax.random.key_data(leaf).sharding
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _leaf(value: Any, wanted: Any) -> Any:
    if isinstance(wanted, jax.Array) and not wanted.committed:
        # Such an array may meet arrays of any devices in a program, and so must this.
        value = jnp.asarray(jax.device_get(value))
    elif _is_of_process(wanted) and not _is_key(wanted):
        value = jax.device_put(value, wanted.sharding)
    if _is_key(wanted):
        return jax.random.wrap_key_data(value, impl=_key_impl(wanted))
    if isinstance(wanted, np.generic):
        return wanted.dtype.type(value)
    if isinstance(wanted, bool | int | float):
        return type(wanted)(value)
    return value


def _key_impl(leaf: Any) -> Any:
    """Returns the generator of a random key, or of its shape."""
    impls = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
    return impls[0]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
