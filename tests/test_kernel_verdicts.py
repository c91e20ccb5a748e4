"""Stored verdicts on kernels: read exactly, and refused when anything changed."""

import json
import pathlib

import pytest

from tests.verdict_files import record_of, verdict, write_records
from tpu_embedding import kernel_verdicts
from tpu_embedding.kernel_verdicts import (
    Capability,
    KernelVerdicts,
    capability_of,
    current_versions,
    load_verdicts,
    verdict_file,
    verdicts_from_json,
)

KIND = "TPU of a test"
READ = capability_of("read", 8)
FASTER = verdict("read", speed_ratio=1.3)


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))


def load() -> KernelVerdicts:
    return load_verdicts(KIND, "interpreter")


def write(*verdicts, **versions):
    return write_records(record_of(KIND, "interpreter", *verdicts, **versions))


@pytest.mark.parametrize(("dim", "kind"), [(8, 8), (128, 128), (256, 512)])
def test_capabilities(dim, kind):
    assert capability_of("pool", dim) == Capability("pool", kind, "elements")
    assert capability_of("pool", dim, "row sums").rule == "elements"
    assert capability_of("update", dim, "row sums").rule == "row sums"


def test_verdicts_are_read():
    write(FASTER)
    found = load()
    assert found.verdicts == (FASTER,)
    assert found.allows(READ)
    assert found.reason(READ) == "auto: verdict of 2026-01-31: 1.30x the speed of XLA"
    assert verdicts_from_json(json.loads(json.dumps(found.to_json()))) == found


REFUSED = {
    "slower": ({"speed_ratio": 0.8}, "0.80x the speed of XLA"),
    "hardly faster": ({"speed_ratio": 1.04}, "1.04x the speed of XLA"),
    "not timed": ({"speed_ratio": None}, "equal, but not timed"),
    "wrong": ({"problem": "row 7 is zero"}, "row 7 is zero"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_verdicts_that_allow_no_kernel(changes, reason):
    write(verdict("read", **changes))
    assert not load().allows(READ)
    assert reason in load().reason(READ)


def test_no_verdicts():
    assert load().verdicts == ()
    assert load().reason(READ) == (
        "auto: no verdict for this device; run tpu-embedding doctor"
    )


@pytest.mark.parametrize(
    "other",
    [
        capability_of("read", 16),
        capability_of("write", 8),
        capability_of("update", 8, "row sums"),
    ],
)
def test_a_capability_without_a_verdict(other):
    write(FASTER, verdict("update"))
    assert not load().allows(other)
    assert "no verdict on these rows" in load().reason(other)


@pytest.mark.parametrize("name", current_versions())
def test_another_version_makes_verdicts_stale(name):
    now = current_versions()[name]
    write(FASTER, **{name: "0.0.1"})
    assert not load().allows(READ)
    assert f"verdict is stale: {name} 0.0.1 then, {now} now" in load().reason(READ)


def test_changed_kernels_make_verdicts_stale(monkeypatch):
    write(FASTER)
    assert load().allows(READ)
    monkeypatch.setattr(kernel_verdicts, "_digest_of_kernels", lambda: "another")
    assert not load().allows(READ)
    assert "verdict is stale: source of the kernels" in load().reason(READ)


def test_the_digest_covers_all_sources_of_kernels():
    root = pathlib.Path(kernel_verdicts.__file__).parent
    for source in kernel_verdicts._KERNEL_SOURCES:
        assert (root / source).exists()


def test_verdicts_of_another_device_or_backend_do_not_count():
    write_records(
        record_of("TPU of another", "interpreter", FASTER),
        record_of(KIND, "sparse_core", FASTER),
    )
    assert load().verdicts == ()
    assert "no verdict for this device" in load().reason(READ)


DAMAGED = [
    *("", "{", "[]", "3", "{}", '{"records": 3}', '{"records": [3]}'),
    '{"records": [{"device_kind": "TPU of a test", "backend": "interpreter"}]}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_files_count_as_absent(text):
    write(FASTER).write_text(text)
    assert not load().allows(READ)
    assert "are damaged" in load().reason(READ)


ENTRIES = {
    "problem is missing": {"problem": ...},
    "an empty problem": {"problem": ""},
    "a problem that is no text": {"problem": False},
    "ratio is missing": {"speed_ratio": ...},
    "ratio is text": {"speed_ratio": "1.3"},
    "ratio is infinite": {"speed_ratio": float("inf")},
    "ratio is NaN": {"speed_ratio": float("nan")},
    "ratio is true": {"speed_ratio": True},
    "ratio is negative": {"speed_ratio": -2.0},
    "unknown direction": {"direction": "reading"},
    "direction is a number": {"direction": 8},
    "dim is text": {"dim": "8"},
    "dim is true": {"dim": True},
    "dim is zero": {"dim": 0},
    "dim of no kind": {"dim": 1024},
    "unknown rule": {"rule": "rows"},
    "a rule that only updates have": {"rule": "row sums"},
    "no date": {"date": "yesterday"},
    "date is a number": {"date": 2026},
    "unknown field": {"is_certain": True},
}


@pytest.mark.parametrize("changes", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_that_does_not_parse_is_no_verdict(changes):
    path = write(FASTER, verdict("write"))
    document = json.loads(path.read_text())
    entries = document["records"][0]["verdicts"]
    changed = {k: v for k, v in {**entries[0], **changes}.items() if v is not ...}
    entries[0] = changed
    path.write_text(json.dumps(document))
    assert load().verdicts == ()
    assert "are damaged" in load().reason(READ)
    sent = {**KernelVerdicts(backend="interpreter").to_json(), "verdicts": [changed]}
    with pytest.raises((TypeError, ValueError)):
        verdicts_from_json(sent)


@pytest.mark.parametrize("order", [1, -1])
def test_two_entries_on_one_capability_are_no_verdict(order):
    both = (FASTER, verdict("read", problem="row 7 is zero"))[::order]
    write(*both)
    assert load().verdicts == () and "are damaged" in load().reason(READ)
    with pytest.raises(ValueError, match="one verdict per direction and kind"):
        KernelVerdicts(backend="interpreter", verdicts=both)


def test_two_records_of_one_device_are_no_verdict():
    record = record_of(KIND, "interpreter", FASTER)
    write_records(record, record)
    assert load().verdicts == () and "are damaged" in load().reason(READ)


def test_a_field_that_comes_twice_is_no_verdict():
    path = write(FASTER)
    path.write_text(
        path.read_text().replace('"problem": null', '"problem": "x", "problem": null')
    )
    assert load().verdicts == () and "are damaged" in load().reason(READ)


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"TPU_EMBEDDING_VERDICTS": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/tpu_embedding"),
        ({"HOME": "/c"}, "/c/.cache/tpu_embedding"),
    ],
)
def test_directory(monkeypatch, variables, directory):
    for name in ("TPU_EMBEDDING_VERDICTS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert verdict_file() == pathlib.Path(directory, "kernel_verdicts.json")
