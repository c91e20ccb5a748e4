"""The guide to launching works as it is written: its commands, in order, on fakes."""

import json
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

from tests.tools.launch.recorded_launches import FIELDS, make_launch
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.launch import Launch, load_launch

ROOT = pathlib.Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "launching.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", GUIDE, re.DOTALL)
NAMED_FILE = re.compile(r"`([\w.]+\.yaml)` describes[^`]*```yaml\n(.*?)```", re.DOTALL)


def run_line(line, programs):
    """Runs a line of the guide as its reader would."""
    words = shlex.split(line)
    if words[:2] == ["tpu-embedding", "launch"]:
        # In this process: a new one would import jax for each line.
        assert main(words[1:]) == 0, line
    elif words[:2] == ["pip", "wheel"]:
        return
    else:
        assert (programs / words[0]).exists(), f"the fakes do not know {line}"
        subprocess.run(["bash", "-c", line], check=True, timeout=60)


def test_the_guide_leads_from_nothing_to_results(
    programs, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    ((name, text),) = NAMED_FILE.findall(GUIDE)
    (tmp_path / name).write_text(text)
    for kind, block in BLOCKS:
        if kind == "bash":
            for line in block.replace("\\\n", " ").splitlines():
                run_line(line, programs)
    memory = json.loads((programs / "memory.json").read_text())
    calls = [" ".join(call[:-1]) for call in memory["calls"]]
    order = (
        "gcloud services enable",
        "gcloud iam service-accounts create trainer",
        "tpu-embedding compile dlrm --topology v5e:2x4",
        "gcloud storage buckets create gs://my-bucket",
        "gcloud container clusters create dlrm",
        "gcloud container node-pools create dlrm-0",
        "gcloud storage cp dist/tpu_embedding-0.1.0-py3-none-any.whl",
        "kubectl logs",
        "gcloud storage rsync gs://my-bucket/dlrm/results runs/dlrm",
        "gcloud container node-pools delete dlrm-0",
        "gcloud container clusters delete dlrm",
    )
    places = [
        next(i for i, call in enumerate(calls) if call.startswith(each))
        for each in order
    ]
    assert places == sorted(places)
    manifests = [
        yaml.safe_load(call[-1]) for call in memory["calls"] if "JobSet" in call[-1]
    ]
    assert [each["metadata"]["name"] for each in manifests] == [
        "dlrm-doctor",
        "dlrm",
        "dlrm",
    ]
    # All that costs money is gone; the results are not.
    assert [name for name in memory["resources"] if name.startswith("compute ")] == []
    assert "storage buckets gs://my-bucket" in memory["resources"]
    assert not any("container" in name for name in memory["resources"])
    assert "Each start of the job ends after 6h" in capfd.readouterr().out


def examples():
    return [text for kind, text in BLOCKS if kind == "yaml"]


@pytest.mark.parametrize("text", examples())
def test_every_example_is_a_launch(text, tmp_path):
    path = tmp_path / "launch.yaml"
    base = FIELDS | dict(settings=list(FIELDS["settings"]))
    path.write_text(yaml.safe_dump(base | yaml.safe_load(text)))
    assert load_launch(path).num_hosts > 0


def test_the_guide_lists_all_fields():
    table = GUIDE[GUIDE.index("| field |") : GUIDE.index("`--set KEY=VALUE` changes")]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(listed) == sorted(Launch.__dataclass_fields__)


def test_the_table_of_lifetimes_is_true():
    for backend in ("gke", "compute_engine", "queued_resource"):
        flexible = dict(backend=backend, capacity="flex_start", lifetime="6h")
        assert make_launch(**flexible).lifetime_seconds == 6 * 3600
