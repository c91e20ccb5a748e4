"""Feeds the devices: reads, prepares and transfers batches ahead of the loop."""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import Samples, prepare_features, shard_batch
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.batch import Batch, DataError, Dataset
from tpu_embedding.tools.train.config import RunConfig
from tpu_embedding.tools.train.metrics import LOSSES
from tpu_embedding.tools.train.models.model import ModelConfig

READ_AHEAD: Final = 2
"""Batches that are prepared, or on the devices, before the loop asks for them."""


def train_batches(
    config: RunConfig,
    data: Dataset,
    plan: EmbeddingPlan,
    steps: range,
    sizes: BufferSizes | None = None,
) -> Generator[tuple[int, Batch, Any], None, None]:
    """Yields each step's number, its batch on the devices, and the buffer sizes so far.

    A thread prepares the next batches while the caller uses the current one. In a job
    of several processes, each one reads the samples of its own devices if the data set
    has a method `train_part`, and whole batches otherwise.

    Args:
      config: config of the run.
      data: opened data set.
      plan: plan of the embedding layer.
      steps: numbers of the steps, from 0.
      sizes: buffer sizes after the steps before; None starts with the first batch.

    Yields:
      Number of the step; its batch; and `BufferSizes.to_json` after that batch, which a
      checkpoint keeps, as batches are prepared ahead.

    Raises:
      DataError: if the data are damaged, or ids lie outside their tables.
    """
    of_process, sizes = plan.process_samples(config.batch_size), sizes or BufferSizes()
    has_shapes = any(
        f.config.output_shape is not None and not f.config.has_own_batch
        for f in plan.features
    )
    is_split = len(of_process) < config.batch_size and not has_shapes
    # A method of the data set that reads a part of a batch without the rest.
    read_part = getattr(data, "train_part", None) if is_split else None

    def make(step: int) -> tuple[Batch, Any]:
        if read_part is None:
            batch, samples = data.train_batch(step), "global"
        else:
            batch, samples = read_part(step, of_process), "process"
        check_values(batch, config, f"Training batch {step}")
        options = {"samples": samples, "model": config.model}
        prepared = prepare_batch(batch, plan, sizes, **options)
        return shard_batch(prepared, plan, samples=samples), sizes.to_json()

    for step, (batch, sizes_so_far) in _ahead(make, steps):
        yield step, batch, sizes_so_far


def _ahead(
    make: Callable[[int], Any], steps: Sequence[int]
) -> Generator[tuple[int, Any], None, None]:
    """Yields the results of a function in order; a thread makes the next one."""
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    pending: collections.deque[Any] = collections.deque()
    try:
        for step in steps:
            pending.append((step, thread.submit(make, step)))
            if len(pending) > READ_AHEAD:
                first, made = pending.popleft()
                yield first, made.result()
        for step, made in pending:
            yield step, made.result()
    finally:
        # Several processes prepare the same batches, as they agree on their sizes.
        thread.shutdown(cancel_futures=jax.process_count() == 1)


def prepare_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
    model: ModelConfig | None = None,
) -> Batch:
    """Returns a batch on the host with static shapes, as the steps take it.

    Labels, weights and dense inputs become float32, and integers in a dict of dense
    inputs int32.

    Args:
      batch: batch of a data set.
      plan: plan of the embedding layer.
      sizes: buffer sizes of ragged features. None gives the batch its own.
      samples: samples of the batch, as in `prepare_features`.
      model: config of the model, which may change the batch; see `ModelConfig`.

    Raises:
      DataError: if the features do not match the plan, or ids lie outside their tables.
    """
    try:
        with_inputs = getattr(model, "with_inputs", None)
        if with_inputs is not None:
            batch = with_inputs(batch, plan, sizes, samples=samples)
        features = prepare_features(batch.features, plan, sizes=sizes, samples=samples)
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from error
    dense = batch.dense
    if isinstance(dense, Mapping):
        dense = {name: _narrow(array) for name, array in dense.items()}
    elif dense is not None:
        dense = np.asarray(dense, np.float32)
    return dataclasses.replace(
        batch,
        features=features,
        dense=dense,
        labels=np.asarray(batch.labels, np.float32),
        weights=np.asarray(batch.weights, np.float32),
    )


def _narrow(array: Any) -> np.ndarray:
    """Returns an array of int32 if it has integers, else of float32."""
    array = np.asarray(array)
    return array.astype(np.int32 if array.dtype.kind in "iu" else np.float32)


def check_values(batch: Batch, config: RunConfig, owner: str) -> None:
    """Rejects labels and weights for which the loss has no meaning.

    A label of 4 under `log_loss`, for example, has a loss without a lower bound.

    Raises:
      DataError: names the batch, and the sample by its place in it.
    """
    label_range = LOSSES[config.loss].label_range or (-np.inf, np.inf)
    for name, values, (low, high) in (
        ("labels", np.asarray(batch.labels), label_range),
        ("weights", np.asarray(batch.weights), (0.0, np.inf)),
    ):
        is_wrong = ~(np.isfinite(values) & (values >= low) & (values <= high))
        if not is_wrong.any():
            continue
        sample = int(np.argmax(is_wrong))
        raise DataError(
            f"{owner}: {name} must be finite and in [{low:g}, {high:g}] for the "
            f"loss {config.loss!r}, got {values[sample]:g} for sample {sample}."
        )
