"""The example with loader processes gives the batches of one process."""

import importlib
import sys

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
    class NoWorkers:
        """Prepares in this process, in place of a pool."""

        def __init__(self, num_workers, initializer, arguments):
            initializer(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def apply_async(self, function, arguments):
            return Done(function(*arguments))

    class Done:
        def __init__(self, value):
            self.get = lambda: value

    loss = example.main(num_steps=7)
    context = type("Context", (), {"Pool": NoWorkers})
    monkeypatch.setattr(example.multiprocessing, "get_context", lambda _: context)
    assert example.main(num_steps=7) == loss
    assert example.worker_sizes.num_combinations == 1
