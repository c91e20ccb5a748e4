"""A save that fails waits for no other process, and prints nothing of its own."""

import contextlib
import re
import resource
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.failed_saves import (
    meet_unless_failed,
    print_no_tracebacks,
)
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints


def save_once(directory, state):
    te.save(directory, state)


def save_of_a_run(directory, state):
    checkpoints = RunCheckpoints(directory, kept=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()


@pytest.mark.parametrize("save", [save_once, save_of_a_run])
def test_the_error_of_a_full_disk_is_the_only_output(save, tmp_path, caplog, capfd):
    with full_disk(), pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "a", large_state())
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_errors_of_the_programs_own_orbax_are_logged(tmp_path, caplog):
    te.save(tmp_path / "a", {"x": np.zeros(3)})
    with (
        ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as own,
        full_disk(),
        pytest.raises(ValueError, match="Failed to write"),
    ):
        own.save(tmp_path / "a2", args=ocp.args.StandardSave(large_state()))
        own.wait_until_finished()
    assert any("Failed to run" in x.getMessage() for x in caplog.records)


def large_state():
    return {f"array_{i}": np.random.default_rng(i).random(5000) for i in range(10)}


@contextlib.contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_other_errors_that_cannot_be_raised_are_printed(monkeypatch, tmp_path):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    print_no_tracebacks(tmp_path)
    hook = sys.unraisablehook
    print_no_tracebacks(tmp_path)
    assert sys.unraisablehook is hook
    for error in (RuntimeError("Event loop is closed"), RuntimeError("other")):
        hook(Unraisable(error))
    assert [str(each.exc_value) for each in printed] == ["other"]


class Unraisable:
    def __init__(self, error):
        self.exc_value = error


def test_a_process_with_an_error_meets_no_other(monkeypatch):
    met = []
    monkeypatch.setattr(
        ocp.multihost, "get_barrier_sync_fn", lambda: lambda **names: met.append(names)
    )
    meet_unless_failed(key="written", timeout_ms=7)
    try:
        raise OSError
    except OSError:
        meet_unless_failed(key="end of the save", timeout_ms=7)
    assert met == [{"key": "written", "timeout_ms": 7}]


UNSUPPORTED = {
    "uint4": (np.ones(3, ml_dtypes.uint4), "uint4"),
    "uint4 on a device": (jnp.ones(3, jnp.uint4), "uint4"),
    "float8_e4m3": (jnp.ones(3, jnp.float8_e4m3), "float8_e4m3"),
    "long double": (np.ones(3, np.longdouble), "float128"),
    "dates": (np.zeros(2, "datetime64[D]"), "datetime64"),
    "texts": (np.array(["abc"]), "<U3"),
    "objects": (np.array([None]), "object"),
    "beyond 64 bits": (2**70, "object"),
}


@pytest.mark.parametrize(("leaf", "dtype"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_dtypes_that_no_file_holds(leaf, dtype, tmp_path, capfd):
    state = {"model": {"good": np.zeros(3), "bad": leaf}}
    with pytest.raises(TypeError, match=rf"got {re.escape(dtype)}.* at 'model\.bad'"):
        te.save(tmp_path / "a", state)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_slot_variables_of_a_dtype_that_no_file_holds(tmp_path):
    rule = optax.GradientTransformation(
        lambda rows: {"small": jnp.zeros((), jnp.uint4)},
        lambda updates, state, rows=None: (updates, state),
    )
    table = te.TableConfig(vocabulary_size=8, dim=4, name="movie", optimizer=rule)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    state = {"tables": tables, "slots": te.functional.init_slots(tables, plan)}
    with pytest.raises(TypeError, match="got uint4 at .*slots.*small"):
        te.save(tmp_path / "a", state, plan=plan)
    assert not list(tmp_path.iterdir())
