"""Checkpoints of jax-tpu-embedding and keras-rs, beside those that they wrote."""

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import import_tables, orbax
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.stacked_orbax import (
    _parse_text,
    _split,
    open_stacked_tables,
)

SHAPES = {"a": (100, 8), "b": (37, 6), "c": (5, 16)}
SLOTS = {"adagrad": ["accumulator"], "adam": ["momentum", "velocity"]}
CONFIGS = [
    te.TableConfig(vocabulary_size=rows, dim=dim, name=name)
    for name, (rows, dim) in SHAPES.items()
]


def assert_arrays(source, slots):
    assert source.tables.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        table = source.tables[name]
        np.testing.assert_array_equal(np.asarray(table.values), values(name, shape))
        assert sorted(table.slots) == slots
        for slot in slots:
            np.testing.assert_array_equal(
                np.asarray(table.slots[slot]), values(f"{name}/{slot}", shape)
            )


@pytest.mark.parametrize("rule", SLOTS)
@pytest.mark.parametrize("place", [".", "7"])
def test_tables_of_jax_tpu_embedding(unpacked, rule, place):
    source = open_tables(unpacked(f"jax_tpu_embedding/{rule}") / place)
    assert source.origin.startswith("jax-tpu-embedding checkpoint")
    assert_arrays(source, SLOTS[rule])


def test_stacks_without_their_message(unpacked):
    path = unpacked("jax_tpu_embedding/adagrad") / "7" / "model"
    source = open_stacked_tables(
        path, CONFIGS, num_sparse_cores=8, sparse_cores_per_device=4
    )
    assert_arrays(source, ["accumulator"])


def test_stacks_of_keras_rs(unpacked):
    path = unpacked("keras_rs/stacked")
    with pytest.raises(CheckpointError, match="te.checkpoint.open_stacked_tables"):
        open_tables(path)
    options = {"num_sparse_cores": 4, "sparse_cores_per_device": 2}
    assert_arrays(open_stacked_tables(path, CONFIGS, **options), ["accumulator"])
    stacks = {"a_b": ["a", "b"]}
    source = open_stacked_tables(path, CONFIGS, stacks=stacks, **options)
    assert_arrays(source, ["accumulator"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_sparse_cores": 16}, "has 192 rows, but its tables .* take 256 on 16"),
        ({"tables": CONFIGS[:1]}, "The tables of stack 'a_b' .* are not known"),
        ({"stacks": {"a_b": ["a", "x"]}}, "The tables of stack 'a_b' .* are not known"),
        ({"stacks": {"a_b": ["a"]}}, r"has 192 rows, but its tables \['a'\] take 128"),
    ],
)
def test_stacks_that_do_not_fit(unpacked, change, message):
    options = {"tables": CONFIGS, "num_sparse_cores": 4, "sparse_cores_per_device": 2}
    with pytest.raises(CheckpointError, match=message):
        open_stacked_tables(unpacked("keras_rs/stacked"), **(options | change))


@pytest.mark.parametrize("rule", ["adagrad", "adam"])
def test_tables_of_keras_rs_on_devices(unpacked, rule):
    path = unpacked(f"keras_rs/{rule}")
    source = open_tables(path)
    found = {}
    for name, table in source.tables.items():
        found[name] = np.asarray(table.values)
        for slot, array in table.slots.items():
            found[f"{name}/{slot}"] = np.asarray(array)
    with np.load(path / "expected.npz") as expected:
        assert found.keys() == set(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.full
@pytest.mark.parametrize("rule", SLOTS)
def test_import_into_a_layer(unpacked, rule):
    layer = te.TPUEmbedding(
        [te.FeatureConfig(table=table) for table in CONFIGS], rule, rngs=nnx.Rngs(0)
    )
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    report = import_tables(unpacked(f"jax_tpu_embedding/{rule}"), layer, optimizer)
    assert (report.dropped, report.kept, report.unused) == ({}, (), ())
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(
            layer.embedding_tables()[name], values(name, shape)
        )
        for own, other in report.slots[name].items():
            np.testing.assert_array_equal(
                optimizer.slot_values()[name][own], values(f"{name}/{other}", shape)
            )


def test_large_arrays_are_copied_to_a_file(unpacked, monkeypatch):
    monkeypatch.setattr(orbax, "_MAX_BYTES_IN_MEMORY", 100)
    source = open_tables(unpacked("jax_tpu_embedding/adagrad"))
    assert_arrays(source, ["accumulator"])


def test_any_orbax_checkpoint(tmp_path):
    arrays = {"movie": values("movie", (20, 4)), "deep": {"user": np.ones((3, 2))}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "item", arrays)
    source = open_tables(tmp_path / "item")
    assert sorted(source.tables) == ["deep/user", "movie"]
    np.testing.assert_array_equal(source.tables["movie"].values, arrays["movie"])


@pytest.mark.parametrize("use_ocdbt", [True, False])
def test_many_chunks(tmp_path, monkeypatch, use_ocdbt):
    monkeypatch.setattr(orbax, "_MAX_BYTES_IN_MEMORY", 100)
    tree = {"movie": values("movie", (21, 4)), "bias": np.arange(9.0)}
    args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=64), tree)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(
            tmp_path / "item", args=ocp.args.PyTreeSave(tree, save_args=args)
        )
    source = open_tables(tmp_path / "item")
    for name, array in tree.items():
        np.testing.assert_array_equal(np.asarray(source.tables[name].values), array)


def test_damaged_checkpoints_leave_the_model(unpacked):
    path = unpacked("jax_tpu_embedding/adagrad")
    for file in (path / "7" / "model").rglob("d/*"):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])
    layer = te.TPUEmbedding(
        te.FeatureConfig(table=CONFIGS[2]), mesh=mesh_of(1), rngs=nnx.Rngs(0)
    )
    before = layer.embedding_tables()["c"]
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_tables(path, layer)
    np.testing.assert_array_equal(layer.embedding_tables()["c"], before)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("7/model/_METADATA", "{", "_METADATA cannot be read"),
        ("7/model/_METADATA", '{"tree_metadata": 3}', "_METADATA cannot be read"),
        ("7/embedding_spec/proto.pbtxt", "stacked_table_specs {", "does not end"),
        (
            "7/embedding_spec/proto.pbtxt",
            'stacked_table_specs { stack_name: "x" table_specs { table_name: "t" } }',
            r"lacks the stacks \['x'\]",
        ),
        (
            "7/embedding_spec/proto.pbtxt",
            'stacked_table_specs { stack_name: "c" table_specs { table_name: "t" } }',
            "cannot hold table 't'",
        ),
    ],
)
def test_damaged_messages(unpacked, file, text, message):
    path = unpacked("jax_tpu_embedding/adagrad")
    (path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_tables(path)


@pytest.mark.parametrize(
    ("stack", "names", "expected"),
    [
        ("a_b", ["b", "a"], ["a", "b"]),
        ("a_b_c", ["a", "b_c", "x"], ["a", "b_c"]),
        ("a_b_c", ["a", "b_c", "a_b", "c"], []),  # Two ways.
        ("a_a", ["a"], []),
        ("a_b", ["a"], []),
    ],
)
def test_names_of_stacks(stack, names, expected):
    assert _split(stack, names) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        (
            'a: 1 a: "x \\"y\\\\" b { c: -2.5 }',
            {"a": ["1", 'x "y\\'], "b": [{"c": ["-2.5"]}]},
        ),
        ("b: { c: T }", {"b": [{"c": ["T"]}]}),
        ('n: "\\303\\244"', {"n": ["ä"]}),
    ],
)
def test_text_format(text, expected):
    assert _parse_text(text) == expected


@pytest.mark.parametrize("text", ["a", "a:", "a }", "{", "a: }", 'a: "x', "a { b: 1"])
def test_refuses_other_text(text):
    with pytest.raises(ValueError, match="field|expected|does not end|unexpected"):
        _parse_text(text)
