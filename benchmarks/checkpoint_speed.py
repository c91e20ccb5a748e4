"""Times saving and restoring of tables and slot variables, beside plain orbax.

    python benchmarks/checkpoint_speed.py [--gb N] [--devices N] [--json FILE]
    python benchmarks/record.py FILE

Both sides write and read the same bytes: two tables, with Adagrad's accumulators.
`te.save` writes rows in natural order, which any plan can read, with checksums. Plain
orbax (`StandardSave`) writes the arrays of the devices as they are, without checksums.

Each save and each restore runs in a process of its own, and sides take turns. The time
is that from the call to the end of the last write, or to the arrays on the devices. The
CPU seconds are those of all threads in that time, in the process and in the kernel for
it. The memory is the peak of the process above its memory before, without restored
arrays. Modules are imported before.
"""

import argparse
import contextlib
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from measuring import peak_bytes, report_results, reset_peak, run_fresh

import tpu_embedding as te

DIM: Final = 64
ROWS_SHARES: Final = {"large": 0.75, "small": 0.25}
SIDES: Final = ("tpu_embedding", "orbax")
CLOCKS: Final = ("seconds", "cpu_seconds")


def save(side: str, directory: str, num_bytes: int, devices: int) -> dict[str, Any]:
    """Saves a state once; returns times and memory."""
    plan = _start(num_bytes, devices)
    state = jax.block_until_ready(_random_state(plan))
    if side == "orbax":
        checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        args = ocp.args.StandardSave(state)
    else:
        checkpointer = ocp.AsyncCheckpointer(te.checkpoint.StateHandler())
        args = te.checkpoint.SaveState(state, plan=plan)
    before, start = reset_peak(), _clocks()
    checkpointer.save(directory, args=args)
    checkpointer.wait_until_finished()
    times = _since(start)
    peak = peak_bytes() - before
    checkpointer.close()
    return {**times, "extra_bytes": peak}


def restore(side: str, directory: str, num_bytes: int, devices: int) -> dict[str, Any]:
    """Restores a state once; returns time and memory."""
    plan = _start(num_bytes, devices)
    shapes = _shapes(plan)
    before, start = reset_peak(), _clocks()
    if side == "orbax":
        with contextlib.closing(ocp.StandardCheckpointer()) as checkpointer:
            state = checkpointer.restore(directory, shapes)
    else:
        state = te.restore(directory, shapes, plan=plan)
    state = jax.block_until_ready(state)
    times = _since(start)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return {**times, "extra_bytes": peak_bytes() - before - size}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> dict[str, float]:
    """Returns the time on each clock since `_clocks`."""
    times = (now - before for now, before in zip(_clocks(), start, strict=True))
    return dict(zip(CLOCKS, times, strict=True))


def _start(num_bytes: int, devices: int) -> te.EmbeddingPlan:
    jax.config.update("jax_num_cpu_devices", devices)
    num_rows = num_bytes // (2 * 4 * DIM)
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=int(share * num_rows), dim=DIM, name=name
            )
        )
        for name, share in ROWS_SHARES.items()
    }
    return te.make_plan(features, optimizer=te.optimizers.adagrad(0.1))


def _random_state(plan: te.EmbeddingPlan) -> dict[str, Any]:
    """Returns tables and slots of random numbers, which do not compress."""
    tables = te.functional.init_tables(plan, jax.random.key(0))
    others = te.functional.init_tables(plan, jax.random.key(1))
    slots = jax.eval_shape(
        lambda tables: te.functional.init_slots(tables, plan), tables
    )
    # The accumulators have the shape of their table.
    structure = jax.tree.structure(slots)
    return {"tables": tables, "slots": structure.unflatten(jax.tree.leaves(others))}


def _shapes(plan: te.EmbeddingPlan) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        tables = te.functional.init_tables(plan, jax.random.key(0))
        return {"tables": tables, "slots": te.functional.init_slots(tables, plan)}

    (stack,) = plan.stacks
    sharding = plan.rows_sharding(stack)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(make),
    )


def main() -> None:
    """Measures all sides in turns."""
    parser = argparse.ArgumentParser(description="Times saving and restoring.")
    parser.add_argument("--gb", type=float, default=4.0, help="tables and slots")
    parser.add_argument("--devices", type=int, default=4, help="emulated devices")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=pathlib.Path, help="on the disk to measure")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    size = (int(1e9 * arguments.gb), arguments.devices)
    runs = {(side, work): [] for side in SIDES for work in ("save", "restore")}
    for _ in range(arguments.rounds):
        for side in SIDES:
            with tempfile.TemporaryDirectory(dir=arguments.directory) as parent:
                directory = f"{parent}/checkpoint"
                for work, function in (("save", save), ("restore", restore)):
                    use = run_fresh(function, side, directory, *size)
                    runs[side, work].append(use)
                    print(side, work, use, flush=True)
                shutil.rmtree(directory)
    results: list[dict[str, Any]] = [
        {"side": side, "work": work, "gb": arguments.gb, "devices": arguments.devices}
        | {name: statistics.median(use[name] for use in found) for name in found[0]}
        for (side, work), found in runs.items()
    ]
    by_work = {(row["side"], row["work"]): row for row in results}
    for row in results:
        peer = by_work["orbax", row["work"]]
        row["ratio"] = row["seconds"] / peer["seconds"]
        row["cpu_ratio"] = row["cpu_seconds"] / peer["cpu_seconds"]
    report_results(
        arguments.json,
        "checkpoint_speed",
        shapes={"dim": DIM, "rounds": arguments.rounds, "gb": arguments.gb},
        results=results,
    )


if __name__ == "__main__":
    main()
