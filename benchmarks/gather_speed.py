"""Times gathers of rows on this CPU, as JAX compiles them and as the package does.

    python benchmarks/gather_speed.py [--dim 8 16 ...] [--json FILE]
    python benchmarks/record.py FILE

Each gather reads random rows of a table of a million rows, and writes 27 MB. Both forms
take turns in this process. Gigabytes per second count what is read and what is written.
If a new version of JAX brings every `ratio` near 1, `copied_in_vectors` in
`tpu_embedding/xla.py` has no use any more.
"""

import argparse
import pathlib
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from list_options import AllValues
from measuring import report_results

from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.packed_rows import gather_in_bounds

ROWS: Final = 1_000_000
WRITTEN_BYTES: Final = 27 * 2**20
DIMS: Final = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 128, 256)


def time_gathers(dim: int, turns: int) -> dict[str, Any]:
    """Returns the result of one row length."""
    generator = np.random.default_rng(0)
    table = jnp.asarray(generator.random((ROWS, dim), np.float32))
    num_ids = WRITTEN_BYTES // (4 * dim)
    ids = jnp.asarray(generator.integers(0, ROWS, num_ids, dtype=np.int32))
    forms = {"plain": jax.jit(gather_in_bounds), "ours": jax.jit(gather_lines)}
    plain, ours = (np.asarray(form(table, ids)) for form in forms.values())
    np.testing.assert_array_equal(ours, plain)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(turns):
        for name, form in forms.items():
            start = time.perf_counter()
            jax.block_until_ready(form(table, ids))
            seconds[name].append(time.perf_counter() - start)
    result: dict[str, Any] = {"dim": dim}
    for name, found in seconds.items():
        quartiles = np.percentile(found, [25, 50, 75])
        result[f"{name}_ms"] = 1e3 * float(quartiles[1])
        result[f"{name}_quartiles_ms"] = (1e3 * quartiles[[0, 2]]).round(3).tolist()
        moved = 2 * num_ids * dim * 4
        result[f"{name}_gb_per_s"] = moved / float(quartiles[1]) / 1e9
    return result | {"ratio": result["ours_ms"] / result["plain_ms"]}


def main() -> None:
    """Measures all row lengths."""
    parser = argparse.ArgumentParser(description="Times gathers of rows on this CPU.")
    parser.add_argument("--dim", nargs="+", action=AllValues, type=int, default=DIMS)
    parser.add_argument("--turns", type=int, default=25, help="calls of each form")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    keep_freed_memory()
    report_results(
        arguments.json,
        "gather_speed",
        shapes={"rows": ROWS, "written_bytes": WRITTEN_BYTES},
        results=[time_gathers(dim, arguments.turns) for dim in arguments.dim],
    )


if __name__ == "__main__":
    main()
