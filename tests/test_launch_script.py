"""The script and the manifest of docs/guides/launching.md, with a fake of gcloud."""

import os
import pathlib
import subprocess
import sysconfig

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "launch_tpu_vm.sh"
WORDS = ["tpu-embedding", "train", "my config.py", "--set", "name=it's $HOME; *"]
GCLOUD = r"""#!/usr/bin/env bash
# Records its calls, and keeps the script that is copied to the hosts.
cd "$(dirname "$0")" || exit
printf '%s\0' "$@" >>calls
echo >>calls
case "$*" in
*"${FAILING:-none}"*) exit 7 ;;
*state.state*) sed 1q states && sed -i 1d states ;;
*describe*) [ "${EXISTING-}" ] ;;
*" scp "*) for file; do case "$file" in */host.sh) cp "$file" . ;; esac; done ;;
esac
"""


class Cloud:
    """A folder with the fake, its records, and the files that a user has."""

    def __init__(self, folder):
        self.folder = folder
        for name, text in (("gcloud", GCLOUD), ("sleep", "#!/bin/sh\n")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.wheel, self.config = folder / "a wheel.whl", folder / "my config.py"
        self.wheel.touch()
        self.config.touch()
        self.options = {"--name": "dlrm", "--project": "my project", "--zone": "z"}
        self.options |= {"--type": "v6e-16", "--wheel": self.wheel}

    def run(self, *options, **environment):
        pairs = [word for pair in self.options.items() for word in pair]
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        command = ["bash", SCRIPT, *pairs, *options]
        environment = os.environ | path | environment
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    def calls(self):
        """Returns the arguments of each call, and forgets them."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split("\0")[:-1] for line in lines]


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


@pytest.mark.parametrize("queued", [False, True])
def test_creates_installs_and_starts_on_all_hosts(cloud, queued):
    (cloud.folder / "states").write_text("WAITING_FOR_RESOURCES\nACTIVE\n")
    options = ["--spot", "--copy", cloud.config, "--create-option", "--network=a b"]
    result = cloud.run(*options, *["--queued"] * queued, "--", *WORDS)
    assert result.returncode == 0, result.stderr
    kind = "queued-resources" if queued else "tpu-vm"
    describe, create, *waits, copy, install, start = cloud.calls()
    assert describe[:5] == ["compute", "tpus", kind, "describe", "dlrm"]
    assert create[:5] == ["compute", "tpus", kind, "create", "dlrm"]
    version = "--runtime-version" if queued else "--version"
    expected = {"--project=my project", "--spot", "--network=a b"}
    expected |= {"--accelerator-type=v6e-16", f"{version}=v2-alpha-tpuv6e"}
    assert expected <= {*create}
    assert ("--node-id=dlrm" in create) == queued
    assert len(waits) == 2 * queued
    assert {str(cloud.wheel), str(cloud.config), "dlrm:", "--worker=all"} <= {*copy}
    for call, word in ((install, "install"), (start, "start")):
        assert call[:5] == ["compute", "tpus", "tpu-vm", "ssh", "dlrm"]
        assert call[-2:] == ["--worker=all", f"--command=bash host.sh {word}"]
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"gcloud compute tpus {kind} delete dlrm --project=my\\ p")


def test_hosts_run_the_words_of_the_command(cloud):
    cloud.run("--bucket", "my-bucket", "--", *WORDS)
    lines = (cloud.folder / "host.sh").read_text().splitlines()
    shown = [*lines[1:3], r'printf "%s\n" "$wheel" "$bucket" "${command[@]}"']
    output = subprocess.check_output(["bash", "-c", "\n".join(shown)], text=True)
    assert output.splitlines() == [cloud.wheel.name, "my-bucket", *WORDS]


@pytest.mark.parametrize("failing", [" create ", " scp ", "install", "host.sh start"])
def test_a_command_that_fails_ends_the_script(cloud, failing):
    result = cloud.run("--", *WORDS, FAILING=failing)
    assert result.returncode == 7
    assert failing in " ".join(cloud.calls()[-1]) + " "
    assert "gcloud compute tpus tpu-vm delete dlrm" in result.stderr


def test_what_is_there_what_failed_and_a_dry_run(cloud):
    assert cloud.run("--", *WORDS, EXISTING="yes").returncode == 0
    assert not any("create" in call for call in cloud.calls())
    (cloud.folder / "states").write_text("FAILED\n")
    assert cloud.run("--queued", "--", *WORDS).returncode == 1
    cloud.calls()
    result = cloud.run("--queued", "--dry-run", "--", *WORDS)
    assert result.returncode == 0, result.stderr
    assert "gcloud compute tpus queued-resources create dlrm" in result.stdout
    assert not cloud.calls()


def test_wrong_options_are_rejected_before_any_call(cloud):
    for words in (["--zone"], ["--wheel", "none.whl", "--", "x"], ["--fast"]):
        result = cloud.run(*words)
        assert result.returncode == 2
        assert words[0] in result.stderr or words[1] in result.stderr
        assert not cloud.calls()


def test_shellcheck_accepts_the_scripts(cloud):
    cloud.run("--", *WORDS)
    shellcheck = pathlib.Path(sysconfig.get_path("scripts")) / "shellcheck"
    scripts = [SCRIPT, cloud.folder / "host.sh", ROOT / "scripts" / "first_hour.sh"]
    command = [shellcheck, "--external-sources", *scripts]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_manifest_of_the_doctor_runs_what_a_wheel_has():
    job_set = yaml.safe_load((ROOT / "scripts/doctor_tpu7x.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "exec tpu-embedding doctor --timings --output-dir" in container["command"][2]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu7x"


def test_the_manifest_restarts_one_pod_per_host():
    _, job_set = yaml.safe_load_all((ROOT / "scripts/jobset.yaml").read_text())
    assert job_set["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"]
