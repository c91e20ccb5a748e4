"""The values that place tables: what they reject."""

import enum

import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.config import placement_of_embedding_feature


@pytest.mark.parametrize("axes", ["data", (), ("a", "a")], ids=str)
def test_wrong_axes_are_rejected(axes):
    with rejects(fix="Sharded.axes"):
        te.Sharded(axes=axes)


def test_a_table_has_no_function_for_its_placement():
    with rejects(field="placement", value=print, fix="'t'"):
        te.TableConfig(vocabulary_size=3, dim=2, placement=print, name="t")


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
    with rejects(field="embedding_feature", value="V3"):
        placement_of_embedding_feature("V3")
