"""Turns a launch into one script for bash, from the templates in `templates/`.

A value of the user enters a script in two ways only: quoted by `shlex`, or as a JSON
string in the manifest, which is valid YAML. `settings` refuses text of several lines,
so no value ends a here-document.
"""

import importlib.resources
import json
import pathlib
import re
import shlex
import string
import textwrap
from typing import Any, Final, Literal, get_args

from tpu_embedding.distributed.cluster_detection import COORDINATOR_PORT
from tpu_embedding.paths import local_path
from tpu_embedding.tools.launch.settings import UNTIL_DELETED, Launch

Program = Literal["train", "doctor"]
PROGRAMS: Final[tuple[Program, ...]] = get_args(Program)

_MOUNT: Final = "/mnt/bucket"
"""Path of the bucket on every host."""

_MAX_WIDTH: Final = 88

_EXTRAS: Final = "[tpu,train]"
"""Extras of the package that a TPU host needs."""

_DELETE_CLUSTER: Final = """\
    unless_gone gcloud container clusters delete "$cluster" \\
        --project="$project" --location="$zone" --quiet || status=1"""
_DELETE_NODE_POOLS: Final = """\
    for slice in "${slices[@]}"; do
        unless_gone gcloud container node-pools delete "$slice" \\
            --cluster="$cluster" --project="$project" --location="$zone" \\
            --quiet || status=1
    done"""
_DELETE_POLICY: Final = """\
    unless_gone gcloud compute resource-policies delete "$name-topology" \\
        --project="$project" --region="$region" --quiet || status=1"""


def make_script(launch: Launch, program: Program = "train") -> str:
    """Returns the script that creates the machines of a launch and starts a program.

    Args:
      launch: the launch.
      program: `"train"`, or `"doctor"` to check the hosts.
    """
    if launch.backend == "gke":
        return _gke(launch, program)
    return _queued_resource(launch, program)


def what_deletes(launch: Launch) -> str:
    """Returns the sentences that say what ends the cost of the machines."""
    if launch.lifetime == UNTIL_DELETED:
        return (
            "Nothing but `bash FILE delete`: neither the end of the run nor an error."
        )
    text = (
        f"Each start of the job ends after {launch.lifetime}. The cluster's "
        "autoscaler deletes a machine about 10 minutes after its last job."
    )
    if not launch.cluster:
        text += " The cluster itself stays, and costs a fee, until `bash FILE delete`."
    return text


def _queued_resource(launch: Launch, program: Program) -> str:
    flags = [f"--node-id={launch.slice_names[0]}"]
    if launch.slices > 1:
        # Nodes are NAME-0, NAME-1 and so on, as `slice_names`.
        flags = [f"--node-count={launch.slices}", f"--node-prefix={launch.name}"]
    if launch.capacity != "on_demand":
        flags.append("--spot" if launch.capacity == "spot" else "--reserved")
    variables = {
        "product": launch.facts.product,
        "runtime_version": launch.facts.runtime_version,
        "flags": [*flags, *_network_flags(launch)],
        "program": program,
        "host_script": f"gs://{launch.bucket}/{launch.name}/launch/host_{program}.sh",
    }
    restarts = program == "train" and launch.restarts
    options = ("--restarts", str(launch.restarts)) if restarts else ()
    on_host = {
        "bucket": launch.bucket,
        "requirement": _requirement(launch),
        "program": program,
        "results": f"{_folder(launch)}/results",
        "verdicts": f"{_folder(launch)}/verdicts",
        "arguments": [*_arguments(launch, program), *options],
    }
    host_script = _fill("host.sh", variables=_assignments(on_host))
    return _fill(
        "queued_resource.sh",
        head=_head(launch, program, variables),
        bucket=_fill("bucket.sh"),
        uploads=_uploads(launch),
        host_script=host_script,
    )


def _gke(launch: Launch, program: Program) -> str:
    facts = launch.facts
    cluster = launch.cluster or launch.name
    by_policy = facts.topology_from_policy and facts.num_hosts > 1
    variables = {
        "product": facts.product,
        "cluster": cluster,
        # The name that get-credentials gives to the cluster.
        "context": f"gke_{launch.project}_{launch.zone}_{cluster}",
        "job": _job_name(launch, program),
        "jobs": [_job_name(launch, each) for each in PROGRAMS],
        "flags": _node_pool_flags(launch, by_policy),
    }
    if not launch.cluster:
        variables["network_flags"] = _network_flags(launch)
    delete = [_DELETE_NODE_POOLS if launch.cluster else _DELETE_CLUSTER]
    if by_policy:
        delete.append(_DELETE_POLICY)
    return _fill(
        "gke.sh",
        head=_head(launch, program, variables),
        bucket=_fill("bucket.sh"),
        uploads=_uploads(launch),
        create_cluster="" if launch.cluster else _fill("cluster.sh"),
        create_policy=_fill("policy.sh", grid=facts.grid) if by_policy else "",
        delete="\n".join(delete),
        manifest=_manifest(launch, program),
    )


def _node_pool_flags(launch: Launch, by_policy: bool) -> list[str]:
    facts = launch.facts
    flags = [f"--num-nodes={facts.num_hosts}"]
    if by_policy:
        flags.append(f"--placement-policy={launch.name}-topology")
    elif facts.num_hosts > 1:
        flags.append(f"--tpu-topology={facts.grid}")
    if launch.lifetime != UNTIL_DELETED:
        flags += ["--enable-autoscaling", "--min-nodes=0"]
        flags.append(f"--max-nodes={facts.num_hosts}")
    if launch.capacity == "spot":
        flags.append("--spot")
    if launch.capacity == "reservation":
        flags.append("--reservation-affinity=specific")
        flags.append(f"--reservation={launch.reservation}")
    return flags


def _manifest(launch: Launch, program: Program) -> str:
    """Returns the pods' account and the JobSet, as YAML.

    GKE's webhook sets the variables by which the TPU runtime finds hosts and slices,
    from the labels of JobSet; see
    cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice.
    """
    facts, folder = launch.facts, _folder(launch)
    selector = {
        "cloud.google.com/gke-tpu-accelerator": facts.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": facts.grid,
    }
    deadline = f"activeDeadlineSeconds: {launch.lifetime_seconds}"
    # Kubernetes reads $(NAME) as a variable of the container, and $$ as $.
    arguments = [_requirement(launch), *_arguments(launch, program)]
    quoted = [_as_yaml(each.replace("$", "$$")) for each in arguments]
    return _fill(
        "job_set.yaml",
        name=_as_yaml(launch.name),
        service_account=_as_yaml(launch.service_account),
        job=_as_yaml(_job_name(launch, program)),
        restarts=launch.restarts if program == "train" else 0,
        num_slices=launch.slices,
        num_hosts=facts.num_hosts,
        deadline="" if launch.lifetime == UNTIL_DELETED else deadline,
        node_selector=_as_yaml(selector),
        arguments=textwrap.indent("\n".join(f"- {each}" for each in quoted), " " * 14),
        results=f"{folder}/results",
        verdicts=f"{folder}/verdicts",
        chips_per_host=facts.chips_per_host,
        coordinator_port=COORDINATOR_PORT,
        bucket=_as_yaml(launch.bucket),
    )


def _as_yaml(value: Any) -> str:
    """Returns a value as JSON without surrogate pairs, which YAML lacks."""
    return json.dumps(value, ensure_ascii=False)


def _arguments(launch: Launch, program: Program) -> list[str]:
    """Returns the arguments of `tpu-embedding` on a host."""
    if program == "doctor":
        # With several slices, the devices of all of them are found.
        expected = ["--expect", launch.topology] if launch.slices == 1 else []
        return ["doctor", *expected]
    arguments = ["train", _on_host(launch, launch.config)]
    arguments += ["--output-dir", f"{_folder(launch)}/results"]
    if launch.data_dir:
        arguments += ["--data-dir", f"{_MOUNT}/{launch.data_dir}"]
    for setting in launch.settings:
        arguments += ["--set", setting]
    return arguments


def _folder(launch: Launch) -> str:
    """Returns the folder of the run in the bucket, as hosts see it."""
    return f"{_MOUNT}/{launch.name}"


def _job_name(launch: Launch, program: Program) -> str:
    return launch.name if program == "train" else f"{launch.name}-{program}"


def _network_flags(launch: Launch) -> list[str]:
    flags = [f"--network={launch.network}"]
    return [*flags, f"--subnetwork={launch.subnetwork}"] if launch.subnetwork else flags


def _requirement(launch: Launch) -> str:
    """Returns what pip installs on a host."""
    if launch.package in launch.own_files:
        return _on_host(launch, launch.package) + _EXTRAS
    return launch.package


def _on_host(launch: Launch, path: str) -> str:
    """Returns the path of an uploaded file on a host; other names stay."""
    if path not in launch.own_files:
        return path
    return f"{_folder(launch)}/launch/{pathlib.PurePath(path).name}"


def _uploads(launch: Launch) -> str:
    """Returns the commands that copy a wheel and a config of the user's own."""
    return "\n".join(
        f"gcloud storage cp {shlex.quote(str(local_path(path).absolute()))} "
        '"gs://$bucket/$name/launch/" --project="$project"'
        for path in launch.own_files
    )


def _head(launch: Launch, program: Program, variables: dict[str, Any]) -> str:
    verb = "Trains" if program == "train" else "Checks the hosts of"
    shared = {
        "name": launch.name,
        "project": launch.project,
        "zone": launch.zone,
        "region": launch.region,
        "bucket": launch.bucket,
        "service_account": launch.service_account,
        "slices": list(launch.slice_names),
    }
    hosts = launch.slices * launch.facts.num_hosts
    return _fill(
        "head.sh",
        title=f"{verb} {launch.name}: {launch.slices} x {launch.topology}, {hosts} "
        f"hosts, {launch.capacity}, in {launch.zone}.",
        what_deletes=textwrap.fill(
            what_deletes(launch),
            _MAX_WIDTH,
            initial_indent="# ",
            subsequent_indent="# ",
        ),
        variables=_assignments(shared | variables),
    )


def _assignments(variables: dict[str, Any]) -> str:
    """Returns assignments for bash; a list becomes an array."""
    return "\n".join(
        _assign_array(name, value)
        if isinstance(value, list)
        else f"{name}={shlex.quote(value)}"
        for name, value in variables.items()
    )


def _assign_array(name: str, values: list[str]) -> str:
    line = f"{name}=({shlex.join(values)})"
    if len(line) <= _MAX_WIDTH:
        return line
    return "\n    ".join([f"{name}=(", *map(shlex.quote, values)]) + "\n)"


class _Template(string.Template):
    """Text with placeholders `%%name`, which bash does not use."""

    delimiter = "%%"


def _fill(template: str, **values: Any) -> str:
    """Returns a template's text with its placeholders filled.

    Args:
      template: file in `templates/`.
      **values: the values by placeholder. A line with an empty value alone is left out.
    """
    files = importlib.resources.files("tpu_embedding.tools.launch")
    text = (files / "templates" / template).read_text(encoding="utf-8")
    for name, value in values.items():
        if value == "":
            text = re.sub(rf"(?m)^ *%%{name}\n", "", text)
    return _Template(text).substitute(values).rstrip()
