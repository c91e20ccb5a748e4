"""Tests loader processes: equal batches, errors with their place, lost processes."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest
from jax._src import xla_bridge

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.jobs.stop_signals import STOP_SIGNALS
from tpu_embedding.tools.train import RunConfig, load_config
from tpu_embedding.tools.train.errors import ConfigError
from tpu_embedding.tools.train.loop.checked_data import CheckedDataset
from tpu_embedding.tools.train.loop.loaders import BatchReader, split_samples
from tpu_embedding.types import RaggedIds

grain = pytest.importorskip("grain")

SIZE = 7


class Whole:
    """Batches that tell who read them: the dense inputs are process and devices."""

    batch_size = SIZE

    def __init__(self, damaged_step=None):
        self.damaged_step = damaged_step

    def train_batch(self, step):
        return self.read(step, range(SIZE))

    def evaluation_batches(self):
        yield self.read(0, range(SIZE))

    def read(self, step, samples):
        if step == self.damaged_step and 5 in samples:
            raise DataError("clicks.csv, line 7: damaged")
        numbers = 100 * step + np.arange(samples.start, samples.stop)
        started = xla_bridge.backends_are_initialized()
        return Batch(
            features={
                "one": numbers,
                "many": RaggedIds.from_lists([[n] * (n % 3) for n in numbers]),
            },
            dense=np.full((len(numbers), 2), [os.getpid(), started]),
            labels=numbers % 2,
            weights=np.ones(len(numbers)),
        )


class Parts(Whole):
    def train_part(self, step, samples):
        return self.read(step, samples)


def checked(data):
    config: RunConfig = dataclasses.replace(
        load_config("synthetic"), batch_size=SIZE, target=None
    )
    return CheckedDataset(data, config)


def without_reader(batch):
    return dataclasses.replace(batch, dense=None)


@pytest.mark.parametrize(
    ("make", "samples", "num_processes"),
    [
        pytest.param(Parts, range(SIZE), 1, id="one"),
        pytest.param(Parts, range(SIZE), 2, id="parts", marks=pytest.mark.full),
        pytest.param(
            *(Whole, range(3, 6), 2),
            id="whole_for_one_of_several",
            marks=pytest.mark.full,
        ),
    ],
)
def test_processes_read_the_batches_of_the_thread(make, samples, num_processes):
    steps = range(3, 8)
    reader = BatchReader(checked(make(damaged_step=7)), samples, steps, num_processes)
    try:
        batches = [reader.read(step) for step in range(3, 7)]
        with pytest.raises(DataError) as error:
            reader.read(7)
        assert str(error.value) == "clicks.csv, line 7: damaged"
    finally:
        reader.close()
    in_thread = BatchReader(checked(make()), samples, steps, 0)
    for step, found in zip(steps, batches, strict=False):
        jax.tree.map(
            np.testing.assert_array_equal,
            without_reader(found),
            without_reader(in_thread.read(step)),
        )
        assert all(type(a) is np.ndarray for a in jax.tree.leaves(found))
    processes = {int(pid) for batch in batches for pid in batch.dense[:, 0]}
    assert len(processes) == num_processes and os.getpid() not in processes
    assert not any(batch.dense[:, 1].any() for batch in batches)  # No device started.


@pytest.mark.full
def test_a_killed_process_is_reported():
    reader = BatchReader(checked(Parts()), range(SIZE), range(1000), 2)
    try:
        pid = int(reader.read(0).dense[-1, 0])
        for number in STOP_SIGNALS:  # for the parent to decide on
            os.kill(pid, number)
        pids = {int(reader.read(step).dense[-1, 0]) for step in range(1, 20)}
        assert pids == {pid}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError, match=r"read step .* code -9.*memory"):
            for step in range(20, 1000):
                reader.read(step)
    finally:
        reader.close()


class Unsendable(Parts):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_data_set_that_cannot_be_sent():
    reader = BatchReader(checked(Unsendable()), range(SIZE), range(2), 2)
    try:
        with pytest.raises(
            ConfigError, match="Unsendable cannot be sent.*__getstate__"
        ):
            reader.read(0)
    finally:
        reader.close()


def test_grain_is_needed_for_processes_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    data = checked(Parts())
    assert len(BatchReader(data, range(SIZE), range(2), 0).read(0).labels) == SIZE
    with pytest.raises(ConfigError, match=r"loader_processes .*tpu-embedding\[train\]"):
        BatchReader(data, range(SIZE), range(2), 1)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7, 9])
def test_samples_are_split_evenly(num_parts):
    parts = split_samples(range(10, 17), num_parts)
    assert [sample for part in parts for sample in part] == list(range(10, 17))
    lengths = {len(part) for part in parts}
    assert len(parts) == min(num_parts, 7)
    assert min(lengths) > 0 and max(lengths) - min(lengths) <= 1


PARENT = """
    import sys
    from tests.tools.train.loop.test_loaders import SIZE, Parts, checked
    from tpu_embedding.tools.train.loop.loaders import BatchReader

    if __name__ == "__main__":
        reader = BatchReader(checked(Parts()), range(SIZE), range(100_000), 2)
        print(*{int(pid) for pid in reader.read(0).dense[:, 0]}, flush=True)
        sys.stdin.read()
"""


@pytest.mark.full
def test_processes_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
