"""The example with loader processes gives the batches of one process."""

import importlib
import multiprocessing.pool
import sys
import types

import pytest

from tests.docs.test_example_programs import EXAMPLES


@pytest.fixture
def example(monkeypatch):
    """The program as a module, which spawned processes can import."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module("loaders")
    del sys.modules["loaders"]


@pytest.mark.full
def test_loader_processes_give_the_batches_of_one_process(example, monkeypatch):
    def pool_of_one_thread(num_workers, initializer, arguments):
        return multiprocessing.pool.ThreadPool(1, initializer, arguments)

    loss = example.main(num_steps=7)
    context = types.SimpleNamespace(Pool=pool_of_one_thread)
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda _: context)
    assert example.main(num_steps=7) == loss
    assert example.worker_sizes.num_combinations == 1
