"""The JobSet that runs a launch on GKE.

One replicated job holds all slices: each of its jobs is a slice, and each pod a host.
GKE's webhook then sets `TPU_WORKER_ID`, `TPU_WORKER_HOSTNAMES`, and for several slices
`MEGASCALE_*`, from the labels of JobSet; see
cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice and
github.com/kubernetes-sigs/jobset.
"""

import zlib
from typing import Any, Final

import yaml

from tpu_embedding.kernel_verdicts import DIRECTORY_VARIABLE
from tpu_embedding.tools.launch.programs import (
    MOUNT,
    Program,
    output_dir,
    program_arguments,
    read_script,
    requirement,
    verdict_dir,
)
from tpu_embedding.tools.launch.settings import COORDINATOR_PORT, Launch

KUBERNETES_ACCOUNT: Final = "tpu-embedding"
"""Kubernetes service account of the pods, which acts as the launch's account."""

REPLICATED_JOB: Final = "slice"
CHECKSUM: Final = "tpu-embedding-checksum"
"""Annotation that tells if a job has the settings of a launch."""

JOB_SET_LABEL: Final = "jobset.sigs.k8s.io/jobset-name"

_JOB_SET: Final = "jobset.sigs.k8s.io"
_TPU_PORT: Final = 8471
"""Port of the TPU runtime between the hosts of a slice."""
_MEGASCALE_PORT: Final = 8080
"""Port of the TPU runtime between slices."""

_DAY_SECONDS: Final = 24 * 3600
_GRACE_SECONDS: Final = 300
"""Time to save a checkpoint after SIGTERM."""


def job_set_name(launch: Launch, program: Program) -> str:
    """Returns the name of the JobSet of a program."""
    return launch.name if program == "train" else f"{launch.name}-{program}"


def job_set(
    launch: Launch, program: Program = "train", options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns the JobSet of a program, as a Kubernetes object.

    Args:
      launch: a launch with backend `"gke"`.
      program: the program.
      options: further options of the program.
    """
    name = job_set_name(launch, program)
    spec = _spec(launch, program, options)
    annotations = {CHECKSUM: f"{zlib.crc32(to_yaml(spec).encode()):08x}"}
    if not starts_empty(launch):
        # One slice per node pool: no two slices share one, and none is split.
        topology = f"alpha.{_JOB_SET}/exclusive-topology"
        annotations[topology] = "cloud.google.com/gke-nodepool"
    labels = {"app": "tpu-embedding"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "labels": labels, "annotations": annotations},
        "spec": spec,
    }


def _spec(launch: Launch, program: Program, options: tuple[str, ...]) -> dict[str, Any]:
    return {
        # A headless service; pods are NAME-slice-JOB-POD.NAME.
        "network": {
            "enableDNSHostnames": True,
            "subdomain": job_set_name(launch, program),
        },
        "ttlSecondsAfterFinished": _DAY_SECONDS,
        "failurePolicy": {
            "maxRestarts": launch.restarts if program == "train" else 0,
            "rules": [
                {
                    "name": "lifetimeIsOver",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["DeadlineExceeded"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": REPLICATED_JOB,
                "replicas": launch.slices,
                "template": {"spec": _job(launch, program, options)},
            }
        ],
    }


def starts_empty(launch: Launch) -> bool:
    """Returns True if the node pool has no nodes until a job waits for them.

    JobSet's exclusive placement must then not be used: it creates the pods of a slice
    only once their first has a node, and the autoscaler would see a slice of one pod.
    The pool is named instead.
    """
    return launch.capacity == "flex_start"


def _job(launch: Launch, program: Program, options: tuple[str, ...]) -> dict[str, Any]:
    facts = launch.facts
    job: dict[str, Any] = {
        "parallelism": facts.num_hosts,
        "completions": facts.num_hosts,
        "completionMode": "Indexed",
        # A pod that fails ends its job, so that all slices restart together.
        "backoffLimit": 0,
    }
    if launch.lifetime_seconds is not None:
        job["activeDeadlineSeconds"] = launch.lifetime_seconds
    job["template"] = {
        "metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}},
        "spec": _pod(launch, program, options),
    }
    return job


def _pod(launch: Launch, program: Program, options: tuple[str, ...]) -> dict[str, Any]:
    facts = launch.facts
    selector = {
        "cloud.google.com/gke-tpu-accelerator": facts.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": facts.grid,
    }
    if starts_empty(launch):
        selector["cloud.google.com/gke-nodepool"] = launch.slice_names[0]
    chips = {"google.com/tpu": str(facts.chips_per_host)}
    return {
        "serviceAccountName": KUBERNETES_ACCOUNT,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "nodeSelector": selector,
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"}
            for key in ("google.com/tpu", "cloud.google.com/gke-spot")
        ],
        "containers": [
            {
                "name": "tpu-embedding",
                "image": launch.image,
                "command": ["bash", "-c", read_script("pod.sh"), "pod.sh"],
                "args": [
                    requirement(launch),
                    output_dir(launch),
                    *program_arguments(launch, program, *options),
                ],
                "env": [
                    {
                        "name": "RESTART_ATTEMPT",
                        "valueFrom": {
                            "fieldRef": {
                                "fieldPath": "metadata.annotations"
                                f"['{_JOB_SET}/restart-attempt']"
                            }
                        },
                    },
                    {"name": DIRECTORY_VARIABLE, "value": verdict_dir(launch)},
                    {"name": "PYTHONUNBUFFERED", "value": "1"},
                ],
                "ports": [
                    {"containerPort": port}
                    for port in (_TPU_PORT, _MEGASCALE_PORT, COORDINATOR_PORT)
                ],
                "resources": {"requests": chips, "limits": chips},
                "volumeMounts": [{"name": "bucket", "mountPath": MOUNT}],
            }
        ],
        "volumes": [
            {
                "name": "bucket",
                "csi": {
                    "driver": "gcsfuse.csi.storage.gke.io",
                    "volumeAttributes": {
                        "bucketName": launch.bucket,
                        "mountOptions": "implicit-dirs",
                    },
                },
            }
        ],
    }


def service_account(launch: Launch) -> dict[str, Any]:
    """Returns the Kubernetes service account that acts as the launch's account.

    See cloud.google.com/kubernetes-engine/docs/how-to/workload-identity.
    """
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {
            "name": KUBERNETES_ACCOUNT,
            "annotations": {"iam.gke.io/gcp-service-account": launch.service_account},
        },
    }


class _BlockDumper(yaml.SafeDumper):
    """Writes a script as a block, and not as one quoted line."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True: a value that occurs twice is written twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _represent_text)


def to_yaml(kubernetes_object: dict[str, Any]) -> str:
    """Returns a Kubernetes object as YAML.

    Args:
      kubernetes_object: the object, of JSON values.
    """
    return yaml.dump(kubernetes_object, Dumper=_BlockDumper, sort_keys=False)
