"""A run compiles no program twice, and a later run compiles none at all."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import mesh_of
from tests.program_cache import reset_cache
from tpu_embedding.distributed.job import current_job
from tpu_embedding.tools.cli import compilation_cache

SETTINGS = ["num_steps=2", "evaluate_every=1", "checkpoint_every=1", "batch_size=64"]
SETTINGS += ["model.dim=4", "data.num_evaluation_samples=128"]


def run(directory, *options, **environment):
    """Runs a short training in a process of its own; returns its output and JAX's log.

    Args:
      directory: new directory for the run and the home of the user.
      *options: further options of the command.
      **environment: variables; those of tests for the cache are left out.
    """
    command = [sys.executable, "-m", "tpu_embedding.tools.cli", "train", "synthetic"]
    command += ["--devices", "2", "--output-dir", str(directory / "run"), "--overwrite"]
    for setting in SETTINGS:
        command += ["--set", setting]
    variables = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    variables |= {"HOME": str(directory), "JAX_LOG_COMPILES": "1"} | environment
    result = subprocess.run(
        [*command, *options], env=variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def compiled(log):
    """Returns the names of the programs that JAX compiled or found, in order."""
    return re.findall(r"Finished XLA compilation of jit\((\S+)\) in", log)


def found(log):
    """Returns the number of programs that JAX found in the cache."""
    return log.count("Persistent compilation cache hit")


def test_no_program_is_compiled_twice_and_a_second_run_compiles_none(tmp_path):
    first, log = run(tmp_path)
    # A program that is compiled twice is found in the cache the second time.
    assert found(log) == 0
    names = compiled(log)
    # Not even with another sharding.
    for name in ("init_tables", "init_slots", "train_step", "evaluation_step"):
        assert names.count(name) == 1, name
    assert len(names) <= 31

    directory = tmp_path / ".cache" / "tpu_embedding" / compilation_cache.DIRECTORY
    assert len(list(directory.iterdir())) == len(names)
    second, log = run(tmp_path)
    assert sorted(compiled(log)) == sorted(names)
    assert found(log) == len(names)
    losses = re.compile(r"loss [\d.]+")
    assert losses.findall(second) == losses.findall(first) != []


@pytest.mark.full
@pytest.mark.parametrize(
    ("variable", "place"),
    [("XDG_CACHE_HOME", "tpu_embedding/programs"), ("JAX_COMPILATION_CACHE_DIR", ".")],
)
def test_variables_name_the_directory(variable, place, tmp_path):
    _, log = run(tmp_path, **{variable: str(tmp_path / "mine")})
    kept = list((tmp_path / "mine" / place).iterdir())
    assert len(kept) == len(compiled(log))
    assert not (tmp_path / ".cache" / "tpu_embedding").exists()


@pytest.mark.full
@pytest.mark.parametrize("way", ["option", "variable"])
def test_the_cache_is_off(way, tmp_path):
    options = ["--compilation-cache", "off"] if way == "option" else []
    variables = {} if options else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    run(tmp_path, *options, **variables)
    assert not (tmp_path / ".cache" / "tpu_embedding").exists()


@pytest.fixture
def no_directory(monkeypatch):
    """JAX without a directory of the cache, as a process starts."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_directory_that_cannot_be_written(
    no_directory, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compilation_cache.use_compilation_cache(current_job())
    assert jax.config.jax_compilation_cache_dir is None
    message = "compiled programs are not kept: [Errno 20] Not a directory: "
    assert capsys.readouterr().err.startswith(message)


def test_programs_used_last_stay(no_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compilation_cache, "MAX_CACHE_BYTES", 25)
    directory = tmp_path / "tpu_embedding" / compilation_cache.DIRECTORY
    directory.mkdir(parents=True)
    for age, name in enumerate(["new", "middle", "old"]):
        (directory / name).write_bytes(bytes(10))
        os.utime(directory / name, (1e9 - age, 1e9))
    compilation_cache.use_compilation_cache(current_job())
    assert sorted(path.name for path in directory.iterdir()) == ["middle", "new"]
    assert jax.config.jax_compilation_cache_dir == str(directory)


def test_a_program_from_the_cache_updates_in_place(no_directory, tmp_path):
    """It donates its arguments as the compiled one did."""
    sharding = jax.sharding.NamedSharding(mesh_of(2), jax.sharding.PartitionSpec())

    def addresses(array):
        return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]

    def add_row(table, row):
        return table.at[row].add(1.0)

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    reset_cache()
    try:
        for _ in range(2):
            jax.clear_caches()
            step = jax.jit(add_row, donate_argnums=0, out_shardings=sharding)
            # Not from NumPy, whose memory JAX may share and then cannot donate.
            table = jnp.zeros((256, 8), device=sharding)
            row = jax.device_put(np.int32(3), sharding)
            before = addresses(table)
            table = step(table, row)
            assert addresses(table) == before
            assert float(jnp.sum(table)) == 8
        assert any("add_row" in path.name for path in tmp_path.iterdir())
    finally:
        reset_cache()
