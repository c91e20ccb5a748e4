"""Optimizers of TensorFlow whose update formula is not public."""

from typing import Any, NoReturn


def mdl_adagrad_light(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses TensorFlow's MDL Adagrad Light, because its update is not published.

    Raises:
      NotImplementedError: always, with the reason and what to use instead.

    Example:
      >>> mdl_adagrad_light(0.1)
      Traceback (most recent call last):
      NotImplementedError: ...
    """
    del args, kwargs
    raise NotImplementedError(
        "mdl_adagrad_light is not available, because its update formula is not public. "
        "TensorFlow's MdlAdagradLightParameters has twelve fields, but neither "
        "TensorFlow nor the paper that it cites states the update formula (Shamir, "
        "'Minimum Description Length (MDL) Regularization for Online Learning', 2015). "
        "Use tpu_embedding.optimizers.adagrad or rowwise_adagrad."
    )
