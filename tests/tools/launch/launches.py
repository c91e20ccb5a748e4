"""Launches whose scripts are tested; those in `RECORDED` are also in `recorded/`.

    python -m tests.tools.launch.launches

writes the records anew.
"""

import json
import pathlib

from tpu_embedding.tools.launch import Launch, make_script

FOLDER = pathlib.Path(__file__).parent / "recorded"

FIELDS = dict(
    name="dlrm",
    project="my-project",
    lifetime="6h",
    config="dlrm",
    settings=("batch_size=65536",),
    data_dir="criteo",
    bucket="my-bucket",
    package="/path/to/dist/tpu_embedding-0.1.0-py3-none-any.whl",
    service_account="trainer@my-project.iam.gserviceaccount.com",
)


def as_toml(document):
    """Returns a launch file; JSON writes text, numbers and lists as TOML does."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in document.items())


def make_launch(**changes) -> Launch:
    fields = dict(backend="gke", zone="us-east5-a", topology="v5p:2x4x4")
    return Launch(**(FIELDS | fields | changes))


V5E = dict(topology="v5e:2x4", zone="us-west4-a")
V5P = dict(topology="v5p:2x4x4")
V6E = dict(topology="v6e:16x16", zone="us-east5-b")
TPU7X = dict(topology="tpu7x:2x4x4", zone="us-central1-c")
KEPT = dict(lifetime="until_deleted")
QUEUED = dict(backend="queued_resource", **KEPT)
RESERVED = dict(capacity="reservation", reservation="my-reservation")
OWN = dict(
    config="/path/to/configs/my_config.py", package="tpu-embedding[tpu,train]==0.1.0"
)

PUBLIC = dict(config="dlrm", package="tpu-embedding[tpu,train]==0.1.0")

# The number of a name counts TensorCores, as in the names of the products.
LAUNCHES = {
    "gke_v5e_8": make_launch(**V5E, capacity="spot"),
    "gke_v5e_8_without_files": make_launch(**V5E, **PUBLIC),
    "gke_v5p_64": make_launch(**V5P, **RESERVED, subnetwork="my-subnetwork"),
    "gke_v6e_256_two_slices": make_launch(**V6E, slices=2, cluster="shared"),
    "gke_tpu7x_64": make_launch(**TPU7X),
    "gke_tpu7x_8_kept": make_launch(topology="tpu7x:2x2x1", **KEPT, **OWN),
    "queued_resource_v5e_8": make_launch(**V5E, **QUEUED, capacity="spot"),
    "queued_resource_v4_64": make_launch(topology="v4:2x4x4", **QUEUED, **OWN),
    "queued_resource_v5p_64": make_launch(**V5P, **QUEUED),
    "queued_resource_v6e_256_two_slices": make_launch(
        **V6E, **QUEUED, slices=2, capacity="reservation"
    ),
}
RECORDED = (
    "gke_tpu7x_64",
    "gke_v6e_256_two_slices",
    "queued_resource_v4_64",
    "queued_resource_v6e_256_two_slices",
)


if __name__ == "__main__":
    for name in RECORDED:
        (FOLDER / f"{name}.sh").write_text(make_script(LAUNCHES[name]) + "\n")
