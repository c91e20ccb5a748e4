"""Saves and restores of one path by several threads and processes, and killed ones."""

import contextlib
import itertools
import os
import shutil

import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint.overwriting_worker import restored_numbers, save
from tests.processes.test_processes import start
from tpu_embedding.checkpoint import CheckpointError

WORKER = "tests.checkpoint.overwriting_worker"


@pytest.mark.full
def test_a_restore_beside_a_writer_sees_one_save(tmp_path):
    directory, wanted = tmp_path / "a", 20
    assert not save(directory, 0)
    num_restored = last = 0
    with killed_at_end(start(directory, module=WORKER)) as writer:
        while num_restored < wanted or last < wanted:
            assert writer.poll() is None, writer.communicate()
            try:
                (number,) = restored_numbers(directory)
            except CheckpointError:
                pass  # A save replaced the checkpoint meanwhile.
            else:
                assert number >= last
                num_restored, last = num_restored + 1, number
        refusals = (save(directory, last) for _ in itertools.count())
        assert "Another thread or process is saving" in next(filter(None, refusals))
    (number,) = restored_numbers(directory)
    assert number >= last
    assert not save(directory, -1)
    assert restored_numbers(directory) == {-1}
    assert os.listdir(tmp_path) == ["a"]


@contextlib.contextmanager
def killed_at_end(process):
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Stopped(BaseException):
    pass


def test_a_kill_at_any_step_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """A save stops before each change of a directory in turn."""
    for num_steps in itertools.count():
        path = tmp_path / str(num_steps) / "a"
        te.save(path, small_state(1))
        steps = itertools.count()

        def stopping(function, steps=steps, end=num_steps):
            def step(*args, **options):
                if next(steps) >= end:
                    raise Stopped
                return function(*args, **options)

            return step

        with monkeypatch.context() as patch:
            for module, name in ((os, "rename"), (shutil, "rmtree")):
                patch.setattr(module, name, stopping(getattr(module, name)))
            try:
                te.save(path, small_state(2), overwrite=True)
            except Stopped:
                pass
            is_complete = next(steps) < num_steps
        assert restored_values(path) in ({1}, {2})
        te.save(path, small_state(3), overwrite=True)
        assert restored_values(path) == {3}
        assert os.listdir(path.parent) == ["a"]
        if is_complete:
            break
    assert num_steps > 3  # two renames and a deletion at the end of the save


def small_state(value):
    return {f"array_{i}": np.full(10, value) for i in range(4)}


def restored_values(path):
    state = te.restore(path, small_state(0))
    return {int(value) for array in state.values() for value in array}
