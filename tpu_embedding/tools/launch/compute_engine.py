"""Launches on Compute Engine: a managed instance group that forms a TPU slice.

Sources: docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice,
docs.cloud.google.com/tpu/docs/spot-compute and
docs.cloud.google.com/compute/docs/instance-groups/about-bulk-mode.
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
from tpu_embedding.tools.launch.settings import COORDINATOR_PORT, Launch
from tpu_embedding.tools.launch.steps import (
    FIRST_HOST,
    HOST,
    HOST_INDEX,
    NUM_HOSTS,
    Command,
    Do,
    Expected,
    Probe,
    Step,
    gcloud,
)
from tpu_embedding.tools.launch.workload_policy import (
    create_policy,
    delete_policy,
    policy_name,
)

_IMAGE_PROJECT: Final = "ubuntu-os-accelerator-images"
_WAIT_SECONDS: Final = 3600


def create(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that create the slice and wait for it."""
    policy = (create_policy(launch),) if _has_policy(launch) else ()
    return (
        check_fit(launch),
        check_zone(launch),
        check_account(launch),
        *create_bucket(launch),
        *policy,
        _create_template(launch),
        _create_group(launch),
        Do(
            "wait for the machines",
            _group_command(
                launch, "wait-until", stable=True, timeout=str(_WAIT_SECONDS)
            ),
        ),
    )


def set_up(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that install the package on all machines."""
    return hosts.set_up(launch, _shells(launch))


def run(launch: Launch, program: Program, options: tuple[str, ...]) -> tuple[Step, ...]:
    """Returns the steps that start a program on all machines.

    The machines of a group have no numbers: their order by name decides.
    """
    if program == "train" and launch.num_hosts > 1:
        options += ("--coordinator", f"{FIRST_HOST}:{COORDINATOR_PORT}")
        options += ("--num-processes", NUM_HOSTS, "--process-id", HOST_INDEX)
    return hosts.run(launch, _shells(launch), program, options)


def follow(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that show the log of the first machine."""
    return hosts.follow(_shells(launch), program)


def status(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that show the group and its machines."""
    return (
        Do(
            "show the group",
            _group_command(launch, "describe", format="yaml(targetSize,status)"),
        ),
        Do("show the machines", _group_command(launch, "list-instances")),
    )


def stop(launch: Launch, program: Program) -> tuple[Step, ...]:
    """Returns the steps that stop a program on all machines."""
    return hosts.stop(launch, _shells(launch), program)


def delete(launch: Launch) -> tuple[Step, ...]:
    """Returns the steps that delete the machines, their template and their policy."""
    policy = (delete_policy(launch),) if _has_policy(launch) else ()
    return (
        Do(
            "delete the machines",
            _group_command(launch, "delete", quiet=True),
            "exists",
            _group_probe(launch),
        ),
        Do(
            "delete the instance template",
            _template_command(launch, "delete", quiet=True),
            "exists",
            _template_probe(launch),
        ),
        *policy,
    )


def _has_policy(launch: Launch) -> bool:
    return launch.facts.num_hosts > 1


def _shells(launch: Launch) -> Shells:
    place = {"project": launch.project, "zone": launch.zone}
    ssh = gcloud("compute", "ssh", HOST, **place, quiet=True)
    names = _group_command(launch, "list-instances", format="value(name)")
    return Shells(hosts=names, num_hosts=launch.facts.num_hosts, ssh=ssh, ssh_first=ssh)


def _template_command(launch: Launch, verb: str, **flags: str | bool | None) -> Command:
    return gcloud(
        "compute",
        "instance-templates",
        verb,
        launch.name,
        project=launch.project,
        **flags,
    )


def _template_probe(launch: Launch, *expected: Expected) -> Probe:
    command = _template_command(launch, "describe", format="json")
    return Probe(f"instance template {launch.name}", command, expected)


def _create_template(launch: Launch) -> Step:
    facts = launch.facts
    model = {
        "on_demand": "STANDARD",
        "spot": "SPOT",
        "reservation": "RESERVATION_BOUND",
        "flex_start": "FLEX_START",
    }[launch.capacity]
    seconds = launch.lifetime_seconds
    ends = seconds is not None or launch.capacity in ("spot", "reservation")
    reserved = launch.capacity == "reservation"
    command = _template_command(
        launch,
        "create",
        machine_type=facts.machine_type,
        image_project=_IMAGE_PROJECT,
        image_family=facts.image_family,
        boot_disk_size="200GB",
        boot_disk_type=facts.boot_disk_type or None,
        maintenance_policy="TERMINATE",
        provisioning_model=model,
        reservation_affinity="specific" if reserved else None,
        reservation=launch.reservation or None,
        max_run_duration=None if seconds is None else f"{seconds}s",
        instance_termination_action="DELETE" if ends else None,
        service_account=launch.service_account,
        scopes="cloud-platform",
        **_network_flags(launch),
    )
    probe = _template_probe(
        launch,
        Expected("properties.machineType", facts.machine_type),
        Expected("properties.scheduling.provisioningModel", model),
    )
    return Do("create the instance template", command, "missing", probe)


def _network_flags(launch: Launch) -> dict[str, str]:
    if not launch.subnetwork:
        return {"network": launch.network}
    region = f"projects/{launch.project}/regions/{launch.region}"
    return {"subnet": f"{region}/subnetworks/{launch.subnetwork}"}


def _group_command(launch: Launch, verb: str, **flags: str | bool | None) -> Command:
    return gcloud(
        "compute",
        "instance-groups",
        "managed",
        verb,
        launch.name,
        project=launch.project,
        zone=launch.zone,
        **flags,
    )


def _group_probe(launch: Launch, *expected: Expected) -> Probe:
    command = _group_command(launch, "describe", format="json")
    return Probe(f"instance group {launch.name}", command, expected)


def _create_group(launch: Launch) -> Step:
    size = str(launch.facts.num_hosts)
    flags: dict[str, str | bool | None] = {}
    if _has_policy(launch):
        # All machines at once, or none: a part of a slice is of no use.
        policy = f"regions/{launch.region}/resourcePolicies/{policy_name(launch)}"
        flags = {
            "target_size_policy_mode": "bulk",
            "workload_policy": f"projects/{launch.project}/{policy}",
        }
    command = _group_command(
        launch,
        "create",
        size=size,
        template=launch.name,
        default_action_on_vm_failure="do-nothing",
        **flags,
    )
    probe = _group_probe(
        launch,
        Expected("targetSize", size),
        Expected("instanceTemplate", launch.name),
    )
    return Do("create the machines", command, "missing", probe)
