"""Forged directories of runs are data: nothing in them is executed or followed."""

import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest

from tests.tools.cli.test_command import status_of
from tests.tools.train.runs import set_options

MIB = 2**20
SETTINGS = ["num_steps=2", "batch_size=32", "model.dim=4"]
OPTIONS = ["--devices", "1", *set_options(SETTINGS)]
CONFIG = """
import dataclasses

import numpy as np

import tpu_embedding as te
from tpu_embedding.tools import train


@dataclasses.dataclass(frozen=True)
class Tagged:
    batch_size: int = 32
    vocabulary_sizes = {"user": 9, "tags": 9}
    vocabularies = {"user": te.inputs.Vocabulary(["u1", "u2", "u3"], mask_token="")}

    def open(self, data_dir, *, batch_size, seed):
        return dataclasses.replace(self, batch_size=batch_size)

    def train_batch(self, step):
        ids = np.random.default_rng(step).integers(9, size=self.batch_size)
        splits = np.append(0, np.cumsum(ids % 4))
        tags = te.RaggedIds(values=np.resize(ids, splits[-1]), row_splits=splits)
        features, weights = {"user": ids, "tags": tags}, np.ones(self.batch_size)
        return train.Batch(features=features, labels=ids % 2, weights=weights)

    def evaluation_batches(self):
        yield self.train_batch(10**6)


config = dataclasses.replace(
    train.load_config("synthetic"), name="tagged", data=Tagged(), target=None
)
"""


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """A run with strings and lists, and its config."""
    directory = tmp_path_factory.mktemp("genuine")
    (directory / "tagged.py").write_text(CONFIG)
    assert run_command("train", directory / "tagged.py", directory / "run") == 0
    return directory


def run_command(name, config, run, output=None):
    export = ["export", run, output, "--format", "safetensors", "--devices", "1"]
    options = {
        "train": ["train", config, "--output-dir", run, "--resume", *OPTIONS],
        "evaluate": ["evaluate", config, "--output-dir", run, *OPTIONS],
        "evaluate the run": ["evaluate", run, *OPTIONS],
        "inspect": ["inspect", run, "--row", "user", "u3"],
        "export": export,
        "export with config": [*export, "--config", config, *set_options(SETTINGS)],
    }
    return status_of(*options[name])


def edit_json(path, change):
    """Changes the last document of a file of JSON lines."""
    *before, last = path.read_text().splitlines()
    if path.suffix != ".jsonl":
        before, last = [], path.read_text()
    change(document := json.loads(last))
    path.write_text("\n".join([*before, json.dumps(document)]) + "\n")


def keep_start(run):
    """Leaves the record of the start alone in the file."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(next(x for x in lines if '"run"' in x))
    return path


def forge_origin(run, outside, draw):
    configs = [f"{outside}/evil.py", "evil", f"{run}/evil.py", "os", "../x", ["a"], 3]
    paths = [None, f"{outside}/bait.csv", "/dev/zero", f"{run}/../x", 5, "gs://x/y"]
    evil = f"open({str(outside / 'executed')!r}, 'w')"
    (run / "evil.py").write_text(evil)
    configs += ["synthetic", "two_tower", "dlrm_dcnv2"]
    origin = {
        "config": draw(configs),
        "data_dir": draw(paths),
        "settings": [f"tyro-write-completion=bash {outside / 'bait.csv'}"],
    }
    edit_json(keep_start(run), lambda x: x.update(origin=origin))


def forge_values(run, outside, draw):
    values = [2**40, -1, 0, True, None, "4 --help", "x" * MIB, [1] * 10**5, {}, 1e300]
    field, value = draw(["dim", "hidden_sizes", "x"]), draw(values)
    edit_json(keep_start(run), lambda x: x["run"]["model"].update({field: value}))


def forge_lines(run, outside, draw):
    lines = [b"\xff", b"123", b"[" * 10**6, b"[" + b"{}," * MIB + b"{}]"]
    lines += [b'{"run": []}', b'{"step": 1e9, "train": {}}', b'{"step": -1}', bytes(99)]
    lines += [b'{"origin": {"config": {}}}', b"9" * 5000, b'{"result": {"step": "x"}}']
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(draw(lines) + b"\n")


def forge_link(run, outside, draw):
    names = ["metrics.jsonl", "curves.png", "run.lock", "checkpoints", "vocabularies"]
    names += ["tensorboard", "checkpoints/2", "checkpoints/2/default/state.json"]
    arrays = list((run / "checkpoints" / "2" / "default").rglob("c/**/0"))
    names += [str(draw([x for x in arrays if x.is_file()]).relative_to(run))]
    path = run / draw(names)
    target = outside / path.name
    if path.exists():
        path.rename(target)
    if draw([True, True, False]):
        path.symlink_to(target)
    else:
        os.mkfifo(path)


def forge_vocabularies(run, outside, draw):
    file = run / "vocabularies" / draw(["names.json", "0.json"])
    texts = ["[]", "{}", "3", '["user", "user"]', '["x"', "[" * 10**5, '[["user"]]']
    texts += [json.dumps(["../../x", "/etc/passwd"]), "\0", '{"format": 1}']
    huge = {"num_oov_buckets": 2 * 10**9, "mask_token": None, "tokens": ["x"]}
    texts.append(json.dumps({"format": "tpu_embedding.vocabulary 1"} | huge))
    file.write_text(draw(texts))


def forge_steps(run, outside, draw):
    names = ["9" * 200, "٣", "-1", "1e5", "7", "..7", "3.orbax-checkpoint-tmp", "x"]
    forged = run / "checkpoints" / draw(names)
    forged.mkdir()
    if draw([True, False]):
        shutil.copytree(run / "checkpoints" / "2" / "default", forged / "default")


def forge_sizes(run, outside, draw):
    sizes = {
        "valences": {"tags": [9, 18.0, 40.0]},
        "buffers": [[[["tags", 32]], [64], 0]],
    }
    huge = draw([2**31 - 1, 2**60, -5, 1e300, "9", None])
    if draw([True, False]):
        sizes["buffers"][0][1] = [huge]
    else:
        sizes["valences"]["tags"][1] = huge
    description = draw([{"buffer_sizes": sizes}, {"buffer_sizes": 7}, [], "x", None])
    state = run / "checkpoints" / "2" / "default" / "state.json"
    edit_json(state, lambda x: x.update(description=description))


FORGERIES = [
    *(forge_origin, forge_values, forge_lines, forge_link),
    *(forge_vocabularies, forge_steps, forge_sizes),
]
COMMANDS = ["export", "export with config", "export with config", "inspect"]
COMMANDS += ["evaluate", "evaluate the run", "train"]


def memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1])


def contents(directory):
    return {
        path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in directory.rglob("*")
    }


def check_forged(genuine, directory, seed, capsys):
    """Forges a run, runs a command, and returns what it was."""
    generator = np.random.default_rng(seed)

    def draw(choices):
        return choices[generator.integers(len(choices))]

    run, outside = directory / "run", directory / "outside"
    shutil.copytree(genuine / "run", run)
    outside.mkdir()
    (outside / "bait.csv").write_text("user,click\n")
    (outside / "evil.py").write_text(f"open({str(outside / 'executed')!r}, 'w')")
    forge, name = FORGERIES[seed % len(FORGERIES)], draw(COMMANDS)
    forge(run, outside, draw)
    before = contents(outside)
    size = sum(x.lstat().st_size for x in run.rglob("*") if not x.is_dir())
    capsys.readouterr()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    resident = memory("VmRSS")
    status = run_command(name, genuine / "tagged.py", run, directory / "served")
    peak, case = memory("VmHWM") - resident, f"seed {seed}: {name}, {forge.__name__}"
    errors = capsys.readouterr().err
    assert contents(outside) == before, case
    assert peak <= 200 * MIB + 10 * size, f"{case}: {peak / MIB:.0f} MiB"
    assert "Traceback" not in errors, f"{case}: {errors}"
    assert status == 0 or (status == 2 and errors.count("\n") == 1), f"{case}: {errors}"
    if forge is forge_link and status == 0:
        assert name == "inspect" or not any(x.is_symlink() for x in run.iterdir()), case
    return case, status, errors


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_forged_runs(genuine, tmp_path, part, capsys):
    for seed in range(10 * part, 10 * part + 10):
        directory = tmp_path / str(seed)
        directory.mkdir()
        check_forged(genuine, directory, seed, capsys)
