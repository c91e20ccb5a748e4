"""Tests what `tpu-embedding inspect` shows of dynamic tables."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.tools import cli

functional = te.functional
NAMES = np.array(["ada", "17"])
BATCHES = (np.arange(40), np.arange(30, 300), np.arange(250, 450))


def table(name, vocabulary):
    config = te.TableConfig(vocabulary_size=vocabulary, dim=8, name=name)
    return te.FeatureConfig(table=config)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    """A run with a checkpoint after each of three steps; "user" evicts in the last."""
    plan = te.make_plan(
        {
            "user": table("user", te.Dynamic(capacity=320)),
            "name": table("name", te.Dynamic(capacity=100)),
            "movie": table("movie", 20),
        },
        mesh_of(2),
        optimizer="adagrad",
    )
    tables = functional.init_tables(plan, jax.random.key(0))
    slots = functional.init_slots(tables, plan)
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints = te.checkpoint.RunCheckpoints(directory, kept=None, plan=plan)
    for step, ids in enumerate(BATCHES, 1):
        features = {"user": ids, "name": NAMES, "movie": np.arange(4, dtype=np.int32)}
        batch = {name: np.resize(ids, 270) for name, ids in features.items()}
        result = functional.insert_ids(
            tables, slots, te.inputs.prepare_features(batch, plan), plan
        )
        looked = functional.lookup(result.tables, result.features, plan)
        gradients = functional.compute_gradients(
            looked.routing, jax.tree.map(jnp.sin, looked.activations), plan
        )
        tables, slots = functional.apply_gradients(
            result.tables, result.slots, gradients, plan
        )
        checkpoints.save(step, {"tables": tables, "slots": slots}, {})
    checkpoints.close()
    return directory, functional.dynamic_rows(tables, plan)


@pytest.fixture
def checkpoint(run_directory):
    return run_directory[0] / "3"


def run(capsys, *arguments):
    assert cli.main(["inspect", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_statistics_are_those_of_the_directory(checkpoint, run_directory, capsys):
    ids = {}
    document = json.loads(run(capsys, checkpoint, "--json"))
    assert "ids" not in document["tables"]["movie"]
    for name, rows in run_directory[1].items():
        ids[name] = document["tables"][name]["ids"]
        assert ids[name]["num_ids"] == len(rows.ids)
        assert ids[name]["clock"] == 4
        buckets = np.bincount(rows.natural_rows // SLOTS_PER_BUCKET)
        assert ids[name]["num_full_buckets"] == np.sum(buckets == SLOTS_PER_BUCKET)
        ages = np.sort(4 - rows.last_used.astype(np.int64))
        middle = -(-len(ages) // 2) - 1
        assert ids[name]["ages"]["50%"] == ages[middle]
        assert ids[name]["ages"]["0%"] == ages[0] == 1
        assert ids[name]["ages"]["100%"] == ages[-1]
        assert ids[name]["uses"]["100%"] == rows.counts.max()
    assert ids["user"]["load"] == pytest.approx(ids["user"]["num_ids"] / 320)
    assert (ids["name"]["capacity"], ids["name"]["num_places"]) == (100, 128)
    text = run(capsys, checkpoint)
    found = ids["user"]
    counts = (
        f"320 +{found['num_ids']} +{found['load']:.2%} +{found['num_full_buckets']}"
    )
    assert re.search(rf"^user +{counts} +5 +4$", text, re.MULTILINE)
    assert re.search(r"^name, age( +1){4}$", text, re.MULTILINE)
    assert re.search(r"^name, steps that used it( +3){4}$", text, re.MULTILINE)
    assert "user" not in run(capsys, checkpoint, "--table", "movie")


def test_ids_of_two_checkpoints_are_compared(checkpoint, run_directory, capsys):
    earlier = checkpoint.parent / "2"
    before = set(te.checkpoint.read_table(earlier, "user", slot=":ids").tolist())
    now = set(run_directory[1]["user"].ids.tolist())
    assert before - now, "the test must evict"
    text = run(capsys, checkpoint, "--since", earlier)
    assert (
        f"since {earlier}\nname: 0 ids inserted, 0 evicted, 2 kept\n"
        f"user: {len(now - before)} ids inserted, {len(before - now)} evicted, "
        f"{len(now & before)} kept"
    ) in text
    document = json.loads(run(capsys, checkpoint, "--since", earlier, "--json"))
    since = document["tables"]["user"]["ids"]["since"]
    assert since["num_evicted"] == len(before - now)


def test_finds_an_id(checkpoint, run_directory, capsys):
    rows = run_directory[1]["user"]
    for place in (0, len(rows.ids) - 1):
        id_, natural = int(rows.ids[place]), int(rows.natural_rows[place])
        bucket, lane = divmod(natural, SLOTS_PER_BUCKET)
        arguments = ("--find", id_, "--table", "user")
        (found,) = json.loads(run(capsys, checkpoint, *arguments, "--json"))
        assert (found["id"], found["bucket"], found["place"]) == (id_, bucket, lane)
        assert found["last_used"] == rows.last_used[place]
        assert found["age"] == 4 - rows.last_used[place]
        assert found["count"] == rows.counts[place]
        values = te.checkpoint.read_table(checkpoint, "user", [place])[0]
        np.testing.assert_array_equal(np.float32(found["values"]), values)
        assert len(found["slots"]["accumulators"]) == 8
        text = run(capsys, checkpoint, *arguments)
        assert text.startswith(f"user, id {id_}: bucket {bucket} with ")
        assert f"place {lane}, last used at {rows.last_used[place]} (" in text
        assert text.count(" ...\n") == 2


def test_finds_strings_and_tells_of_unknown_ids(checkpoint, capsys):
    text = run(capsys, checkpoint, "--find", "ada")
    assert re.search(r"^user, id \d+, fingerprint of 'ada': unknown; it", text, re.M)
    assert re.search(r"^name, id \d+, fingerprint of 'ada': bucket ", text, re.M)
    # Digits may be a string, too.
    (found,) = json.loads(
        run(capsys, checkpoint, "--find", "17", "--table", "name", "--json")
    )
    assert found["kind"] == "string" and found["place"] is not None
    (found,) = json.loads(
        run(capsys, checkpoint, "--find=-17", "--table=user", "--json")
    )
    assert found["id"] == 2**64 - 17 and found["place"] is None
    assert "values" not in found
    assert "unknown" in run(capsys, checkpoint, "--find", "0xFFFFFFFFFF")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find", "3", "--table", "movie"], "needs a dynamic table, .* has name, us"),
        (["--find", "3", "--rows", "3", "--table", "user"], "give one of them"),
        (["--find", str(2**64 - 1)], "but -1, which means 'no id', or a string"),
        (["--find", str(2**64)], "must be an integer from -9223372036854775808 to"),
        (["--since", "{}", "--table", "movie"], "both checkpoints must have a dyn"),
    ],
)
def test_refusals(checkpoint, capsys, arguments, message):
    arguments = [x.format(checkpoint) for x in arguments]
    assert cli.main(["inspect", str(checkpoint), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
