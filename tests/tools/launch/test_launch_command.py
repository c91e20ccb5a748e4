"""The command `tpu-embedding launch`: options, output, exit status."""

import shlex
import subprocess

import pytest
import yaml

from tests.tools.launch.commands import commands_of
from tests.tools.launch.recorded_launches import FIELDS, LAUNCHES, all_steps
from tpu_embedding.kernel_verdicts import DIRECTORY_VARIABLE
from tpu_embedding.tools.cli import FAILED, WRONG_USAGE, main, make_parser
from tpu_embedding.tools.launch.programs import read_script

FILE = FIELDS | dict(backend="gke", zone="us-east5-a", topology="v5p:2x4x4")
VERBS = ("create", "setup", "run", "logs", "status", "stop", "fetch", "delete")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = FILE | {"settings": list(FILE["settings"])}
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(document))
    return "launch.yaml"


@pytest.mark.parametrize("verb", VERBS)
def test_a_dry_run_is_a_script(verb, file, cloud, tmp_path, capsys):
    assert main(["launch", verb, file, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "gcloud " in script or "kubectl " in script
    result = subprocess.run(["bash", "-n"], input=script, text=True, timeout=60)
    assert result.returncode == 0
    assert cloud.take_calls() == []
    assert [path.name for path in tmp_path.iterdir()] == ["launch.yaml"]


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_runs_its_steps(verb, file, cloud, capsys):
    assert main(["launch", "create", file]) == 0
    capsys.readouterr()
    cloud.take_calls()
    assert main(["launch", verb, file]) == 0
    assert capsys.readouterr().out
    assert cloud.take_calls()


def test_create_says_what_deletes_the_machines(file, cloud, capsys):
    assert main(["launch", "create", file, "--set", "lifetime=until_deleted"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("# Nothing but tpu-embedding launch delete deletes")
    assert cloud.take_calls()[0][:3] == ["tpu-embedding", "compile", "dlrm"]


def test_the_compile_check_can_be_skipped(file, cloud):
    assert main(["launch", "create", file, "--skip-compile-check"]) == 0
    assert all(call[0] != "tpu-embedding" for call in cloud.take_calls())


def test_results_go_to_a_folder(file, cloud, tmp_path):
    assert main(["launch", "fetch", file]) == 0
    assert main(["launch", "fetch", file, "--to", "results"]) == 0
    targets = [call[4] for call in cloud.take_calls()]
    assert targets == ["runs/dlrm", "results"]
    assert (tmp_path / "runs" / "dlrm").is_dir()
    assert (tmp_path / "results").is_dir()


def test_a_run_resumes(file, cloud):
    cloud.resources["container clusters dlrm"] = {}
    assert main(["launch", "run", file, "--resume"]) == 0
    assert "--resume" in cloud.take_calls()[-1][-1]


def test_the_cluster_is_deleted_on_request(file, cloud):
    assert main(["launch", "create", file]) == 0
    assert main(["launch", "delete", file, "--with-cluster"]) == 0
    assert "container clusters dlrm" not in cloud.resources


WRONG = {
    "no file": (["create", "missing.yaml"], FAILED, "missing.yaml"),
    "field": (
        ["create", "launch.yaml", "--set", "zone=x"],
        WRONG_USAGE,
        "zone must be a zone, such as us-east5-a, got 'x'",
    ),
    "key": (["run", "launch.yaml", "--set", "zones=x"], WRONG_USAGE, "its keys are"),
    "twice": (
        ["run", "launch.yaml", "--set", "zone=a", "--set", "zone=b"],
        WRONG_USAGE,
        "--set zone is given twice",
    ),
    "resume": (
        ["run", "launch.yaml", "--resume", "--program", "doctor"],
        WRONG_USAGE,
        "--resume needs --program train",
    ),
    "cluster": (
        ["delete", "launch.yaml", "--with-cluster", "--set", "backend=compute_engine"],
        WRONG_USAGE,
        "compute_engine has no cluster",
    ),
    "hosts": (
        ["run", "launch.yaml", "--set", "backend=queued_resource"],
        WRONG_USAGE,
        "lifetime must be until_deleted",
    ),
}


@pytest.mark.parametrize(("arguments", "status", "message"), WRONG.values(), ids=WRONG)
def test_wrong_use_is_one_line(arguments, status, message, file, cloud, capsys):
    del file
    assert main(["launch", *arguments]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert cloud.take_calls() == []


def test_a_failure_is_one_line(file, cloud, capsys):
    cloud.fail("clusters create", "ERROR: Quota exceeded")
    assert main(["launch", "create", file]) == FAILED
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: cannot create the cluster: the quota of")


def words_of_hosts(launch):
    """Yields the arguments that a host of the launch gives to `tpu-embedding`."""
    for verb, steps in all_steps(launch):
        if not verb.startswith("run"):
            continue
        *_, command = (c for step in steps for c in commands_of(step))
        if command.stdin:
            job = yaml.safe_load(command.stdin)["spec"]["replicatedJobs"][0]
            pod = job["template"]["spec"]["template"]["spec"]
            yield pod["containers"][0]["args"][2:]
        else:
            words = shlex.split(command.argv[-1].removeprefix("--command="))
            yield words[words.index("--") + 2 :]


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_hosts_get_arguments_that_the_command_takes(launch):
    parser = make_parser()
    doctor, first, second = map(parser.parse_args, words_of_hosts(launch))
    assert (doctor.expect is None) == (launch.slices > 1)
    for train, resumes in ((first, False), (second, True)):
        assert str(train.output_dir) == "/mnt/bucket/dlrm/results"
        assert train.resume == resumes
        in_group = launch.backend == "compute_engine" and launch.num_hosts > 1
        assert train.num_processes == (launch.num_hosts if in_group else None)
        assert train.restarts == (None if launch.backend == "gke" else 3)


def test_hosts_keep_verdicts_where_the_command_reads_them():
    assert f'export {DIRECTORY_VARIABLE}="$1"' in read_script("run_host.sh")
