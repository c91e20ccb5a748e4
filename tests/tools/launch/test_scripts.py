"""Printed scripts: bash runs them on fakes, and gcloud and Kubernetes accept them."""

import functools
import itertools
import json
import pathlib
import re
import shlex
import subprocess
import sysconfig
import tempfile

import jsonschema
import pytest
import yaml

from tests.tools.launch.conftest import Cloud
from tests.tools.launch.fake_cloud import CONTROLLER
from tests.tools.launch.launches import FOLDER, LAUNCHES, RECORDED, make_launch
from tpu_embedding.tools.cli.command import make_parser
from tpu_embedding.tools.launch import PROGRAMS, make_script

SCHEMAS = pathlib.Path(__file__).parent / "schemas"
GCLOUD = json.loads((SCHEMAS / "gcloud.json").read_text())
KUBECTL = json.loads((SCHEMAS / "kubectl.json").read_text())
KUBERNETES = jsonschema.Draft202012Validator(
    json.loads((SCHEMAS / "kubernetes.json").read_text())
)
launches = pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
backends = pytest.mark.parametrize("name", ["gke_v5e_8", "queued_resource_v5e_8"])


@functools.cache
def history_of(launch):
    """Returns calls and resources after each use of a launch's script.

    It is run twice, its log is shown, and it is deleted twice.
    """
    with tempfile.TemporaryDirectory() as folder:
        cloud = Cloud(pathlib.Path(folder) / "cloud")
        if launch.cluster:
            cloud.change(resources=[f"container clusters {launch.cluster}"])
        history = []
        for words in ([], [], ["logs"], ["delete"], ["delete"]):
            result = cloud.run(launch, *words)
            assert result.returncode == 0, result.stderr
            history.append((cloud.take_calls(), cloud.resources))
        return history


def calls_of(launch):
    return [call for calls, _ in history_of(launch) for call in calls]


def here_document(text, end):
    """Returns what a script gives to a command between two lines with a word."""
    return text.partition(f"<<'{end}'\n")[2].partition(f"\n{end}\n")[0] + "\n"


def host_script(launch, program="train"):
    return here_document(make_script(launch, program), "END_OF_HOST_SCRIPT")


def manifests(launch, program="train"):
    """Returns the account and the JobSet of a launch on GKE."""
    text = make_script(launch, program)
    return yaml.safe_load_all(here_document(text, "END_OF_MANIFEST"))


def container(launch, program="train"):
    _, job_set = manifests(launch, program)
    (job,) = job_set["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]["containers"][0]


def container_arguments(launch):
    """Returns what the container gets: Kubernetes reads $$ as $."""
    return [each.replace("$$", "$") for each in container(launch)["args"]]


@pytest.mark.parametrize("name", RECORDED)
def test_the_script_is_as_recorded(name):
    recorded = (FOLDER / f"{name}.sh").read_text()
    assert make_script(LAUNCHES[name]) + "\n" == recorded


def test_every_record_has_its_launch():
    assert {path.stem for path in FOLDER.glob("*.sh")} == set(RECORDED)


def test_shellcheck_accepts_the_scripts(tmp_path):
    for (name, launch), program in itertools.product(LAUNCHES.items(), PROGRAMS):
        text = make_script(launch, program)
        (tmp_path / f"{name}_{program}.sh").write_text(text)
        if launch.backend == "gke":
            inner = f"#!/bin/bash\n{container(launch, program)['command'][2]}"
        else:
            inner = host_script(launch, program)
        (tmp_path / f"{name}_{program}_inner.sh").write_text(inner)
    shellcheck = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    files = list(tmp_path.glob("*.sh"))
    assert len(files) == 2 * len(LAUNCHES) * len(PROGRAMS)
    result = subprocess.run([shellcheck, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@launches
def test_a_script_creates_once_and_deletes_all_but_the_bucket(launch):
    (first, created), (second, kept), _, (_, left), (_, again) = history_of(launch)
    assert again == left
    assert any("create" in call for call in first)
    assert not any("create" in call for call in second)
    assert created == kept
    cluster = f"container clusters {launch.cluster or launch.name}"
    # Node pools and the controller go with their cluster.
    gone_with_it = {each for each in left if "node-pools" in each or "jobset" in each}
    if launch.cluster:
        assert left == {"storage buckets gs://my-bucket", cluster, CONTROLLER}
    else:
        assert left - gone_with_it == {"storage buckets gs://my-bucket"}
        assert cluster in created or launch.backend == "queued_resource"


@launches
def test_logs_are_those_of_the_first_host(launch):
    _, _, (calls, _), *_ = history_of(launch)
    if launch.backend == "gke":
        assert calls[-1][:2] == ["kubectl", "logs"]
        assert "jobset-name=dlrm,jobset.sigs.k8s.io/job-index=0,batch" in calls[-1][-2]
    else:
        assert "dlrm-0" in calls[-1]
        assert "--worker=0" in calls[-1]


@backends
def test_another_word_is_refused(name, cloud):
    result = cloud.run(LAUNCHES[name], "stop")
    assert result.returncode == 2
    assert result.stderr.startswith("usage: bash ")
    assert cloud.take_calls() == []


@backends
def test_nothing_is_created_where_the_zone_lacks_the_machines(name, cloud):
    cloud.change(failures=["-types describe"])
    result = cloud.run(LAUNCHES[name])
    assert result.returncode == 1
    assert cloud.resources == set()


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("gke_v5e_8", "node-pools create"),
        ("gke_v5e_8", "kubectl apply --context=gke_my-project_us-west4-a_dlrm --file"),
        ("queued_resource_v5e_8", "--worker=all"),
    ],
)
def test_a_failure_says_how_to_delete_the_machines(name, failure, cloud):
    cloud.change(failures=[failure])
    result = cloud.run(LAUNCHES[name])
    assert result.returncode == 1
    assert "Machines may exist, and cost money: bash " in result.stderr
    cloud.change(failures=[])
    assert cloud.run(LAUNCHES[name]).returncode == 0


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("launch", ["gke_v5e_8", "gke_v6e_256_two_slices"])
def test_delete_ends_both_programs_before_their_machines(launch, program, cloud):
    launch = LAUNCHES[launch]
    if launch.cluster:
        cloud.change(resources=[f"container clusters {launch.cluster}"])
    cloud.run(launch)
    cloud.take_calls()
    cloud.run(launch, "delete", program=program)
    connect, jobs, *machines = cloud.take_calls()
    assert "get-credentials" in connect
    assert jobs[:5] == ["kubectl", "delete", "jobset", "dlrm", "dlrm-doctor"]
    assert "--ignore-not-found" in jobs
    assert all("delete" in call for call in machines)


@backends
def test_a_deletion_that_is_refused_is_a_failure(name, cloud):
    assert cloud.run(LAUNCHES[name]).returncode == 0
    cloud.change(failures=["clusters delete", "queued-resources delete"])
    result = cloud.run(LAUNCHES[name], "delete")
    assert result.returncode == 1
    assert "PERMISSION_DENIED" in result.stderr


@backends
def test_deleting_without_gcloud_is_a_failure(name, cloud):
    script = f"gcloud() {{ no_such_program; }}\n{make_script(LAUNCHES[name])}"
    assert cloud.bash(script, "delete").returncode == 1


def test_a_run_that_cannot_be_stopped_is_told(cloud):
    launch = LAUNCHES["queued_resource_v6e_256_two_slices"]
    assert cloud.run(launch).returncode == 0
    cloud.change(failures=["ssh dlrm-0"])  # the first of two
    result = cloud.run(launch, "delete")
    assert result.returncode == 0
    assert "A run may not have saved its last steps." in result.stderr
    assert not any("queued-resources" in each for each in cloud.resources)
    assert "may not" not in cloud.run(launch, "delete").stderr


def test_a_deletion_that_fails_stops_no_other(cloud):
    launch = LAUNCHES["gke_tpu7x_64"]
    assert cloud.run(launch).returncode == 0
    cloud.change(failures=["delete jobset", "clusters delete"])
    assert cloud.run(launch, "delete").returncode == 1
    assert not any("policies" in each for each in cloud.resources)


def test_queued_machines_are_waited_for(cloud):
    launch = LAUNCHES["queued_resource_v5e_8"]
    cloud.change(states=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    assert cloud.run(launch).returncode == 0
    calls = cloud.take_calls()
    assert [call[0] for call in calls].count("sleep") == 2
    for state in ("FAILED", "SUSPENDED"):
        cloud.change(states=[state])
        result = cloud.run(launch)
        assert result.returncode == 1
        assert f"queued resource dlrm is {state}" in result.stdout


def test_a_job_that_has_ended_starts_again(cloud):
    launch = LAUNCHES["gke_v5e_8"]
    assert cloud.run(launch).returncode == 0
    assert not any("jobset" in call for call in cloud.take_calls() if "delete" in call)
    cloud.change(ended="Completed")
    assert cloud.run(launch).returncode == 0
    verbs = [call[1:3] for call in cloud.take_calls() if call[0] == "kubectl"]
    assert verbs[-2:] == [["delete", "jobset"], ["apply", verbs[-1][1]]]


HOSTILE = (
    "é😀 $(touch pwned) `touch pwned`; touch pwned #' \" \\ ${HOME} %%name $(PATH)"
)


@pytest.mark.parametrize("backend", ["gke", "queued_resource"])
@pytest.mark.parametrize("program", ["train", "doctor"])
def test_no_value_reaches_a_shell_unquoted(backend, program, cloud):
    launch = make_launch(
        backend=backend,
        lifetime="until_deleted",
        config=f"{HOSTILE}.py",
        settings=(f"a={HOSTILE}", "END_OF_MANIFEST=", "END_OF_HOST_SCRIPT="),
        data_dir=HOSTILE,
        package=f"{HOSTILE}.whl",
        network=HOSTILE,
        subnetwork=HOSTILE,
    )
    for words in ([], ["logs"], ["delete"]):
        assert cloud.run(launch, *words, program=program).returncode == 0
    calls = cloud.take_calls()
    assert any(f"--network={HOSTILE}" in call for call in calls)
    wheel = str(pathlib.Path(f"{HOSTILE}.whl").absolute())
    assert any(call[2:4] == ["cp", wheel] for call in calls)
    end = "END_OF_MANIFEST" if backend == "gke" else "END_OF_HOST_SCRIPT"
    document = here_document(make_script(launch, program), end)
    assert any(call[-1] == document for call in calls)
    assert not any(path.name == "pwned" for path in cloud.folder.rglob("*"))
    # kubectl refuses surrogates, which PyYAML reads.
    assert "\\u" not in make_script(launch, program)
    if program == "doctor":
        return
    if backend == "gke":
        arguments = container_arguments(launch)
        requirement = arguments.pop(0)
    else:
        show = 'printf "%s\\0" "$requirement" "${arguments[@]}"'
        result = cloud.bash(host_script(launch).removesuffix('"$1"\n') + show)
        requirement, *arguments = result.stdout.split("\0")[:-1]
    assert requirement == f"/mnt/bucket/dlrm/launch/{HOSTILE}.whl[tpu,train]"
    assert arguments[1] == f"/mnt/bucket/dlrm/launch/{HOSTILE}.py"
    assert f"/mnt/bucket/{HOSTILE}" in arguments
    assert f"a={HOSTILE}" in arguments
    assert not any(path.name == "pwned" for path in cloud.folder.rglob("*"))


def problems(argv):
    """Returns what gcloud's parser would refuse."""
    words = [word for word in argv[1:] if not word.startswith("--")]
    flags = dict(word.partition("=")[::2] for word in argv if word.startswith("--"))
    switches = {word for word in argv if word.startswith("--") and "=" not in word}
    name = max(
        (name for name in GCLOUD if words[: len(name.split())] == name.split()),
        key=len,
        default=None,
    )
    if name is None:
        return [f"unknown command {words}"]
    positionals = words[len(name.split()) :]
    found, known = [], set()

    def check(node, required):
        """Returns True if the argument, or one of the group, is given."""
        if "group" in node:
            given = [
                member for member in node["group"] if check(member, required=False)
            ]
            if node.get("mutex") and len(given) > 1:
                found.append(f"only one of {node['group']}")
            if given and not node.get("mutex"):
                for member in node["group"]:
                    if member not in given and member.get("required"):
                        found.append(f"{member} is missing")
            if not given and required:
                found.append(f"one of {node['group']} is missing")
            return bool(given)
        flag = node["name"]
        known.add(flag)
        if not flag.startswith("--"):
            return bool(positionals)
        if flag not in flags:
            if required:
                found.append(f"{flag} is missing")
            return False
        if (flag in switches) != node.get("switch", False):
            found.append(f"{flag} must{' not' * (flag in switches)} be a switch")
        if "choices" in node and flags[flag] not in node["choices"]:
            found.append(f"{flag}={flags[flag]} is none of {node['choices']}")
        return True

    for node in GCLOUD[name]:
        check(node, required=node.get("required", False))
    found += [f"unknown flag {flag}" for flag in flags.keys() - known]
    return found


def commands(program):
    """Returns every command that the scripts call, each once."""
    found = {
        tuple(call[:-1]) for launch in LAUNCHES.values() for call in calls_of(launch)
    }
    return [argv for argv in found if argv[0] == program]


def test_gcloud_accepts_the_commands():
    found = commands("gcloud")
    assert len(found) > 70
    wrong = {argv: message for argv in found if (message := problems(argv))}
    assert not wrong


CREATE = ("gcloud", "compute", "tpus", "queued-resources", "create", "q")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("gcloud", "compute", "cakes", "bake"), "unknown command"),
        ((*CREATE, "--cake=1"), "unknown flag --cake"),
        ((*CREATE, "--zone=z"), "--runtime-version is missing"),
        ((*CREATE, "--runtime-version=r", "--node-id=n"), "accelerator-type"),
        ((*CREATE, "--node-id=n", "--node-count=2"), "only one of"),
        ((*CREATE, "--spot=yes"), "--spot must be a switch"),
        ((*CREATE, "--zone"), "--zone must not be a switch"),
        ((*CREATE, "--accelerator-type=a", "--type=v9"), "is none of"),
    ],
)
def test_the_check_of_gcloud_finds(argv, message):
    assert any(message in problem for problem in problems(argv))


def test_kubectl_accepts_the_commands():
    found = commands("kubectl")
    assert len(found) > 20
    for argv in found:
        known = {*KUBECTL[argv[1]], *KUBECTL["global"]}
        flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
        assert flags <= known, argv
        # No command may reach a cluster that happens to be kubectl's current one.
        assert "--context" in flags, argv


@launches
def test_kubernetes_accepts_the_manifests(launch):
    if launch.backend != "gke":
        return
    found = list(manifests(launch))
    assert [each["kind"] for each in found] == ["ServiceAccount", "JobSet"]
    for manifest in found:
        errors = list(KUBERNETES.iter_errors(manifest))
        assert not errors, [error.context for error in errors]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.cake", 1),
        ("spec.ttlSecondsAfterFinished", -1),
        ("spec.failurePolicy.maxRestarts", "3"),
        ("spec.replicatedJobs.0.template.spec.parallelism", "2"),
        ("spec.replicatedJobs.0.template.spec.template.spec.containers", None),
        ("spec.replicatedJobs.0.template.spec.template.spec.nodeSelector.x", 1),
    ],
)
def test_the_check_of_manifests_finds(path, value):
    _, manifest = manifests(LAUNCHES["gke_v5e_8"])
    assert KUBERNETES.is_valid(manifest)
    *parents, last = path.split(".")
    node = manifest
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    assert not KUBERNETES.is_valid(manifest)


def words_of_hosts(launch, program):
    """Returns the arguments that a host of the launch gives to `tpu-embedding`."""
    if launch.backend == "gke":
        return container(launch, program)["args"][1:]
    text = host_script(launch, program)
    return shlex.split(re.search(r"arguments=\((.*?)\)\n", text, re.DOTALL)[1])


@launches
def test_hosts_get_arguments_that_the_command_takes(launch):
    parser = make_parser()
    doctor = parser.parse_args(words_of_hosts(launch, "doctor"))
    assert (doctor.expect is None) == (launch.slices > 1)
    train = parser.parse_args(words_of_hosts(launch, "train"))
    assert str(train.output_dir) == "/mnt/bucket/dlrm/results"
    assert not train.resume
    assert train.restarts == (None if launch.backend == "gke" else 3)


@launches
def test_no_script_has_a_credential(launch):
    text = make_script(launch)
    assert not re.search(r"token|password|private_key|\.json\b", text, re.IGNORECASE)
