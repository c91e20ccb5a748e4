"""The core does not know rows on the host; loops leave no threads and no files."""

import gc
import itertools
import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

import tpu_embedding as te
from tests.host_rows.models import batches, feed, make, train

PACKAGE = pathlib.Path(te.__file__).parent
NAMES = re.compile(r"host_rows|HostRows|HostStack|HostStorage|CachedRows|MappedRows")
MAY_KNOW = ("host_rows/", "tools/")
OFFER = {"__init__.py", "functional/__init__.py", "nn/linen/__init__.py"}
"""Files that offer the public names of the vertical."""


def test_the_core_does_not_name_rows_on_the_host():
    paths = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if NAMES.search(path.read_text())
    }
    assert {path for path in paths if not path.startswith(MAY_KNOW)} == OFFER


def run_alone(program):
    """Runs a program in a new process, and returns its last line."""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.full
def test_the_core_works_without_the_folder():
    run_alone("""
import sys
sys.modules["tpu_embedding.host_rows"] = None  # An import of it raises.
import jax
import tpu_embedding as te
table = te.TableConfig(vocabulary_size=10, dim=4)
layer_plan = te.make_plan({"a": te.FeatureConfig(table=table)}, optimizer="adagrad")
tables = te.functional.init_tables(layer_plan, jax.random.key(0))
slots = te.functional.init_slots(tables, layer_plan)
ids = te.inputs.prepare_features({"a": [3, 4]}, layer_plan)
found = te.functional.lookup(tables, ids, layer_plan)
gradients = te.functional.compute_gradients(
    found.routing, found.activations, layer_plan
)
te.functional.apply_gradients(tables, slots, gradients, layer_plan)
te.TPUEmbedding, te.Optimizer, te.linen, te.PipelinedTrainStep, te.save, te.restore
print("done")
""")


@pytest.mark.parametrize(
    "first",
    ["te.HostRows", "te.host_rows", "import tpu_embedding.host_rows.planner"],
)
@pytest.mark.full
def test_the_function_is_not_its_folder(first):
    """Whatever is imported first."""
    program = f"import tpu_embedding as te\n{first}\nprint(type(te.host_rows).__name__)"
    assert run_alone(program) == "function"


def open_files():
    """Returns the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes():
    """Returns the memory of this process that is not shared."""
    resident = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(
    not pathlib.Path("/proc/self/fd").exists(), reason="/proc shows open files"
)


@needs_proc
@pytest.mark.full
def test_short_loops_leave_nothing(tmp_path):
    """Neither those that end, nor those that are left or closed."""
    model, optimizer = make(te.HostRows(cache_rows=100, directory=tmp_path))
    data = batches(6)

    def loop(number):
        drawn = feed(data, model, optimizer)
        for batch in itertools.islice(drawn, 1 + number % 7):
            if number % 20 == 0:
                train(model, optimizer, batch)
        if number % 3 == 0:
            drawn.close()

    for number in range(20):
        loop(number)
    gc.collect()
    before = threading.active_count(), open_files()
    for number in range(300):
        loop(number)
    gc.collect()
    after = threading.active_count(), open_files()
    assert after[0] <= before[0] and after[1] <= before[1]


@pytest.mark.exhaustive
@needs_proc
def test_a_long_run():
    """Memory, threads and open files are the same after 20,000 steps."""
    report = long_run(20_000)
    memory, threads, files = zip(*report, strict=True)
    quarter = len(report) // 4
    assert max(memory[quarter:]) < memory[quarter] + 2**24
    assert max(threads) == min(threads) and max(files) == min(files)


def long_run(num_steps, every=500):
    """Trains, and returns memory, threads and open files every some steps."""
    model, optimizer = make(te.HostRows(cache_rows=60), 1)
    draw = np.random.default_rng(0)
    data = batches(200, size=4)

    def stream():
        for _ in range(num_steps):
            yield data[draw.integers(len(data))]

    report = []
    for number, batch in enumerate(feed(stream(), model, optimizer)):
        loss = train(model, optimizer, batch)
        if number % every == every - 1:
            assert np.isfinite(loss)
            gc.collect()
            report.append((resident_bytes(), threading.active_count(), open_files()))
    return report
