"""One process of a job that exports its tables.

    python -m tests.processes.export_worker ADDRESS PROCESSES PROCESS DEVICES DIR

Run by `test_exports.py`. Only the first process is told the directory to write. With
one process, it needs no coordinator.
"""

import sys

import numpy as np

import tpu_embedding as te
from tests.processes.checkpoint_worker import SIZES, make
from tests.processes.joining import start_devices
from tpu_embedding.tables import line_exchange


def main(coordinator, num_processes, process, num_devices, directory):
    start_devices(coordinator, num_processes, process, num_devices)
    line_exchange._MIN_BLOCK_BYTES = 512  # several blocks per process
    model, optimizer = make(SIZES | {"dynamic": te.Dynamic(capacity=300)}, seed=0)
    ids = np.arange(4, dtype=np.int64) << 40
    batch = model.prepare({"dynamic": ids})
    optimizer.insert_ids(model, te.inputs.shard_batch(batch, model.plan))
    te.export.save_tables(model, directory)
    if int(num_processes) > 1:
        try:
            te.export.save(model, f"{directory}/program", {"sharded": np.array([1])})
        except te.export.ExportError as error:
            assert "te.save" in str(error)
        else:
            raise AssertionError


if __name__ == "__main__":
    main(*sys.argv[1:])
