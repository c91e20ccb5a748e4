"""Stored verdicts on kernels: read back exactly, and refused when anything changed."""

import dataclasses
import json
import pathlib

import pytest

from tpu_embedding import kernel_verdicts
from tpu_embedding.kernel_verdicts import (
    KernelVerdicts,
    Verdict,
    capability_name,
    current_key,
    load_verdicts,
    save_verdicts,
    verdict_directory,
    verdicts_from_json,
)

READ = capability_name("read", 8)
FASTER = Verdict(
    capability=READ,
    is_equal=True,
    problem=None,
    speed_ratio=1.3,
    num_cases=2,
    date="2026-01-31",
)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))
    return tmp_path / "verdicts"


@pytest.fixture
def key():
    return current_key("TPU of a test", "interpreter")


def load() -> KernelVerdicts:
    return load_verdicts("TPU of a test", "interpreter")


@pytest.mark.parametrize(
    ("dim", "name"),
    [(8, "pool, dim 8"), (128, "pool, dim 128"), (256, "pool, dim 512")],
)
def test_capabilities(dim, name):
    assert capability_name("pool", dim) == name
    assert capability_name("pool", dim, "row sums") == name


def test_verdicts_are_read_back(key):
    path = save_verdicts(key, [FASTER])
    found = load()
    assert found.verdicts == (FASTER,)
    assert found.allows(READ)
    assert found.reason(READ) == "auto: verdict of 2026-01-31: 1.30x the speed of XLA"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert verdicts_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_later_verdicts_replace_earlier_ones_on_the_same_capability(key):
    other = dataclasses.replace(FASTER, capability=capability_name("write", 8))
    slower = dataclasses.replace(FASTER, speed_ratio=0.8)
    save_verdicts(key, [FASTER, other])
    save_verdicts(key, [slower])
    assert set(load().verdicts) == {slower, other}


def test_a_problem_stays_until_as_many_cases_have_run_without_one(key):
    wrong = dataclasses.replace(FASTER, is_equal=False, problem="x", num_cases=3)
    save_verdicts(key, [wrong])
    save_verdicts(key, [FASTER])
    assert load().verdicts == (wrong,)
    fewer = dataclasses.replace(wrong, num_cases=1)
    save_verdicts(key, [fewer])
    save_verdicts(key, [FASTER])
    assert load().verdicts == (wrong,)
    full = dataclasses.replace(FASTER, num_cases=3)
    save_verdicts(key, [full])
    assert load().verdicts == (full,)


REFUSED = {
    "slower": ({"speed_ratio": 0.8}, "0.80x the speed of XLA"),
    "hardly faster": ({"speed_ratio": 1.04}, "1.04x the speed of XLA"),
    "not timed": ({"speed_ratio": None}, "equal, but not timed"),
    "wrong": ({"is_equal": False, "problem": "row 7 is zero"}, "row 7 is zero"),
    "unexplained": ({"is_equal": False}, "results differ"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_verdicts_that_allow_no_kernel(key, changes, reason):
    save_verdicts(key, [dataclasses.replace(FASTER, **changes)])
    assert not load().allows(READ)
    assert reason in load().reason(READ)


def test_no_verdicts():
    assert load().verdicts == ()
    assert load().reason(READ) == (
        "auto: no verdict for this device; run tpu-embedding doctor"
    )


def test_a_capability_without_a_verdict(key):
    save_verdicts(key, [FASTER])
    other = capability_name("read", 16)
    assert not load().allows(other)
    assert "no verdict on these rows" in load().reason(other)


@pytest.mark.parametrize("name", ["jax", "jaxlib", "libtpu", "tpu-embedding"])
def test_another_version_makes_verdicts_stale(key, name):
    now = dict(key.versions)[name]
    versions = dict(key.versions) | {name: "0.0.1"}
    save_verdicts(dataclasses.replace(key, versions=tuple(versions.items())), [FASTER])
    assert not load().allows(READ)
    assert f"verdict is stale: {name} 0.0.1 then, {now} now" in load().reason(READ)


def test_changed_kernels_make_verdicts_stale(key, monkeypatch):
    save_verdicts(key, [FASTER])
    assert load().allows(READ)
    monkeypatch.setattr(kernel_verdicts, "_digest_of_kernels", lambda: "another")
    assert not load().allows(READ)
    assert "verdict is stale: the kernels' source has changed" in load().reason(READ)


def test_the_digest_covers_all_sources_of_kernels():
    root = pathlib.Path(kernel_verdicts.__file__).parent
    for source in kernel_verdicts._KERNEL_SOURCES:
        assert (root / source).exists()


def test_verdicts_of_another_device_do_not_count(key):
    save_verdicts(dataclasses.replace(key, device_kind="TPU of another"), [FASTER])
    assert load().verdicts == ()
    assert "no verdict for this device" in load().reason(READ)


DAMAGED = ["", "{", "[]", '{"key": 3}', '{"key": {}, "verdicts": []}']


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_files_count_as_absent_and_are_replaced(key, text):
    path = save_verdicts(key, [FASTER])
    path.write_text(text)
    assert not load().allows(READ)
    assert "are damaged" in load().reason(READ)
    save_verdicts(key, [FASTER])
    assert load().allows(READ)


ENTRIES = {
    "is_equal is text": {"is_equal": "false"},
    "is_equal is a number": {"is_equal": 1},
    "is_equal is missing": {"is_equal": ...},
    "a problem beside true": {"problem": "row 7 is zero"},
    "an empty problem": {"is_equal": False, "problem": ""},
    "a problem that is no text": {"is_equal": False, "problem": 3},
    "no cases": {"num_cases": 0},
    "half a case": {"num_cases": 0.5},
    "true cases": {"num_cases": True},
    "ratio is text": {"speed_ratio": "1.3"},
    "ratio is infinite": {"speed_ratio": float("inf")},
    "ratio is NaN": {"speed_ratio": float("nan")},
    "ratio is true": {"speed_ratio": True},
    "ratio is negative": {"speed_ratio": -2.0},
    "unknown capability": {"capability": "reading, dim 8"},
    "capability is a number": {"capability": 8},
    "no date": {"date": "yesterday"},
    "date is a number": {"date": 2026},
    "unknown field": {"is_certain": True},
}


@pytest.mark.parametrize("changes", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_does_not_parse_is_no_verdict(key, changes):
    path = save_verdicts(key, [FASTER])
    document = json.loads(path.read_text())
    (entry,) = document["verdicts"]
    changed = {k: v for k, v in {**entry, **changes}.items() if v is not ...}
    document["verdicts"] = [changed]
    path.write_text(json.dumps(document))
    assert load().verdicts == ()
    assert "are damaged" in load().reason(READ)
    sent = {**KernelVerdicts(backend="interpreter").to_json(), "verdicts": [changed]}
    with pytest.raises((TypeError, ValueError)):
        verdicts_from_json(sent)


@pytest.mark.parametrize("order", [1, -1])
def test_two_entries_on_one_capability_are_no_verdict(key, order):
    wrong = dataclasses.replace(FASTER, is_equal=False, problem="row 7 is zero")
    path = save_verdicts(key, [FASTER])
    document = json.loads(path.read_text())
    entries = [dataclasses.asdict(verdict) for verdict in (FASTER, wrong)]
    path.write_text(json.dumps({**document, "verdicts": entries[::order]}))
    assert load().verdicts == () and "are damaged" in load().reason(READ)
    with pytest.raises(ValueError, match="one verdict per capability"):
        KernelVerdicts(backend="interpreter", verdicts=(FASTER, wrong))


def test_a_field_that_comes_twice_is_no_verdict(key):
    path = save_verdicts(key, [FASTER])
    text = path.read_text().replace(
        '"is_equal": true', '"is_equal": false, "is_equal": true'
    )
    path.write_text(text)
    assert load().verdicts == () and "are damaged" in load().reason(READ)


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"TPU_EMBEDDING_VERDICTS": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tpu_embedding/verdicts"),
        ({"HOME": "/c"}, "/c/.cache/tpu_embedding/verdicts"),
    ],
)
def test_directory(monkeypatch, variables, directory):
    for name in ("TPU_EMBEDDING_VERDICTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert verdict_directory() == pathlib.Path(directory)
