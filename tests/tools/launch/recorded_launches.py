"""Launches whose commands are recorded in `recorded/`, one script for bash each.

    python -m tests.tools.launch.recorded_launches

writes the scripts anew.
"""

import pathlib

from tpu_embedding.tools.launch import BACKENDS, Launch, fetch_results, print_steps

FOLDER = pathlib.Path(__file__).parent / "recorded"

FIELDS = dict(
    name="dlrm",
    project="my-project",
    lifetime="6h",
    config="dlrm",
    settings=("batch_size=65536",),
    data_dir="criteo",
    bucket="my-bucket",
    package="dist/tpu_embedding-0.1.0-py3-none-any.whl",
    service_account="trainer@my-project.iam.gserviceaccount.com",
)


def make_launch(**changes) -> Launch:
    fields = dict(backend="gke", zone="us-east5-a", topology="v5p:2x4x4")
    return Launch(**(FIELDS | fields | changes))


V5E = dict(topology="v5e:2x4", zone="us-west4-a")
V5P = dict(topology="v5p:2x4x4")
V6E = dict(topology="v6e:16x16", zone="us-east5-b")
TPU7X = dict(topology="tpu7x:2x4x4", zone="us-central1-c")
KEPT = dict(lifetime="until_deleted")
RESERVED = dict(capacity="reservation", reservation="my-reservation")
OWN = dict(config="configs/my_config.py", package="tpu-embedding[tpu,train]==0.1.0")

# The number of a name counts TensorCores, as in the names of the products.
LAUNCHES = {
    "gke_v5e_8": make_launch(**V5E, capacity="spot"),
    "gke_v5p_64": make_launch(**V5P, **RESERVED, subnetwork="my-subnetwork"),
    "gke_v6e_256_two_slices": make_launch(**V6E, slices=2),
    "gke_tpu7x_64": make_launch(**TPU7X, capacity="flex_start"),
    "gke_tpu7x_8_kept": make_launch(topology="tpu7x:2x2x1", **KEPT, **OWN),
    "compute_engine_v5p_64": make_launch(**V5P, backend="compute_engine"),
    "compute_engine_v6e_256": make_launch(
        **V6E, backend="compute_engine", capacity="spot", subnetwork="my-subnetwork"
    ),
    "compute_engine_tpu7x_64": make_launch(
        **TPU7X, backend="compute_engine", capacity="flex_start"
    ),
    "compute_engine_v6e_4_kept": make_launch(
        topology="v6e:2x2", backend="compute_engine", **KEPT, **RESERVED, **OWN
    ),
    "queued_resource_v5e_8": make_launch(
        **V5E, backend="queued_resource", **KEPT, capacity="spot"
    ),
    "queued_resource_v4_64": make_launch(
        topology="v4:2x4x4", backend="queued_resource", **KEPT, **OWN
    ),
    "queued_resource_v5p_64": make_launch(
        **V5P, backend="queued_resource", capacity="flex_start"
    ),
    "queued_resource_v6e_256_two_slices": make_launch(
        **V6E, backend="queued_resource", **KEPT, slices=2, capacity="reservation"
    ),
}


def all_steps(launch):
    """Yields each verb with its steps."""
    backend = BACKENDS[launch.backend]
    yield "create", backend.create(launch)
    yield "setup", backend.set_up(launch)
    yield "run --program doctor", backend.run(launch, "doctor", ())
    yield "run", backend.run(launch, "train", ())
    yield "logs", backend.follow(launch, "train")
    yield "status", backend.status(launch)
    yield "stop", backend.stop(launch, "train")
    yield "run --resume", backend.run(launch, "train", ("--resume",))
    yield "fetch", fetch_results(launch, "runs/dlrm")
    yield "delete", backend.delete(launch)
    if backend.delete_cluster is not None:
        yield "delete --with-cluster", backend.delete_cluster(launch)


def record(launch) -> str:
    """Returns what `--dry-run` prints for all verbs."""
    lines = ["#!/bin/bash"]
    for verb, steps in all_steps(launch):
        lines.append(f"\n##### tpu-embedding launch {verb}")
        print_steps(steps, lines.append)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, launch in LAUNCHES.items():
        (FOLDER / f"{name}.sh").write_text(record(launch))
