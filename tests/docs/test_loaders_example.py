"""The example with loader processes, as the file that its reader would write."""

import importlib
import sys

import pytest

from tests.docs.test_doc_examples import DOCS, SYBIL


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The program of the page as a module, which spawned processes can import."""
    page = SYBIL.parse(DOCS / "examples" / "loaders.md")
    (program,) = (block.parsed for block in page.examples())
    (tmp_path / "loaders_example.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("loaders_example")
    del sys.modules["loaders_example"]


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
