import re

import pytest

from tests.tools.launch.launches import FIELDS, as_toml, make_launch
from tpu_embedding.tools.launch import load_launch, make_script, what_deletes

FILE = FIELDS | dict(
    backend="gke", zone="us-east5-a", topology="v5p:2x4x4", settings=["a=1"]
)


def write(path, document):
    path.write_text(as_toml(document))
    return path


def test_a_file_is_a_launch(tmp_path):
    launch = load_launch(write(tmp_path / "launch.toml", FILE))
    assert launch == make_launch(settings=("a=1",))
    assert hash(launch) == hash(make_launch(settings=("a=1",)))


WRONG_FILES = {
    "no TOML": ("a = [", "is not TOML: Invalid value .* A line is FIELD = VALUE"),
    "YAML": ("name: dlrm", r"is not TOML: .*line 1.* FIELD = VALUE, with text in \"\""),
    "twice": ('name = "a"\nname = "b"', "is not TOML: Cannot overwrite a value"),
    "empty": ("", "must have the fields name, backend, project, zone"),
    "a section": ("[launch]\nname = 1", "unknown field 'launch'.*the fields are name,"),
    "unknown": (FILE | {"zones": "x"}, "unknown field 'zones'.*the fields are name,"),
    "missing": ({"name": "a"}, "must have the fields backend, project, zone"),
    "number": (FILE | {"slices": "2"}, "slices must be an int, got '2'"),
    "no text": (FILE | {"zone": 3}, "zone must be a string, got 3"),
    "bool": (FILE | {"restarts": True}, "restarts must be an int, got True"),
    "settings": (FILE | {"settings": "a=1"}, "settings must be a list of strings"),
}


@pytest.mark.parametrize(("document", "message"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_refused(document, message, tmp_path):
    path = tmp_path / "launch.toml"
    if isinstance(document, str):
        path.write_text(document)
    else:
        write(path, document)
    with pytest.raises((ValueError, TypeError), match=message):
        load_launch(path)


WRONG_FIELDS = [
    (dict(name="Dlrm"), "name must be 1 to 30 lower-case letters"),
    (dict(name="a" * 31), "name must be"),
    (dict(name="dlrm;rm"), "name must be"),
    (dict(project="x"), "project must be the id"),
    (dict(zone="us-east5"), "zone must be a zone"),
    (dict(bucket="gs://my-bucket"), "bucket must be .* without gs://"),
    (dict(service_account="me@example.com"), "service_account must be the address"),
    (dict(backend="aws"), "backend must be one of gke, queued_resource, got 'aws'"),
    (dict(cluster="a cluster"), "cluster must be the name of a GKE cluster"),
    (dict(package="-r evil"), "package must not be empty, nor begin with a hyphen"),
    (dict(settings=("a=1\nrm",)), r"settings must be printable text of one line, got"),
    (dict(subnetwork="a\nb"), r"subnetwork must be printable text of one line"),
    (dict(capacity="free"), "capacity must be one of on_demand"),
    (dict(config=""), "config must not be empty"),
    (dict(package=""), "package must not be empty"),
    (dict(lifetime="6"), "lifetime must be a duration such as 6h, or until_deleted"),
    (dict(lifetime="0h"), "lifetime must be a duration"),
    (dict(lifetime=""), "lifetime must be a duration"),
    (dict(restarts=-1), "restarts must be at least 0"),
    (dict(slices=0), "slices must be from 1 to 256"),
    (dict(slices=257), "slices must be from 1 to 256"),
    (dict(settings=("batch_size",)), "settings takes KEY=VALUE"),
    (dict(data_dir="gs://b/criteo"), "data_dir must be a path within the bucket"),
    (dict(data_dir="/criteo"), "data_dir must be"),
    (dict(data_dir="../criteo"), "data_dir must be"),
    (dict(topology="v5p:2x3x4"), "topology 'v5p:2x3x4' does not exist"),
    (dict(topology="v6e:2x2", slices=2), "GKE joins only slices of several hosts"),
    (dict(capacity="reservation"), "reservation must be given"),
    (dict(reservation="mine"), "reservation must be given .* got 'mine'"),
    (
        dict(backend="queued_resource", capacity="reservation", reservation="mine"),
        "reservation must be given with capacity reservation on gke, and only then",
    ),
    (
        dict(backend="queued_resource", capacity="spot"),
        "lifetime must be until_deleted .* the Cloud TPU API deletes no machines",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_FIELDS)
def test_a_wrong_field_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_launch(**changes)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError, match="name must.*zone must.*restarts must"):
        make_launch(name="A", zone="x", restarts=-1)


@pytest.mark.parametrize(
    ("package", "own_files"),
    [
        ("dist/a.whl", ("dist/a.whl",)),
        ("tpu-embedding", ()),
        ("https://host/a.whl", ()),
        ("tpu-embedding[tpu] @ https://host/a.whl", ()),
    ],
)
def test_a_wheel_with_a_url_is_no_local_file(package, own_files):
    assert make_launch(package=package).own_files == own_files


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("1s", 1), ("90m", 5400), ("1d12h", 129600), ("until_deleted", None)],
)
def test_durations(duration, seconds):
    assert make_launch(lifetime=duration).lifetime_seconds == seconds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lifetime="until_deleted"), "Nothing but `bash FILE delete`"),
        (dict(), "after 6h.*autoscaler.*cluster itself stays, and costs a fee"),
        (dict(cluster="shared"), "after 6h.*after its last job.$"),
    ],
)
def test_what_deletes_the_machines_is_said(changes, message):
    launch = make_launch(**changes)
    assert re.search(message, what_deletes(launch))
    comment = " ".join(make_script(launch).replace("\n# ", " ").split())
    assert f"cost money until then: {what_deletes(launch)} set -euo" in comment
