"""Optimizers of TensorFlow that are known by name only."""

from typing import Any, NoReturn


def mdl_adagrad_light(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses TensorFlow's MDL Adagrad Light, whose update is not published.

    Raises:
      NotImplementedError: always, with the reason and what to use instead.

    Example:
      >>> mdl_adagrad_light(0.1)
      Traceback (most recent call last):
      NotImplementedError: ...
    """
    del args, kwargs
    raise NotImplementedError(
        "MDL Adagrad Light is not available: TensorFlow's MdlAdagradLightParameters "
        "names twelve fields, but neither TensorFlow nor the paper that it cites "
        "(Shamir, 'Minimum Description Length (MDL) Regularization for Online "
        "Learning', 2015) states the update formula, and a guess would train "
        "something else under its name. Use tpu_embedding.optimizers.adagrad or "
        "rowwise_adagrad."
    )
