"""Mismatches between a source and a model: all at once, each with the way out."""

import jax
import numpy as np
import pytest

from tpu_embedding.checkpoint.imports.match import (
    ImportOptions,
    TargetTable,
    match_tables,
)
from tpu_embedding.checkpoint.imports.opening import open_tables

ROW = jax.ShapeDtypeStruct((4,), np.float32)
TARGETS = [
    TargetTable(name="a", vocabulary_size=10, dim=4, slots={"accumulators": ROW}),
    TargetTable(name="b", vocabulary_size=20, dim=4, slots={}),
]


def match(arrays, **options):
    return match_tables(open_tables(arrays), TARGETS, ImportOptions(**options))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


WHOLE = {"a": zeros(10, 4), "a/accumulators": zeros(10, 4), "b": zeros(20, 4)}


@pytest.mark.parametrize(
    ("arrays", "options", "messages"),
    [
        (
            {"a": zeros(10, 5), "b": zeros(25, 4)},
            {},
            [
                "table 'a': 'a' of the source has dim 5, the model 4; set TableConfig",
                "table 'b': 'b' of the source has 25 rows, the model 20; set",
                "rows='shared' to leave out the last 5 rows of the source",
            ],
        ),
        (
            {"a": zeros(9, 4), "b": zeros(20, 4, dtype=np.int32)},
            {},
            [
                "rows='shared' to import the first 9 rows and keep the others",
                "'b' of the source has dtype int32; convert it to floating numbers",
            ],
        ),
        ({"a": zeros(10)}, {}, ["has shape (10,), which is no table [rows, dim]"]),
        (
            WHOLE,
            {"tables": ["c", "b"], "rename": {"b": "B", "d": "a"}},
            [
                "tables names 'c'; the model has the tables ['a', 'b']",
                "rename names 'd'",
                "table 'b': the source has no table 'B'. Give its name there by",
            ],
        ),
        ({"x": zeros(10, 4)}, {}, ["no table of the model, ['a', 'b'], has a name of"]),
        (
            WHOLE,
            {
                "tables": ["a"],
                "slots": {"momenta": "accumulators", "accumulators": "m"},
            },
            [
                "slots={'momenta': 'accumulators'}: the optimizer has accumulators [4]",
                "slots={'accumulators': 'm'}: 'a' of the source has the slots "
                "['accumulators']",
            ],
        ),
        (
            WHOLE | {"a/accumulators": zeros(10)},
            {"tables": ["a"], "slots": {"accumulators": "accumulators"}},
            ["the source has shape (10,), the optimizer takes (10, 4)"],
        ),
        (
            WHOLE | {"a/accumulators": zeros(10, 4, dtype=np.int64)},
            {"tables": ["a"], "slots": {"accumulators": "accumulators"}},
            ["the source has dtype int64, the optimizer float32; convert it"],
        ),
    ],
)
def test_mismatches(arrays, options, messages):
    with pytest.raises(ValueError) as error:
        match(arrays, **options)
    for message in messages:
        assert message in str(error.value)


def test_a_whole_match():
    matched, report = match(WHOLE)
    assert {name: table.num_rows for name, table in matched.items()} == {
        "a": 10,
        "b": 20,
    }
    assert report.slots == {"a": {"accumulators": "accumulators"}, "b": {}}


@pytest.mark.parametrize("size", [5, 15])
def test_shared_rows(size):
    matched, _ = match({"a": zeros(size, 4)}, rows="shared")
    assert matched["a"].num_rows == min(size, 10)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tables": "a"}, TypeError, "tables must be a list of names, got 'a'"),
        ({"rename": ["a"]}, TypeError, "rename must be a dict of names"),
        ({"slots": "all"}, ValueError, "slots must be one of .* or a dict of slot"),
        (
            {"rows": "cut"},
            ValueError,
            r"rows must be one of \['equal', 'shared'\], got",
        ),
    ],
)
def test_refuses_other_options(options, error, message):
    with pytest.raises(error, match=message):
        ImportOptions(**options)
