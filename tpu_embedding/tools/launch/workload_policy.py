"""The workload policy of a slice of several hosts, which states its topology.

See gcloud's reference, `gcloud compute resource-policies create workload-policy`.
"""

from tpu_embedding.tools.launch.settings import Launch
from tpu_embedding.tools.launch.steps import Command, Do, Expected, Probe, Step, gcloud


def policy_name(launch: Launch) -> str:
    """Returns the name of the policy."""
    return f"{launch.name}-topology"


def create_policy(launch: Launch) -> Step:
    """Returns the step that creates the policy."""
    grid = launch.facts.grid
    command = _policy_command(
        launch,
        "create",
        "workload-policy",
        type="HIGH_THROUGHPUT",
        accelerator_topology=grid,
    )
    expected = Expected("workloadPolicy.acceleratorTopology", grid)
    probe = _probe(launch, expected)
    return Do("create the workload policy", command, "missing", probe)


def delete_policy(launch: Launch) -> Step:
    """Returns the step that deletes the policy."""
    command = _policy_command(launch, "delete", quiet=True)
    return Do("delete the workload policy", command, "exists", _probe(launch))


def _probe(launch: Launch, *expected: Expected) -> Probe:
    command = _policy_command(launch, "describe", format="json")
    return Probe(f"workload policy {policy_name(launch)}", command, expected)


def _policy_command(launch: Launch, *verb: str, **flags: str | bool | None) -> Command:
    return gcloud(
        "compute",
        "resource-policies",
        *verb,
        policy_name(launch),
        project=launch.project,
        region=launch.region,
        **flags,
    )
