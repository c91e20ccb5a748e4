"""Launches on Google Kubernetes Engine with JobSet: one node pool per slice.

Sources: cloud.google.com/kubernetes-engine/docs/how-to/tpus and .../tpu-multislice, and
for workload policies the pages that `slices.json` names.
"""

from typing import Final

from tpu_embedding.tools.launch.common_steps import (
    check_account,
    check_fit,
    check_zone,
    create_bucket,
    upload_files,
)
from tpu_embedding.tools.launch.job_set import (
    CHECKSUM,
    JOB_SET_LABEL,
    KUBERNETES_ACCOUNT,
    job_set,
    job_set_name,
    service_account,
    starts_empty,
    to_yaml,
)
from tpu_embedding.tools.launch.programs import Program
from tpu_embedding.tools.launch.settings import Launch
from tpu_embedding.tools.launch.steps import (
    Command,
    Do,
    Expected,
    Probe,
    Step,
    gcloud,
    kubectl,
)
from tpu_embedding.tools.launch.workload_policy import (
    create_policy,
    delete_policy,
    policy_name,
)

JOB_SET_VERSION: Final = "v0.8.1"
_JOB_SET_MANIFESTS: Final = (
    "https://github.com/kubernetes-sigs/jobset/releases/download/"
    f"{JOB_SET_VERSION}/manifests.yaml"
)


def create(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that create the cluster and the node pools."""
    return (
        check_fit(launch),
        check_zone(launch),
        check_account(launch),
        *create_bucket(launch),
        _create_cluster(launch),
        _get_credentials(launch),
        _install_job_set(launch),
        *_accounts(launch),
        *_create_policy(launch),
        *(_create_node_pool(launch, name) for name in launch.slice_names),
    )


def set_up(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that provide the package; pods install it as they start."""
    return upload_files(launch)


def run(launch: Launch, program: Program, options: tuple[str, ...]) -> tuple[Step, ...]:
    """Returns the steps that start a program on all hosts."""
    manifest = job_set(launch, program, options)
    context, name = _context(launch), job_set_name(launch, program)
    start = kubectl("apply", "--filename=-", context=context, stdin=to_yaml(manifest))
    checksum = manifest["metadata"]["annotations"][CHECKSUM]
    probe = Probe(
        f"job {name}",
        kubectl("get", "jobset", name, context=context, output="json"),
        (
            Expected("status.terminalState", "missing"),
            Expected(f"metadata.annotations.{CHECKSUM}", checksum),
        ),
        "run tpu-embedding launch stop, then run it again",
    )
    return (
        _get_credentials(launch),
        Do(f"start {program} on all hosts", start, "missing", probe),
    )


def follow(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that show the log of the first host until it ends."""
    context = _context(launch)
    selector = (
        f"{JOB_SET_LABEL}={job_set_name(launch, program)},"
        "jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    )
    return (
        _get_credentials(launch),
        Do(
            "follow the log of the first host",
            kubectl(
                "logs",
                context=context,
                selector=selector,
                container="tpu-embedding",
                tail="-1",
                follow=True,
            ),
        ),
    )


def status(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that show node pools, jobs and pods."""
    context = _context(launch)
    return (
        _get_credentials(launch),
        Do(
            "show the node pools",
            gcloud(
                "container",
                "node-pools",
                "list",
                project=launch.project,
                location=launch.zone,
                cluster=launch.cluster_name,
            ),
        ),
        Do("show the jobs", kubectl("get", "jobsets", context=context, output="wide")),
        Do("show the pods", kubectl("get", "pods", context=context, output="wide")),
    )


def stop(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that stop a program; the nodes stay for a while."""
    name = job_set_name(launch, program)
    return (
        _get_credentials(launch),
        Do(
            f"stop {program} on all hosts",
            kubectl(
                "delete",
                "jobset",
                name,
                context=_context(launch),
                ignore_not_found=True,
            ),
        ),
    )


def delete(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that delete the node pools and their policy."""
    pools = (_delete_node_pool(launch, name) for name in launch.slice_names)
    if not _uses_policy(launch):
        return tuple(pools)
    return (*pools, delete_policy(launch))


def delete_cluster(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that delete the cluster."""
    command = _cluster_command(launch, "delete", quiet=True)
    return (Do("delete the cluster", command, "exists", _cluster_probe(launch)),)


def _context(launch: Launch) -> str:
    """Returns the name that `get-credentials` gives to the cluster."""
    return f"gke_{launch.project}_{launch.zone}_{launch.cluster_name}"


def _cluster_command(launch: Launch, verb: str, **flags: str | bool | None) -> Command:
    return gcloud(
        "container",
        "clusters",
        verb,
        launch.cluster_name,
        project=launch.project,
        location=launch.zone,
        **flags,
    )


def _cluster_probe(launch: Launch) -> Probe:
    return Probe(
        f"cluster {launch.cluster_name}",
        _cluster_command(launch, "describe", format="json"),
    )


def _create_cluster(launch: Launch) -> Step:
    probe = _cluster_probe(launch)
    pool = f"{launch.project}.svc.id.goog"
    expected = (
        Expected("workloadIdentityConfig.workloadPool", pool),
        Expected("addonsConfig.gcsFuseCsiDriverConfig.enabled", "true"),
    )
    command = _cluster_command(
        launch,
        "create",
        network=launch.network,
        subnetwork=launch.subnetwork or None,
        release_channel="regular",
        machine_type="e2-standard-4",
        num_nodes="1",
        workload_pool=pool,
        addons="GcsFuseCsiDriver",
    )
    probe = Probe(probe.resource, probe.command, expected)
    return Do("create the cluster", command, "missing", probe)


def _get_credentials(launch: Launch) -> Step:
    return Do(
        "let kubectl reach the cluster", _cluster_command(launch, "get-credentials")
    )


def _install_job_set(launch: Launch) -> Step:
    context = _context(launch)
    return Do(
        "install the JobSet controller",
        kubectl(
            "apply",
            "--server-side",
            f"--filename={_JOB_SET_MANIFESTS}",
            context=context,
        ),
        "missing",
        Probe(
            "JobSet controller",
            kubectl(
                "get",
                "customresourcedefinition",
                "jobsets.jobset.x-k8s.io",
                context=context,
                output="json",
            ),
        ),
    )


def _accounts(launch: Launch) -> tuple[Step, ...]:
    member = (
        f"serviceAccount:{launch.project}.svc.id.goog[default/{KUBERNETES_ACCOUNT}]"
    )
    return (
        Do(
            "create the account of the pods",
            kubectl(
                "apply",
                "--filename=-",
                context=_context(launch),
                stdin=to_yaml(service_account(launch)),
            ),
        ),
        Do(
            "let the pods act as the service account",
            gcloud(
                "iam",
                "service-accounts",
                "add-iam-policy-binding",
                launch.service_account,
                project=launch.project,
                member=member,
                role="roles/iam.workloadIdentityUser",
            ),
        ),
    )


def _uses_policy(launch: Launch) -> bool:
    facts = launch.facts
    return facts.topology_source == "workload_policy" and facts.num_hosts > 1


def _create_policy(launch: Launch) -> tuple[Step, ...]:
    return (create_policy(launch),) if _uses_policy(launch) else ()


def _node_pool_command(
    launch: Launch, verb: str, name: str, **flags: str | bool | None
) -> Command:
    return gcloud(
        "container",
        "node-pools",
        verb,
        name,
        project=launch.project,
        location=launch.zone,
        cluster=launch.cluster_name,
        **flags,
    )


def _create_node_pool(launch: Launch, name: str) -> Step:
    facts = launch.facts
    flags: dict[str, str | bool | None] = {
        "machine_type": facts.machine_type,
        "num_nodes": "0" if starts_empty(launch) else str(facts.num_hosts),
        "service_account": launch.service_account,
        "scopes": "cloud-platform",
        "workload_metadata": "GKE_METADATA",
    }
    expected = [Expected("config.machineType", facts.machine_type)]
    if _uses_policy(launch):
        flags["placement_policy"] = policy_name(launch)
        expected.append(Expected("placementPolicy.policyName", policy_name(launch)))
    elif facts.num_hosts > 1:
        flags["tpu_topology"] = facts.grid
        expected.append(Expected("placementPolicy.tpuTopology", facts.grid))
    if launch.lifetime_seconds is not None:
        flags |= {
            "enable_autoscaling": True,
            "min_nodes": "0",
            "max_nodes": str(facts.num_hosts),
        }
    flags |= _capacity_flags(launch)
    spot = str(launch.capacity == "spot").lower()
    expected.append(Expected("config.spot", spot))
    return Do(
        "create the node pool of a slice",
        _node_pool_command(launch, "create", name, **flags),
        "missing",
        _node_pool_probe(launch, name, tuple(expected)),
    )


def _capacity_flags(launch: Launch) -> dict[str, str | bool | None]:
    match launch.capacity:
        case "spot":
            return {"spot": True}
        case "reservation":
            return {
                "reservation_affinity": "specific",
                "reservation": launch.reservation,
            }
        case "flex_start":
            return {
                "flex_start": True,
                "max_run_duration": f"{launch.lifetime_seconds}s",
                "location_policy": "ANY",
                "reservation_affinity": "none",
            }
        case "on_demand":
            return {}


def _node_pool_probe(
    launch: Launch, name: str, expected: tuple[Expected, ...] = ()
) -> Probe:
    command = _node_pool_command(launch, "describe", name, format="json")
    return Probe(f"node pool {name}", command, expected)


def _delete_node_pool(launch: Launch, name: str) -> Step:
    return Do(
        "delete the node pool of a slice",
        _node_pool_command(launch, "delete", name, quiet=True),
        "exists",
        _node_pool_probe(launch, name),
    )
