"""Compares dynamic tables with hashed and unlimited ones, on ids that come and go.

    python benchmarks/dynamic_stream.py [--seeds 1 2 3] [--json FILE]
    python benchmarks/record.py FILE

Trains the config `synthetic_stream` with each kind of table. The loss is that of
progressive validation: each batch is predicted before it is trained on. The mean is
that of the second half of the steps. Each kind of table has the learning rate that is
best for it, by the mean over the seeds; all other settings are those of the config.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
from typing import Any, Final, get_args

import jax
import numpy as np
from jax.sharding import Mesh
from list_options import AllValues
from measuring import write_document

from tpu_embedding.tools.data.synthetic_stream import DIRECTORY_BYTES, Vocabulary
from tpu_embedding.tools.train import apply_overrides, load_config, train

RATES: Final = (0.3, 1.0, 3.0)
KINDS: Final[tuple[Vocabulary, ...]] = get_args(Vocabulary)


def main() -> None:
    """Trains; prints a line for each run and each kind of table, and writes JSON."""
    parser = argparse.ArgumentParser(description="Compares kinds of tables.")
    parser.add_argument(
        "--seeds", nargs="+", action=AllValues, type=int, default=[1, 2, 3]
    )
    parser.add_argument(
        "--rates", nargs="+", action=AllValues, type=float, default=list(RATES)
    )
    parser.add_argument("--users", type=int, default=2_000, help="living users")
    parser.add_argument("--items", type=int, default=1_000, help="living items")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    arguments = parser.parse_args()
    settings = [
        f"data.num_users={arguments.users}",
        f"data.num_items={arguments.items}",
        f"num_steps={arguments.steps}",
        f"data.evaluation_step={arguments.steps - 1}",
        "evaluate_every=0",
    ]
    results = [
        {"users": arguments.users, "items": arguments.items, "kind": kind}
        | _best(kind, arguments.seeds, arguments.rates, settings)
        for kind in KINDS
    ]
    (unlimited,) = (row for row in results if row["kind"] == "unlimited")
    for row in results:
        pairs = zip(row["losses"], unlimited["losses"], strict=True)
        row["over_unlimited"] = [loss / wanted - 1 for loss, wanted in pairs]
        shown = ", ".join(f"{share:+.2%}" for share in row["over_unlimited"])
        print(f"{row['kind']}: {row['loss']:.4f}, over unlimited {shown}")
    shapes = {
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "rates": arguments.rates,
    }
    write_document(arguments.json, "dynamic_stream", shapes=shapes, results=results)


def _best(
    kind: Vocabulary, seeds: list[int], rates: list[float], settings: list[str]
) -> dict[str, Any]:
    """Returns the result of a kind of table at its best learning rate."""
    of_rates = []
    for rate in rates:
        own = [f"data.vocabulary={kind}", f"table_learning_rate={rate}", *settings]
        runs = [_run([*own, f"seed={seed}"]) for seed in seeds]
        losses = [run["loss"] for run in runs]
        of_rates.append(
            {
                "rate": rate,
                "loss": statistics.mean(losses),
                "losses": losses,
                "held_out": statistics.mean(run["held_out"] for run in runs),
                "teacher": statistics.mean(run["teacher"] for run in runs),
                "seconds": statistics.mean(run["seconds"] for run in runs),
                **_sizes(own),
            }
        )
        print(f"{kind}, rate {rate:g}: {of_rates[-1]['loss']:.4f} {losses}", flush=True)
    return min(of_rates, key=lambda result: result["loss"])


def _run(settings: list[str]) -> dict[str, float]:
    """Trains once; returns the losses and the time."""
    config = apply_overrides(load_config("synthetic_stream"), settings)
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("shard",))
    with tempfile.TemporaryDirectory() as directory:
        result = train(config, directory, mesh=mesh)
        assert result is not None and result.teacher is not None
        lines = (pathlib.Path(directory) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    # A record has the mean over as many steps as any other.
    later = [
        record["loss"]
        for record in records
        if "loss" in record and record["step"] > config.num_steps // 2
    ]
    return {
        "loss": statistics.mean(later),
        "held_out": result.metrics["log_loss"],
        "teacher": result.teacher,
        "seconds": result.seconds,
    }


def _sizes(settings: list[str]) -> dict[str, int]:
    """Returns the rows of both tables, and their bytes with slots, keys and scores."""
    config = apply_overrides(load_config("synthetic_stream"), settings)
    source: Any = config.data
    sizes = source.outline(batch_size=config.batch_size, seed=0).vocabulary_sizes
    is_dynamic = source.vocabulary == "dynamic"
    rows = sum(x.num_places if is_dynamic else x for x in sizes.values())
    row_bytes = source.row_bytes + (DIRECTORY_BYTES if is_dynamic else 0)
    return {"rows": rows, "bytes": rows * row_bytes}


if __name__ == "__main__":
    main()
