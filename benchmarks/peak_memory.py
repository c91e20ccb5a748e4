"""Measures the memory of a training at its peak, beside that of tables and slots.

    python benchmarks/peak_memory.py [--setting S1 S2 S3] [--json FILE]
    python benchmarks/record.py FILE

Initialisation, slot variables and 20 steps, in a process of its own for each setting.
The memory of Python and JAX before it is left out.
"""

import argparse
import pathlib
from typing import Any

import jax
import numpy as np
from embedding_step import jit_step, make_plan
from list_options import AllValues
from measuring import measure, run_fresh, write_document
from settings import SETTINGS, Setting

import tpu_embedding as te
from tpu_embedding.tools.data.zipf import ZipfIds

NUM_STEPS = 20


def run_case(setting: Setting) -> dict[str, Any]:
    """Trains on the tables of a setting."""
    plan = make_plan(
        None,
        num_tables=setting.tables,
        vocabulary_size=setting.rows,
        dim=setting.dim,
        optimizer=te.optimizers.rowwise_adagrad(0.01),
    )
    law = ZipfIds(vocabulary_size=setting.rows, exponent=setting.exponent)
    generator = np.random.default_rng(0)

    def train():
        tables = te.functional.init_tables(plan, jax.random.key(0))
        slots = te.functional.init_slots(tables, plan)
        sizes = [leaf.nbytes for leaf in jax.tree.leaves((tables, slots))]
        step = jit_step(plan)
        cotangents = None
        for _ in range(NUM_STEPS):
            shape = (setting.batch, setting.valence)
            batch = {f.name: law.draw(generator, shape) for f in plan.features}
            batch = te.inputs.shard_batch(batch, plan)
            if cotangents is None:
                structs = te.functional.activation_shapes(batch, plan)
                cotangents = jax.tree.map(
                    lambda s: jax.numpy.ones(s.shape, s.dtype), structs
                )
            tables, slots, _ = step(tables, slots, batch, cotangents, plan)
            jax.block_until_ready(tables)
        return sum(sizes)

    state_bytes, use = measure(train)
    return {
        "state_bytes": state_bytes,
        "peak_bytes": use.peak_bytes,
        "ratio": use.peak_bytes / state_bytes,
    }


def main() -> None:
    """Measures each setting; prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description="Measures the peak of memory.")
    parser.add_argument(
        "--setting", nargs="+", action=AllValues, choices=SETTINGS, default=["S2", "S3"]
    )
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    results = []
    print(f"{'setting':8} {'tables and slots':>16} {'peak':>9}  ratio")
    for name in arguments.setting:
        row = {"setting": name} | run_fresh(run_case, SETTINGS[name])
        results.append(row)
        print(
            f"{name:8} {row['state_bytes'] / 1e9:13.2f} GB "
            f"{row['peak_bytes'] / 1e9:6.2f} GB {row['ratio']:6.2f}",
            flush=True,
        )
    write_document(
        arguments.json, "peak_memory", shapes={"steps": NUM_STEPS}, results=results
    )


if __name__ == "__main__":
    main()
