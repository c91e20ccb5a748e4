"""Launches by the Cloud TPU API: queued resources, one node per slice.

This is the older way. Source: docs.cloud.google.com/tpu/docs/queued-resources.
"""

from typing import Final

from tpu_embedding.tools.launch import hosts
from tpu_embedding.tools.launch.common_steps import (
    check_account,
    check_fit,
    check_zone,
    create_bucket,
)
from tpu_embedding.tools.launch.hosts import Shells
from tpu_embedding.tools.launch.programs import Program
from tpu_embedding.tools.launch.settings import Launch
from tpu_embedding.tools.launch.steps import (
    HOST,
    Command,
    Do,
    Expected,
    Probe,
    Require,
    Step,
    gcloud,
)

_TPUS: Final = ("compute", "tpus")


def create(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that ask for the machines.

    They come when there is capacity; `status` tells.
    """
    return (
        check_fit(launch),
        check_zone(launch),
        check_account(launch),
        *create_bucket(launch),
        _create_resource(launch),
    )


def set_up(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that install the package on all machines."""
    return (_require_active(launch), *hosts.set_up(launch, _shells(launch)))


def run(launch: Launch, program: Program, options: tuple[str, ...]) -> tuple[Step, ...]:
    """Returns the steps that start a program on all machines.

    jax reads the hosts of all slices from the machines' metadata.
    """
    steps = hosts.run(launch, _shells(launch), program, options)
    return (_require_active(launch), *steps)


def follow(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that show the log of the first machine."""
    return hosts.follow(_shells(launch), program)


def status(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that show the request and its nodes."""
    nodes = gcloud(*_TPUS, "tpu-vm", "list", project=launch.project, zone=launch.zone)
    return (
        Do(
            "show the request",
            _resource_command(launch, "describe", format="yaml(state)"),
        ),
        Do("show the slices", nodes),
    )


def stop(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that stop a program on all machines."""
    return hosts.stop(launch, _shells(launch), program)


def delete(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that delete the request and its machines."""
    command = _resource_command(launch, "delete", force=True, quiet=True)
    return (Do("delete the machines", command, "exists", _probe(launch)),)


def _shells(launch: Launch) -> Shells:
    place = {"project": launch.project, "zone": launch.zone}
    tpu_ssh = (*_TPUS, "tpu-vm", "ssh", HOST)
    return Shells(
        hosts=launch.slice_names,
        num_hosts=launch.slices,
        ssh=gcloud(*tpu_ssh, **place, worker="all", quiet=True),
        ssh_first=gcloud(*tpu_ssh, **place, worker="0", quiet=True),
    )


def _resource_command(
    launch: Launch,
    verb: str,
    *,
    release: tuple[str, ...] = (),
    **flags: str | bool | None,
) -> Command:
    return gcloud(
        *release,
        *_TPUS,
        "queued-resources",
        verb,
        launch.name,
        project=launch.project,
        zone=launch.zone,
        **flags,
    )


def _probe(launch: Launch, *expected: Expected) -> Probe:
    command = _resource_command(launch, "describe", format="json")
    return Probe(f"queued resource {launch.name}", command, expected)


def _require_active(launch: Launch) -> Step:
    return Require(
        "check that the machines are there",
        _probe(launch, Expected("state.state", "ACTIVE")),
        "WAITING_FOR_RESOURCES and PROVISIONING need time. After SUSPENDED, which "
        "follows a preemption, and FAILED, delete the launch and create it again",
    )


def _create_resource(launch: Launch) -> Step:
    facts = launch.facts
    nodes: dict[str, str | bool | None] = {"node_id": launch.slice_names[0]}
    if launch.slices > 1:
        # Nodes are NAME-0, NAME-1 and so on, as `slice_names`.
        nodes = {"node_count": str(launch.slices), "node_prefix": launch.name}
    command = _resource_command(
        launch,
        "create",
        release=("alpha",) if launch.capacity == "flex_start" else (),
        accelerator_type=facts.accelerator_type,
        runtime_version=facts.runtime_version,
        **nodes,
        **_capacity_flags(launch),
        valid_until_duration=launch.request_valid_for,
        service_account=launch.service_account,
        scopes="cloud-platform",
        network=launch.network,
        subnetwork=launch.subnetwork or None,
    )
    expected = Expected("tpu.nodeSpec.node.acceleratorType", facts.accelerator_type)
    probe = _probe(launch, expected)
    return Do("ask for the machines", command, "missing", probe)


def _capacity_flags(launch: Launch) -> dict[str, str | bool | None]:
    match launch.capacity:
        case "spot":
            return {"spot": True}
        case "reservation":
            return {"reserved": True}
        case "flex_start":
            return {
                "provisioning_model": "flex-start",
                "max_run_duration": f"{launch.lifetime_seconds}s",
            }
        case "on_demand":
            return {}
