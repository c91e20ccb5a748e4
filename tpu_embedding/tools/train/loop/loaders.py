"""Reads training batches ahead of the loop, in this process or in others, by grain.

grain runs the processes, moves arrays through shared memory and keeps the order. Its
element is one step's samples, never one sample. Batches are pure functions of the step,
so there is no state of the readers to save: a resumed run starts at its step.

Processes share the work in one of two ways. A data set with a method `train_part` lets
each process read its share of every batch, so blocks of a file are read by one process
only. Otherwise each process reads whole batches in turn.
"""

import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, Final

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.jobs.stop_signals import STOP_SIGNALS
from tpu_embedding.tools.train.errors import ConfigError, describe_error
from tpu_embedding.tools.train.loop.batch_joining import join_batches
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset

READ_AHEAD: Final = 2
"""Batches that a loader process holds ready, beside the one that it reads."""


class BatchReader:
    """Reads one process's samples of the training batches, step by step."""

    def __init__(
        self, data: CheckedDataset, samples: range, steps: range, num_processes: int
    ):
        """Starts the loader processes, if there are any.

        Args:
          data: data set, which is sent to the processes.
          samples: positions in each global batch that this process feeds.
          steps: steps that will be read, in order.
          num_processes: loader processes, which run ahead; 0 reads in the calling
            thread.

        Raises:
          ConfigError: if grain is needed, and not installed.
        """
        self._data = data
        self._samples = samples
        self._streams = []
        if num_processes and data.reads_parts:
            shares = split_samples(samples, num_processes)
            self._streams = [_start(data, share, steps, 1) for share in shares]
        elif num_processes:
            self._streams = [_start(data, samples, steps, num_processes)]

    def read(self, step: int) -> Batch:
        """Returns the samples of a step; steps come in order.

        Raises:
          ConfigError: if the data set cannot be sent to the processes.
          DataError: if the data are damaged.
          ChildProcessError: if a process ended.
        """
        if not self._streams:
            return self._data.train_part(step, self._samples)
        try:
            return join_batches([next(stream) for stream in self._streams])
        except (DataError, ConfigError, MemoryError):
            raise
        except RuntimeError as error:  # grain has no error of its own for it.
            raise ChildProcessError(
                f"a loader process ended before it had read step {step}: {error} The "
                "machine may be out of memory; lower RunConfig.loader_processes."
            ) from error
        except Exception as error:  # The code of the data set raises no other.
            raise ConfigError(
                f"{type(self._data.data).__name__} cannot be sent to loader "
                f"processes: {describe_error(error)}. They need a copy made by pickle; "
                "define __getstate__ to leave open files out, or set "
                "RunConfig.loader_processes to 0."
            ) from error

    def close(self) -> None:
        """Ends the processes."""
        for stream in self._streams:
            stream.close()
        self._streams = []  # grain complains about an iterator that outlives it.


def split_samples(samples: range, num_parts: int) -> list[range]:
    """Splits a range into parts of nearly equal length, none of which is empty.

    Example:
      >>> split_samples(range(10, 15), 3)
      [range(10, 12), range(12, 14), range(14, 15)]
    """
    num_parts = min(num_parts, len(samples))
    size, extra = divmod(len(samples), num_parts)
    edges = [samples.start + i * size + min(i, extra) for i in range(num_parts + 1)]
    return [range(*edge) for edge in zip(edges[:-1], edges[1:], strict=True)]


def _start(
    data: CheckedDataset, samples: range, steps: range, num_processes: int
) -> Any:
    """Returns an iterator of grain over some samples of each step."""
    grain, cloudpickle = load_grain()
    module = sys.modules.get(type(data.data).__module__)
    if module is not None and module.__spec__ is None:
        # The file of a config, which a process cannot import by name.
        cloudpickle.register_pickle_by_value(module)
    options = grain.MultiprocessingOptions(
        num_workers=num_processes, per_worker_buffer_size=READ_AHEAD
    )
    start = functools.partial(_start_process, _search_path(module))
    return iter(
        grain.MapDataset.range(steps.start, steps.stop)
        .map(lambda step: data.train_part(int(step), samples))
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .mp_prefetch(options, worker_init_fn=start)
    )


def _start_process(search_path: Sequence[str], index: int, count: int) -> None:
    """Prepares a loader process, before it receives the data set."""
    del index, count
    sys.path[:] = search_path
    # Ctrl-C and a lost terminal reach all processes of the terminal, and Slurm's
    # SIGTERM all of a job. The parent decides what they mean: it still reads batches
    # until it stops.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _search_path(module: types.ModuleType | None) -> list[str]:
    """Returns the folders of modules, that of a data set's module included."""
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return list(sys.path)
    folder = pathlib.Path(file).resolve().parents[module.__name__.count(".")]
    return [*sys.path, str(folder)]


def load_grain() -> tuple[Any, Any]:
    """Returns the modules grain and cloudpickle, by which grain pickles.

    Raises:
      ConfigError: if grain is not installed.
    """
    try:
        import cloudpickle
        import grain
        from absl import flags
    except ImportError as error:
        raise ConfigError(
            "RunConfig.loader_processes needs grain, which is not installed. Install "
            "tpu-embedding with its extra `train`: pip install 'tpu-embedding[train]', "
            "or set loader_processes=0."
        ) from error
    if not flags.FLAGS.is_parsed():  # grain reads its flags, which nobody sets here.
        flags.FLAGS.mark_as_parsed()
    return grain, cloudpickle
