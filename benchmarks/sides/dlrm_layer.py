"""This package: a run config's model, fed by the pipeline of the training loop."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from settings import DlrmSetting

import tpu_embedding as te
from tpu_embedding.tools import train
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.train.loop.read_ahead import put_batch, train_batches
from tpu_embedding.tools.train.loop.run_program import prepare_run


class Side:
    """A training of the config; `train` prepares batches in a thread."""

    def __init__(self, setting: DlrmSetting):
        self.versions = {"tpu_embedding": te.__version__, "jax": jax.__version__}
        config = train.load_config(setting.config)
        self._program = program = prepare_run(config, None)
        graphdef, self._state = train.init_train_state(
            config, program.data.data, program.plan
        )
        self._graphdef = graphdef
        model, _ = nnx.merge(graphdef, self._state)
        parameters: dict[str, Any] = _parameters(model)
        np.savez(setting.parameters_file, **parameters)
        self._predict = jax.jit(_predict, static_argnums=0)

    def load(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns the batch as it is: preparation is part of the work."""
        return batch

    def train(self, *batches: dict[str, np.ndarray]) -> None:
        """Runs a step on each batch."""
        program = self._program
        data: Any = _Batches(batches)  # The part of a `Dataset` that is called.
        steps = range(len(batches))
        pipeline = train_batches(data, program.plan, steps, program.train_sizes)
        for _, batch in pipeline:
            self._state, _ = program.train_step(self._state, batch)
        jax.block_until_ready(self._state)

    def activations(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """Returns the logits."""
        on_device = put_batch(_to_batch(batch), self._program.plan, "Batch")
        return np.asarray(self._predict(self._graphdef, self._state, on_device))


class _Batches:
    """Batches in memory, as the data set of a training."""

    def __init__(self, batches: tuple[dict[str, np.ndarray], ...]):
        self._batches = batches
        self.batch_size = len(batches[0]["labels"])

    def train_part(self, step: int, samples: range) -> train.Batch:
        assert len(samples) == self.batch_size
        return _to_batch(self._batches[step])


def _to_batch(arrays: dict[str, np.ndarray]) -> train.Batch:
    return train.Batch(
        features=dict(zip(CATEGORY_NAMES, arrays["ids"], strict=True)),
        dense=arrays["dense"],
        labels=arrays["labels"],
        weights=np.ones_like(arrays["labels"]),
    )


def _predict(graphdef: Any, state: Any, batch: train.Batch) -> jax.Array:
    model, _ = nnx.merge(graphdef, state)
    return model(batch.features, batch.dense).scores


def _parameters(model: Any) -> dict[str, np.ndarray]:
    """Returns the tables, in the order of the features, and both MLPs."""
    layer = model.embedding
    values = te.functional.unstack_tables(layer.tables.get_value(), layer.plan)
    parameters = {f"table.{i:02d}": values[n] for i, n in enumerate(CATEGORY_NAMES)}
    for name in ("bottom", "top"):
        layers = getattr(model, name).layers.layers
        linear = [each for each in layers if isinstance(each, nnx.Linear)]
        for i, each in enumerate(linear):
            assert each.bias is not None
            parameters[f"{name}.{i}.kernel"] = np.asarray(each.kernel.get_value())
            parameters[f"{name}.{i}.bias"] = np.asarray(each.bias.get_value())
    return parameters
