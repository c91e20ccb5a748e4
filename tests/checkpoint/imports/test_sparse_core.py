"""Rows of stacked tables, beside stacks that TensorFlow's functions made."""

import json

import numpy as np
import pytest

from tests.conftest import GOLDEN
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import array_of
from tpu_embedding.checkpoint.imports.sparse_core import StackedTable, read_stacked


def stacked_tables(name):
    """Yields tables of a golden file: the table's rows, its stack, its place there."""
    layouts = json.loads((GOLDEN / f"layout_{name}.json").read_text())["layouts"]
    arrays = np.load(GOLDEN / f"layout_shuffle_{name}.npz")
    for layout in layouts:
        rows, dim = map(int, layout["unsharded_shape"])
        place = StackedTable(
            name=layout["table_name"],
            stack_name=layout["stacked_table_name"],
            vocabulary_size=rows,
            dim=dim,
            num_shards=int(layout["num_sparse_cores"]),
            row_offset=int(layout.get("sparse_core_shard_row_offset", 0)),
            rotation=int(layout.get("sparse_core_shard_rotation", 0)),
        )
        stack = arrays[f"stacked__{place.stack_name}"]
        yield arrays[f"table__{place.name}"], stack, place


@pytest.mark.parametrize("name", ["no_stacking", "two_same", "pad_and_groups"])
def test_equals_tensorflow(name):
    for expected, stack, place in stacked_tables(name):
        table = read_stacked(array_of(stack), place, "here")
        np.testing.assert_array_equal(np.asarray(table), expected)
        slot = read_stacked(array_of(stack[:, 0]), place, "here")
        np.testing.assert_array_equal(np.asarray(slot), expected[:, 0])
        for start in range(0, len(expected), 3):
            for size in (0, 1, 2, 11, place.num_shards + 1):
                size = min(size, len(expected) - start)
                np.testing.assert_array_equal(
                    table.read(start, size), expected[start : start + size]
                )


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_shards", 5), ("row_offset", 12), ("vocabulary_size", 500), ("dim", 9)],
)
def test_refuses_places_outside_the_stack(field, value):
    _, stack, place = next(iter(stacked_tables("two_same")))
    place = StackedTable(**{**vars(place), field: value})
    with pytest.raises(
        CheckpointError, match="here: stack 'a_b' of shape .* cannot hold"
    ):
        read_stacked(array_of(stack), place, "here")
