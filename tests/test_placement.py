"""The values that place tables: what they refuse."""

import numpy as np
import pytest

import tpu_embedding as te

WRONG = {
    "axes as a string": (lambda: te.Sharded(axes="data"), TypeError, "Sharded.axes"),
    "axes as a list": (lambda: te.Sharded(axes=["data"]), TypeError, "Sharded.axes"),
    "axes of numbers": (lambda: te.Sharded(axes=(0,)), TypeError, "Sharded.axes"),
    "no axes": (lambda: te.Sharded(axes=()), ValueError, "te.Replicated()"),
    "an axis twice": (lambda: te.Sharded(axes=("a", "a")), ValueError, "each once"),
    "rows as text": (lambda: te.ReplicateSmall(max_rows="9"), TypeError, "max_rows"),
    "rows as a bool": (lambda: te.ReplicateSmall(max_rows=True), TypeError, "max_rows"),
    "negative rows": (lambda: te.ReplicateSmall(max_rows=-1), ValueError, "max_rows"),
    "otherwise replicated": (
        lambda: te.ReplicateSmall(otherwise=te.Replicated()),
        TypeError,
        "ReplicateSmall.otherwise",
    ),
    "an empty batch": (
        lambda: te.AutoPlacement(batch_size=0),
        ValueError,
        "AutoPlacement.batch_size",
    ),
    "bytes as a float": (
        lambda: te.AutoPlacement(batch_size=1, max_bytes=1e6),
        TypeError,
        "AutoPlacement.max_bytes",
    ),
    "otherwise a name": (
        lambda: te.AutoPlacement(batch_size=1, otherwise="model"),
        TypeError,
        "AutoPlacement.otherwise",
    ),
    "a policy for a table": (
        lambda: te.TableConfig(
            vocabulary_size=3, dim=2, placement=te.ReplicateSmall(), name="t"
        ),
        ValueError,
        "TableConfig.placement .* table 't'",
    ),
    "a string for a table": (
        lambda: te.TableConfig(vocabulary_size=3, dim=2, placement="replicated"),
        ValueError,
        "TableConfig.placement .*'replicated'",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_numpy_integers_are_integers():
    assert te.ReplicateSmall(max_rows=np.int64(5)) == te.ReplicateSmall(max_rows=5)
    assert te.AutoPlacement(batch_size=np.int32(8)).batch_size == 8


def test_equal_placements_are_equal_keys():
    assert len({te.Sharded(), te.Sharded(axes=None), te.Replicated()}) == 2
