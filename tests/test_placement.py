"""The values that place tables: what they refuse."""

import pytest

import tpu_embedding as te

WRONG = {
    "axes as a string": (lambda: te.Sharded(axes="data"), TypeError, "Sharded.axes"),
    "no axes": (lambda: te.Sharded(axes=()), ValueError, "te.Replicated()"),
    "an axis twice": (lambda: te.Sharded(axes=("a", "a")), ValueError, "each once"),
    "rows as text": (lambda: te.ReplicateSmall(max_rows="9"), TypeError, "max_rows"),
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
    "a policy for a table": (
        lambda: te.TableConfig(
            vocabulary_size=3, dim=2, placement=te.ReplicateSmall(), name="t"
        ),
        ValueError,
        "TableConfig.placement .* table 't'",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
