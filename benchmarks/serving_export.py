"""Writes the export of a setting that a side of `serving_latency.py` serves.

`serving_latency.py` runs it in the interpreter of the side: only TensorFlow writes a
SavedModel.

    python benchmarks/serving_export.py SETTING FORMAT

`SETTING` is JSON with the fields of `settings.ServingSetting`. The export appears in
its `directory`, in a folder called like the format.
"""

import argparse
import json
import pathlib
from typing import Any, Final

import numpy as np
from flax import nnx
from settings import ServingSetting
from sides.embedding_layer import table_features

import tpu_embedding as te

EXAMPLE_SAMPLES: Final = 3
"""Batch of the example; no other axis is as long, so only that of the batch is free."""

SAVE: Final[dict[str, Any]] = {
    "stablehlo": te.export.save,
    "saved_model": te.export.save_saved_model,
}


def main() -> None:
    """Makes the layer and exports it."""
    parser = argparse.ArgumentParser(description="Writes an export to be served.")
    parser.add_argument("setting", type=json.loads, help="fields of a ServingSetting")
    parser.add_argument("format", choices=SAVE)
    arguments = parser.parse_args()
    setting = ServingSetting(**arguments.setting)
    features = table_features(setting)
    layer = te.TPUEmbedding(features, rngs=nnx.Rngs(0))
    shape = (EXAMPLE_SAMPLES, setting.valence)[: 1 + (setting.valence > 1)]
    example = {name: np.zeros(shape, np.int64) for name in features}
    directory = pathlib.Path(setting.directory) / arguments.format
    SAVE[arguments.format](layer, directory, example, dtype=setting.dtype)


if __name__ == "__main__":
    main()
