"""Compiling ahead: programs reach the cache, and errors wait for their case."""

import functools
import os
import threading

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.conftest import needs_kernels
from tpu_embedding.tools.doctor import compile_ahead as module
from tpu_embedding.tools.doctor.child import ChildOptions, make_program
from tpu_embedding.tools.doctor.compile_ahead import compile_ahead, programs_at_once
from tpu_embedding.tools.doctor.protocol import CaseEnded, CaseStarted
from tpu_embedding.tools.doctor.row_inputs import make_inputs

OPTIONS = ChildOptions(backend="xla", part="correctness", tier="quick", seeds=(0,))
NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def cache(tmp_path):
    """An empty cache on disk that keeps each program."""
    before = [getattr(jax.config, name) for name in NAMES]
    set_options(str(tmp_path), 0, -1)
    yield tmp_path
    set_options(*before)


def set_options(*values):
    for name, value in zip(NAMES, values, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def programs_in(directory):
    """Returns the files of the programs of cases in a cache."""
    return sorted(path.name for path in directory.glob("jit__run-*-cache"))


@pytest.mark.full
def test_a_case_takes_its_program_from_the_cache(cache):
    devices = jax.devices()
    (case,) = OPTIONS.cases(devices)
    make = functools.partial(make_program, case, "xla", devices)
    started, ended = compile_ahead([make], 2)
    assert isinstance(started, CaseStarted) and isinstance(ended, CaseEnded)
    assert started.case == ended.case == "compilation"
    assert ended.ok and dict(ended.figures) == {"programs": 1, "compiled": 1}
    compiled = programs_in(cache)
    assert len(compiled) == 1
    program = make()
    program.step(*make_inputs(program, 0).arguments)
    # The arguments have the shapes and shardings that were compiled for.
    assert programs_in(cache) == compiled


def test_an_error_is_left_to_its_case():
    def fail():
        raise RuntimeError("no such program")

    *_, ended = compile_ahead([fail, fail], 2)
    assert ended.ok and dict(ended.figures) == {"programs": 2, "compiled": 0}


@pytest.mark.parametrize(("cores", "expected"), [(1, 0), (7, 0), (8, 2), (400, 32)])
def test_programs_at_once(cores, expected, cache, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert programs_at_once() == expected
    set_options(None, 0, -1)
    assert programs_at_once() == 0


@needs_kernels
def test_timed_cases_compile_the_program_of_xla_too():
    options = ChildOptions(
        backend="interpreter", part="speed", tier="quick", seeds=(0,)
    )
    devices = jax.devices()
    cases = options.cases(devices)[:1]
    made = [make() for make in options.programs(cases, devices)]
    assert [p.plan.stacks[0].backends.read.backend for p in made] == [
        "interpreter",
        "xla",
    ]


def test_programs_that_take_long_are_left_to_their_cases(monkeypatch):
    monkeypatch.setattr(module, "_MAX_SECONDS", 0.01)
    release = threading.Event()

    def wait():
        assert release.wait(60)
        raise RuntimeError("no such program")

    *_, ended = compile_ahead([wait] * 3, 1)
    release.set()
    assert ended.ok and dict(ended.figures) == {"programs": 3, "compiled": 0}
