"""The steps of launches, executed against fakes of gcloud and kubectl."""

import json
import shlex
import subprocess

import pytest

from tests.tools.launch.recorded_launches import LAUNCHES, make_launch
from tpu_embedding.tools.launch import BACKENDS, LaunchError, print_steps, run_steps
from tpu_embedding.tools.launch.steps import Command, Do

# One launch per backend, with few hosts: each call of a fake costs a process.
SMALL = {
    "gke": LAUNCHES["gke_v5e_8"],
    "compute_engine": make_launch(backend="compute_engine", topology="v5p:2x2x2"),
    "queued_resource": LAUNCHES["queued_resource_v6e_256_two_slices"],
}
POOL = "container node-pools dlrm-0"
small = pytest.mark.parametrize("launch", SMALL.values(), ids=SMALL)


def quiet(line):
    del line


def create(launch):
    run_steps(BACKENDS[launch.backend].create(launch), quiet)


def verbs(calls):
    return [line for call in calls if (line := " ".join(call[:-1]))]


@small
def test_create_twice_is_create_once(launch, cloud):
    create(launch)
    resources = dict(cloud.resources)
    first = verbs(cloud.take_calls())
    create(launch)
    second = verbs(cloud.take_calls())
    assert cloud.resources == resources
    assert any(" create " in line for line in first)
    assert not any(" create " in line for line in second)
    # What is not there to be found is asked for again: checks, permissions.
    assert set(second) < set(first)


@small
def test_nothing_is_created_that_does_not_fit(launch, cloud):
    cloud.fail("tpu-embedding compile", "error: does not fit")
    with pytest.raises(LaunchError, match="check that the config fits.*does not fit"):
        create(launch)
    assert len(cloud.take_calls()) == 1
    assert not cloud.resources


@small
def test_delete_deletes_all_but_the_bucket_and_the_cluster(launch, cloud):
    backend = BACKENDS[launch.backend]
    create(launch)
    run_steps(backend.delete(launch), quiet)
    kept = {"storage buckets gs://my-bucket"}
    if backend.delete_cluster is not None:
        kept |= {
            "container clusters dlrm",
            "customresourcedefinition jobsets.jobset.x-k8s.io",
        }
    assert cloud.resources.keys() == kept
    cloud.take_calls()
    lines = []
    run_steps(backend.delete(launch), lines.append)
    assert all("there is no" in line for line in lines)
    assert not any(" delete " in line for line in verbs(cloud.take_calls()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(topology="v5e:4x4"), r"placementPolicy.tpuTopology is 2x4, not 4x4"),
        (dict(capacity="on_demand"), r"config.spot is true, not false"),
        (dict(topology="v6e:2x4"), r"machineType is ct5lp-hightpu-4t, not ct6e"),
    ],
)
def test_a_node_pool_that_differs_is_refused(changes, message, cloud):
    create(SMALL["gke"])
    changes = dict(topology="v5e:2x4", zone="us-west4-a", capacity="spot") | changes
    with pytest.raises(LaunchError, match=rf"^node pool dlrm-0: .*{message}"):
        create(make_launch(**changes))


def test_a_bucket_without_a_hierarchy_is_refused(cloud):
    cloud.resources = {"storage buckets gs://my-bucket": {}}
    with pytest.raises(LaunchError, match="bucket my-bucket: hierarchicalNamespace"):
        create(SMALL["gke"])


def test_a_group_of_another_size_is_refused(cloud):
    create(SMALL["compute_engine"])
    # The policy has the topology, too, and is checked first.
    with pytest.raises(LaunchError, match="acceleratorTopology is 2x2x2, not 2x2x4"):
        create(make_launch(backend="compute_engine", topology="v5p:2x2x4"))


def test_a_zone_without_the_machines_is_refused(cloud):
    cloud.fail("machine-types describe", "ERROR: - The resource 'x' was not found")
    with pytest.raises(LaunchError, match=r"no ct5lp-hightpu-4t in zone us-west4-a"):
        create(SMALL["gke"])
    assert not cloud.resources


FAILURES = {
    "quota": (
        "ERROR: (gcloud.container.node-pools.create) Insufficient quota to satisfy "
        "the request: TPUS",
        "quota of the project is too small",
    ),
    "stockout": (
        "ERROR: The zone 'projects/p/zones/z' does not have enough resources available "
        "to fulfill the request. ZONE_RESOURCE_POOL_EXHAUSTED",
        "no capacity now: try later or in another zone",
    ),
    "permission": (
        'ERROR: ResponseError: code=403, message=Required "container.clusters.update" '
        'permission(s) for "projects/p". PERMISSION_DENIED',
        "you lack a permission",
    ),
    "quota project": (
        "ERROR: PERMISSION_DENIED: Caller lacks access to the quota project p",
        "you lack a permission",
    ),
    "api": (
        "ERROR: Kubernetes Engine API has not been used in project 1 before or it is "
        "disabled. SERVICE_DISABLED",
        "run gcloud services enable",
    ),
    "race": (
        "ERROR: ResponseError: code=409, message=Already exists: node pool",
        "created by someone else at the same moment: run the command again",
    ),
    "login": (
        "ERROR: (gcloud) You do not currently have an active account selected.",
        "you are not logged in: run gcloud auth login",
    ),
    "old": (
        "ERROR: (gcloud) unrecognized arguments: --tpu-topology=2x4",
        "run gcloud components update",
    ),
    "other": ("ERROR: something new\nhelp text", "ERROR: something new"),
    "silent": ("", "it gave no reason"),
}


@pytest.mark.parametrize(("stderr", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_becomes_one_line_with_the_way_out(stderr, message, cloud):
    launch = SMALL["gke"]
    cloud.fail("node-pools create", stderr)
    pool = BACKENDS["gke"].create(launch)[-1:]
    with pytest.raises(LaunchError) as error:
        run_steps(pool, quiet)
    text = str(error.value)
    assert text.startswith("cannot create the node pool of a slice: ")
    assert message in text
    assert "\n" not in text
    assert "exit status 1" in text
    # Once the reason is gone, the same command goes on where it failed.
    cloud.failures = []
    run_steps(pool, quiet)
    assert POOL in cloud.resources


def test_a_probe_that_fails_is_no_missing_resource(cloud):
    cloud.fail("node-pools describe", "ERROR: PERMISSION_DENIED")
    with pytest.raises(LaunchError, match="you lack a permission"):
        run_steps(BACKENDS["gke"].create(SMALL["gke"])[-1:], quiet)
    assert not cloud.resources


def test_a_job_that_runs_is_left_alone(cloud):
    run, stop = BACKENDS["gke"].run, BACKENDS["gke"].stop
    launch = SMALL["gke"]
    cloud.resources["container clusters dlrm"] = {}
    run_steps(run(launch, "train", ()), quiet)
    cloud.take_calls()
    lines = []
    run_steps(run(launch, "train", ()), lines.append)
    assert lines[-1] == "start train on all hosts: job dlrm exists"
    assert not any("apply" in call for call in cloud.take_calls())
    # Another run under this name is not started silently, nor is one that has ended.
    with pytest.raises(LaunchError, match="job dlrm: .*checksum is .*launch stop"):
        run_steps(run(launch, "train", ("--resume",)), quiet)
    cloud.resources["jobset dlrm"]["status"] = {"terminalState": "Completed"}
    with pytest.raises(LaunchError, match="terminalState is Completed, not missing"):
        run_steps(run(launch, "train", ()), quiet)
    run_steps(stop(launch, "train"), quiet)
    run_steps(run(launch, "train", ("--resume",)), lines.append)
    assert lines[-1] == "start train on all hosts"


def test_a_missing_service_account_is_named(cloud):
    cloud.fail("service-accounts describe", "ERROR: NOT_FOUND: Unknown")
    with pytest.raises(LaunchError, match="no service account trainer@my-project"):
        create(SMALL["gke"])
    assert not cloud.resources


@pytest.mark.parametrize("state", ["WAITING_FOR_RESOURCES", "SUSPENDED", "FAILED"])
def test_setup_waits_for_queued_machines(state, cloud):
    launch = SMALL["queued_resource"]
    create(launch)
    cloud.resources["compute tpus queued-resources dlrm"]["state"]["state"] = state
    cloud.take_calls()
    for steps in (
        BACKENDS["queued_resource"].set_up(launch),
        BACKENDS["queued_resource"].run(launch, "train", ()),
    ):
        with pytest.raises(LaunchError, match=rf"state.state is {state}, not ACTIVE"):
            run_steps(steps, quiet)
        assert len(cloud.take_calls()) == 1


def test_hosts_get_their_numbers_in_one_order(cloud):
    launch = SMALL["compute_engine"]
    create(launch)
    cloud.take_calls()
    run_steps(BACKENDS["compute_engine"].run(launch, "train", ()), quiet)
    _, *calls = cloud.take_calls()
    commands = {call[3]: call[-2] for call in calls}
    assert commands.keys() == {"dlrm-00xy", "dlrm-07xy"}
    for index, host in enumerate(sorted(commands)):
        words = shlex.split(commands[host])
        assert words[words.index("--coordinator") + 1] == "dlrm-00xy:8476"
        assert words[words.index("--num-processes") + 1] == "2"
        assert words[words.index("--process-id") + 1] == str(index)


def test_a_group_that_is_not_whole_is_refused(cloud):
    launch = SMALL["compute_engine"]
    create(launch)
    cloud.resources["compute instance-groups managed dlrm"]["targetSize"] = 1
    with pytest.raises(LaunchError, match="there must be 2 hosts, got 1"):
        run_steps(BACKENDS["compute_engine"].run(launch, "train", ()), quiet)


def test_each_host_that_fails_is_named(cloud):
    launch = SMALL["compute_engine"]
    create(launch)
    cloud.fail(
        "ssh", "ssh: connect to host 10.0.0.2 port 22: Connection timed out", 255
    )
    lines = []
    steps = BACKENDS["compute_engine"].stop(launch, "train")
    with pytest.raises(LaunchError, match=r"\(dlrm-00xy\): a host does not answer"):
        run_steps(steps, lines.append)
    assert "(dlrm-07xy): a host does not answer on SSH" in lines[-1]


def test_programs_are_executed_with_their_input_and_shown(programs, capfd):
    clusters = {"container clusters dlrm": {}}
    (programs / "memory.json").write_text(json.dumps(dict(resources=clusters)))
    steps = BACKENDS["gke"].run(SMALL["gke"], "train", ("--resume",))
    run_steps(steps, quiet)
    memory = json.loads((programs / "memory.json").read_text())
    _, _, apply = memory["calls"]
    assert apply[:3] == ["kubectl", "apply", "--filename=-"]
    assert "kind: JobSet" in apply[-1]
    assert "- --resume" in apply[-1]
    memory["resources"] = clusters
    memory["failures"] = [("kubectl apply", "progress\nerror: no matches for kind", 3)]
    (programs / "memory.json").write_text(json.dumps(memory))
    capfd.readouterr()
    with pytest.raises(LaunchError, match="no matches for kind.*exit status 3"):
        run_steps(steps, quiet)
    assert "progress" in capfd.readouterr().err


def test_probes_are_executed_and_not_shown(programs, capfd):
    del programs
    steps = BACKENDS["gke"].delete(SMALL["gke"])
    lines = []
    run_steps(steps, lines.append)
    assert lines == ["delete the node pool of a slice: there is no node pool dlrm-0"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("program", ["gcloud", "kubectl"])
def test_a_missing_program_is_named(program, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    step = Do("try", Command((program, "version")))
    with pytest.raises(LaunchError, match=f"^{program} is missing: .*install"):
        run_steps([step], quiet)


def test_what_is_no_json_is_refused(cloud):
    create(SMALL["gke"])
    cloud.fail("node-pools describe", "a notice", status=0)
    with pytest.raises(LaunchError, match="printed no JSON object"):
        run_steps(BACKENDS["gke"].create(SMALL["gke"])[-1:], quiet)


@small
def test_a_dry_run_calls_nothing(launch, cloud):
    print_steps(BACKENDS[launch.backend].create(launch), quiet)
    assert cloud.take_calls() == []


def test_bash_runs_a_dry_run_as_it_would_be_executed(programs, cloud):
    launch = SMALL["compute_engine"]
    backend = BACKENDS["compute_engine"]
    steps = (
        *backend.create(launch),
        *backend.set_up(launch)[-2:],
        *backend.run(launch, "train", ()),
        *backend.follow(launch, "train"),
        *backend.delete(launch),
    )
    script = ["set -euo pipefail"]
    print_steps(steps, script.append)
    subprocess.run(["bash", "-c", "\n".join(script)], check=True, timeout=120)
    in_bash = json.loads((programs / "memory.json").read_text())["calls"]
    run_steps(steps, quiet)
    executed = cloud.take_calls()
    # Hosts are reached at the same time, in any order.
    assert sorted(in_bash) == sorted(executed)
    assert len(executed) > 20
