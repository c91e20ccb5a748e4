"""The values that place tables: what they refuse."""

import enum

import pytest

import tpu_embedding as te
from tpu_embedding.config import placement_of_embedding_feature

WRONG = {
    "axes as a string": (lambda: te.Sharded(axes="data"), ValueError, "Sharded.axes"),
    "no axes": (lambda: te.Sharded(axes=()), ValueError, "te.Replicated()"),
    "an axis twice": (
        lambda: te.Sharded(axes=("a", "a")),
        ValueError,
        "Sharded.axes must",
    ),
    "a function for a table": (
        lambda: te.TableConfig(
            vocabulary_size=3, dim=2, placement=lambda name, num_rows: None, name="t"
        ),
        ValueError,
        "TableConfig.placement .* table 't'",
    ),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


class EmbeddingFeature(enum.Enum):
    """As TensorFlow's."""

    UNSUPPORTED = 0
    V1 = 1
    V2 = 2


def test_only_hardware_without_embeddings_replicates():
    for feature in ("UNSUPPORTED", EmbeddingFeature.UNSUPPORTED):
        assert placement_of_embedding_feature(feature) == te.Replicated()
    for feature in ("V1", "V2", EmbeddingFeature.V2, None):
        assert placement_of_embedding_feature(feature) is None
    with pytest.raises(ValueError, match="embedding_feature must be .* got 'V3'"):
        placement_of_embedding_feature("V3")
