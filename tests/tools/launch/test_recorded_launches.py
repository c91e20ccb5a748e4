"""Recorded launches: what is printed, and that gcloud, kubectl and bash accept it."""

import json
import pathlib
import re
import subprocess
import sysconfig

import jsonschema
import pytest
import yaml

from tests.tools.launch.commands import all_commands, commands_of
from tests.tools.launch.recorded_launches import FOLDER, LAUNCHES, all_steps, record
from tpu_embedding.tools.launch import programs

SCHEMAS = pathlib.Path(__file__).parent / "schemas"
GCLOUD = json.loads((SCHEMAS / "gcloud.json").read_text())
KUBECTL = json.loads((SCHEMAS / "kubectl.json").read_text())
KUBERNETES = jsonschema.Draft202012Validator(
    json.loads((SCHEMAS / "kubernetes.json").read_text())
)
launches = pytest.mark.parametrize("name", LAUNCHES)


@launches
def test_the_commands_are_as_recorded(name):
    assert record(LAUNCHES[name]) == (FOLDER / f"{name}.sh").read_text()


def test_every_record_has_its_launch():
    assert {path.stem for path in FOLDER.glob("*.sh")} == LAUNCHES.keys()


def test_shellcheck_accepts_the_records_and_scripts():
    scripts = pathlib.Path(programs.__file__).parent / "scripts"
    files = [*FOLDER.glob("*.sh"), *scripts.glob("*.sh")]
    assert len(files) == len(LAUNCHES) + 4
    program = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    result = subprocess.run([program, *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


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


def test_gcloud_accepts_the_commands():
    commands = all_commands("gcloud")
    assert len(commands) > 100
    wrong = {argv: found for argv in commands if (found := problems(argv))}
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
    commands = all_commands("kubectl")
    assert len(commands) > 10
    for argv in commands:
        known = {*KUBECTL[argv[1]], *KUBECTL["global"]}
        flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
        assert flags <= known, argv
        # No command may reach a cluster that happens to be kubectl's current one.
        assert "--context" in flags, argv


def manifests(names=tuple(LAUNCHES)):
    for name in names:
        for verb, steps in all_steps(LAUNCHES[name]):
            for step in steps:
                for command in commands_of(step):
                    if command.argv[0] == "kubectl" and command.stdin:
                        yield f"{name}: {verb}", yaml.safe_load(command.stdin)


def test_kubernetes_accepts_the_manifests():
    found = dict(manifests())
    assert {manifest["kind"] for manifest in found.values()} == {
        "JobSet",
        "ServiceAccount",
    }
    for name, manifest in found.items():
        errors = list(KUBERNETES.iter_errors(manifest))
        assert not errors, (name, [error.context for error in errors])


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
    manifest = dict(manifests(["gke_v5e_8"]))["gke_v5e_8: run"]
    assert KUBERNETES.is_valid(manifest)
    *parents, last = path.split(".")
    node = manifest
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    assert not KUBERNETES.is_valid(manifest)


@launches
def test_no_record_has_a_credential(name):
    text = (FOLDER / f"{name}.sh").read_text()
    assert not re.search(r"token|password|private_key|\.json\b", text, re.IGNORECASE)
