"""Lets the processes of a job agree on the sizes of ragged features.

Each process knows the ids of its own samples only. If two chose different sizes, they
would compile different programs and wait for each other for ever. So they exchange
their demands for each batch, and choose from the same ones. The exchange takes some
milliseconds of the thread that loads batches, and no device.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

from tpu_embedding import distributed
from tpu_embedding.inputs.buffer_sizes import BufferSizes, RaggedDemand, size_of_batch

_numbers: weakref.WeakKeyDictionary[BufferSizes, int] = weakref.WeakKeyDictionary()
_new_numbers = itertools.count(1)


def choose_sizes(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None, num_parts: int
) -> list[int]:
    """Returns the ids per shard of the buffer of each ragged feature of a batch.

    Args:
      demands: demands of all ragged features of this process's part of the batch.
      sizes: remembers the sizes of earlier batches; None: each batch has its own.
      num_parts: parts of the batch that different processes pass; 1: all pass it whole.
    """
    if num_parts > 1 and demands:
        demands = _agreed(demands, sizes)
    if sizes is None:
        return [size_of_batch(demand) for demand in demands]
    return sizes.choose(demands)


def _agreed(
    demands: Sequence[RaggedDemand], sizes: BufferSizes | None
) -> list[RaggedDemand]:
    """Returns the demands of all processes together, for the same batch.

    Args:
      demands: demands of all ragged features of this process's part.
      sizes: whose history the demands enter. Processes use the objects of a program in
        the same order.

    Raises:
      RuntimeError: in a process that has no part in the job, such as a loader's.
      ValueError: if the processes have different features or numbers of samples.
    """
    if distributed.num_processes() == 1:
        raise RuntimeError(
            "Ragged features with samples='process' are prepared in the process that "
            "trains, because all processes agree on their sizes, and this one is a "
            "loader process; send it ids, and prepare them where they arrive."
        )
    of_processes = distributed.exchange(
        _name_of(sizes), [dataclasses.asdict(demand) for demand in demands]
    )
    return [RaggedDemand(**demand) for demand in _merge(of_processes)]


def _name_of(sizes: BufferSizes | None) -> str:
    if sizes is not None and sizes not in _numbers:
        _numbers[sizes] = next(_new_numbers)
    return f"sizes of ragged features {0 if sizes is None else _numbers[sizes]}"


def _merge(demands: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Joins the demands of all processes."""
    fixed = [
        [(each["feature_name"], each["samples_per_shard"]) for each in of_process]
        for of_process in demands
    ]
    for process, of_process in enumerate(fixed):
        if of_process != fixed[0]:
            raise ValueError(
                "All processes must have the same ragged features and numbers of "
                f"samples per device, got {dict(fixed[0])} on process 0 and "
                f"{dict(of_process)} on process {process}."
            )
    return [
        same[0]
        | {"num_ids": max(each["num_ids"] for each in same)}
        | {
            name: sum(each[name] for each in same)
            for name in ("num_samples", "valence_sum", "valence_square_sum")
        }
        for same in zip(*demands, strict=True)
    ]
