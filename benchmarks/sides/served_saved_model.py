"""This package: the exported SavedModel under TensorFlow, without JAX."""

import os
import pathlib
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np  # noqa: E402
import tensorflow as _tensorflow  # noqa: E402  # pyright: ignore
from settings import ServingSetting  # noqa: E402

tf: Any = _tensorflow  # Its stubs, where found, leave much of it out.


class Side:
    """A server of the SavedModel, with its tables in variables."""

    def __init__(self, setting: ServingSetting):
        self.versions = {"tensorflow": tf.__version__}
        self._setting = setting
        directory = pathlib.Path(setting.directory) / "saved_model"
        self._loaded = tf.saved_model.load(str(directory))

    def load(self, ids: np.ndarray) -> Any:
        """Returns a request."""
        return self._setting.by_feature(ids)

    def forward(self, batch: Any) -> list[np.ndarray]:
        """Serves a request; returns NumPy arrays."""
        outputs = self._loaded({name: tf.constant(ids) for name, ids in batch.items()})
        return [outputs[name].numpy() for name in batch]

    def activations(self, batch: Any) -> np.ndarray:
        """Returns the result of a lookup."""
        return np.stack(self.forward(batch), axis=1)
