"""The guide to launching works as it is written: its commands, in order, on fakes."""

import contextlib
import pathlib
import re
import shlex
import tomllib

import pytest

from tests.tools.launch.launches import FIELDS, LAUNCHES, as_toml
from tests.tools.launch.test_scripts import host_script, problems
from tpu_embedding.tools import cli
from tpu_embedding.tools.launch import Launch, load_launch, make_script

ROOT = pathlib.Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "launching.md").read_text()
TROUBLES = (ROOT / "docs" / "guides" / "launch_troubles.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
WHEEL = "dist/tpu_embedding-0.1.0-py3-none-any.whl"
NAMED_FILE = re.compile(r"`([\w.]+\.toml)` describes[^`]*```toml\n(.*?)```", re.DOTALL)


def run_line(line, cloud):
    """Runs a line of the guide as its reader would."""
    words = shlex.split(line)
    if words[0] == "tpu-embedding":
        # In this process: a new one would import jax for each line.
        *arguments, redirection, script = words[1:]
        assert redirection == ">"
        with open(cloud.folder / script, "w") as file, contextlib.redirect_stdout(file):
            assert cli.main(arguments) == 0, line
    elif words[:2] == ["pip", "wheel"]:
        (cloud.folder / "dist").mkdir()
        (cloud.folder / WHEEL).touch()
    else:
        assert words[0] in ("bash", "gcloud"), f"the fakes do not know {line}"
        result = cloud.bash(line)
        assert result.returncode == 0, result.stderr


def test_the_guide_leads_from_nothing_to_results(cloud, monkeypatch):
    monkeypatch.chdir(cloud.folder)
    monkeypatch.setattr(
        "tpu_embedding.tools.cli.launch._fits", lambda _, config: config.name == "dlrm"
    )
    ((name, text),) = NAMED_FILE.findall(GUIDE)
    (cloud.folder / name).write_text(text)
    for kind, block in BLOCKS:
        if kind == "bash":
            for line in block.splitlines():
                run_line(line, cloud)
    calls = [" ".join(call) for call in cloud.take_calls()]
    order = (
        "gcloud services enable",
        "gcloud iam service-accounts create trainer",
        "gcloud storage buckets create gs://my-bucket",
        f"gcloud storage cp {cloud.folder / WHEEL}",
        "gcloud container clusters create dlrm",
        "gcloud container node-pools create dlrm-0",
        "kubectl logs",
        "gcloud storage rsync gs://my-bucket/dlrm/results runs/dlrm",
        "kubectl delete jobset dlrm",
        "gcloud container clusters delete dlrm",
    )
    places = [
        next(i for i, call in enumerate(calls) if call.startswith(each))
        for each in order
    ]
    assert places == sorted(places)
    jobs = [re.search(r"kind: JobSet\nmetadata:\n  name: (.*)", call) for call in calls]
    assert [job[1] for job in jobs if job] == ['"dlrm-doctor"', '"dlrm"']
    # The results are there, and nothing else.
    left = {each for each in cloud.resources if "node-pools" not in each}
    assert {each for each in left if "jobset" not in each} == {
        "iam service-accounts trainer",
        "storage buckets gs://my-bucket",
    }


def test_the_line_that_stops_a_run_is_accepted(cloud):
    (line,) = re.findall(r"gcloud compute tpus tpu-vm ssh .*", TROUBLES)
    *argv, command = shlex.split(line)
    assert not problems([*argv, command])
    launch = LAUNCHES["queued_resource_v5e_8"]
    assert cloud.run(launch).returncode == 0
    assert cloud.bash(line).returncode == 0
    file, word = re.fullmatch("--command=bash (.*) (.*)", command).groups()
    assert f"launch/{file}" in make_script(launch)
    assert f"{word}() {{" in host_script(launch)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "toml"])
def test_every_example_is_a_launch(text, tmp_path):
    path = tmp_path / "launch.toml"
    path.write_text(as_toml(FIELDS | tomllib.loads(text)))
    assert load_launch(path).facts.num_hosts > 0


def test_the_guide_lists_all_fields():
    table = GUIDE[GUIDE.index("| field |") : GUIDE.index("### What ends")]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(Launch.__dataclass_fields__)
