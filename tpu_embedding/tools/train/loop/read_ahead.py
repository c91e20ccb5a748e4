"""Keeps the devices busy: checks, prepares and transfers the next batch early."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Final

import jax

from tpu_embedding.inputs.agreed_sizes import abandon_agreement
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import (
    Samples,
    global_shapes,
    num_parts_of,
    prepare_features,
    shard_batch,
)
from tpu_embedding.inputs.shard_inputs import feature_shape
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.jobs.stop_signals import StopRequest
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset
from tpu_embedding.tools.train.loop.loaders import BatchReader
from tpu_embedding.tools.train.loop.step_meter import InputWait
from tpu_embedding.types import UniqueIds

_POLL_SECONDS: Final = 0.1
"""Time after which a loop that waits for a batch looks for signals again."""

_DEVICE_POLL_SECONDS: Final = 0.001
"""Time after which it looks again for the end of the step in flight."""


def train_batches(
    data: CheckedDataset,
    plan: EmbeddingPlan,
    steps: range,
    sizes: BufferSizes | None = None,
    stop: StopRequest | None = None,
    *,
    num_processes: int = 0,
    input_wait: InputWait | None = None,
) -> Generator[tuple[int, Batch], None, None]:
    """Yields each step's number and its batch on the devices.

    A thread prepares the next batch and puts it on the devices while the caller uses
    the current one. The thread reads it, too, or loader processes do, further ahead. In
    a job of several processes, each reads the samples of its own devices only.

    Args:
      data: data set.
      plan: plan of the embedding layer.
      steps: numbers of the steps, from 0.
      sizes: buffer sizes of ragged features, which only the thread uses.
      stop: request that ends the batches, even while the next one is prepared.
      num_processes: loader processes; 0 reads in the thread.
      input_wait: clock that runs while the caller waits and the devices are idle.

    Raises:
      ConfigError: if the data set cannot be sent to loader processes.
      DataError: if the data are damaged, or ids lie outside their tables.
      ChildProcessError: if a loader process ended.
    """
    part = _part_of_process(data.batch_size, plan)
    reader = BatchReader(data, part or range(data.batch_size), steps, num_processes)

    def make(step: int) -> Batch:
        owner = f"Training batch {step}"
        batch = reader.read(step)
        if part is None:
            return put_batch(batch, plan, owner, sizes)
        owner = f"{owner}, samples {part.start} to {part.stop - 1}"
        return put_batch(batch, plan, owner, sizes, samples="process")

    stop = stop or StopRequest()
    input_wait = input_wait or InputWait()
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    ahead = [thread.submit(make, step) for step in steps[:1]]
    try:
        for step in steps:
            batch = ahead.pop()
            if step != steps[-1]:
                ahead.append(thread.submit(make, step + 1))
            if not _is_ready(batch, step, stop, input_wait):
                return
            yield step, batch.result()
    finally:
        for batch in ahead:
            batch.cancel()
        if ahead and sizes is not None:
            abandon_agreement(sizes)
        thread.submit(reader.close)
        # A run that stops saves its state first; the batch in progress may take long.
        thread.shutdown(wait=not stop.requested)


def _part_of_process(batch_size: int, plan: EmbeddingPlan) -> range | None:
    """Returns the samples that this process loads; None if all processes load all."""
    part = plan.process_samples(batch_size)
    has_shapes = any(f.config.output_shape is not None for f in plan.inputs)
    return None if has_shapes or len(part) == batch_size else part


def _is_ready(
    batch: Future[Batch], step: int, stop: StopRequest, input_wait: InputWait
) -> bool:
    """Waits for a batch; returns False if the run stops before its step."""
    while not _is_done(batch, input_wait):
        if stop.is_decided(step):
            return False
    input_wait.stop()
    return not stop.reached(step)


def _is_done(batch: Future[Batch], input_wait: InputWait) -> bool:
    """Waits for a batch, `_POLL_SECONDS` at most; returns True if it is there."""
    end = time.monotonic() + _POLL_SECONDS
    while (seconds := end - time.monotonic()) > 0:
        if not input_wait.poll():
            seconds = min(seconds, _DEVICE_POLL_SECONDS)
        if concurrent.futures.wait([batch], timeout=seconds).done:
            return True
    return False


def put_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    owner: str,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Batch:
    """Prepares a batch, and transfers it to the devices; see `prepare_batch`."""
    prepared = prepare_batch(batch, plan, owner, sizes, samples=samples)
    return shard_batch(prepared, plan, samples=samples)


def prepare_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    owner: str,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Batch:
    """Checks a batch on the host, and gives it static shapes.

    Args:
      batch: the batch on the host.
      plan: plan of the embedding layer.
      owner: name of the batch, for errors.
      sizes: buffer sizes of ragged features; None: each batch has its own.
      samples: samples of the batch, as in `prepare_features`.

    Raises:
      DataError: if the features do not match the plan or the labels, or ids lie outside
        their tables. The message starts with the owner.
    """
    try:
        plan.flatten_inputs(batch.features)  # Refuses a batch without all features.
        features = prepare_features(batch.features, plan, sizes=sizes, samples=samples)
    except (TypeError, ValueError) as error:
        raise DataError(f"{owner}: {error}") from error
    prepared = dataclasses.replace(batch, features=features)
    shapes = global_shapes(prepared, num_parts_of(samples, plan))
    size = shapes.labels.shape[0]
    leaves = plan.flatten_inputs(shapes.features)
    for feature, ids in zip(plan.inputs, leaves, strict=True):
        if isinstance(ids, UniqueIds):
            num_samples = jax.tree.leaves(ids.index)[0].shape[0]
        else:
            num_samples = feature_shape(ids, feature, plan).output_shape[0]
        if feature.config.output_shape is None and num_samples != size:
            raise DataError(
                f"{owner}: the feature {feature.name!r} must have {size} samples, as "
                f"many as the labels, got {num_samples}."
            )
    return prepared
