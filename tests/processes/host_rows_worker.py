"""One process of a job that runs random programs with rows on the host.

    python -m tests.processes.host_rows_worker
        COORDINATOR NUM_PROCESSES PROCESS DEVICES FILE DIRECTORY FIRST LAST

Each program also runs with all rows on the devices of the job, and both compare all
bits. Run by `test_host_rows.py`.
"""

import pathlib

import jax
import numpy as np

from tests.host_rows.test_programs import PROGRAMS_PER_LAYOUT, Program, layout_of
from tests.processes.joining import join_job


def run_programs(directory, seeds):
    """Returns how many rows, exchanges of a batch and rounds the programs had."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("devices",))
    num_rows = num_fetched = 0
    for seed in seeds:
        if seed % PROGRAMS_PER_LAYOUT == 0:
            jax.clear_caches()  # Compiled programs map memory.
            layout_of.cache_clear()
        folder = directory / str(seed)
        folder.mkdir(exist_ok=True)
        try:
            program = Program(seed, folder, mesh)
            program.run()
        except BaseException as error:
            error.add_note(f"Program {seed}")
            raise
        for host in program.host.hosts.values():
            num_rows += host.num_ids
            num_fetched += host.num_fetched
    return {"rows": num_rows, "fetched": num_fetched}


if __name__ == "__main__":
    path, directory, first, last = join_job()
    seeds = range(int(first), int(last))
    np.savez(path, **run_programs(pathlib.Path(directory), seeds))
