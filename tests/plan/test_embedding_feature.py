"""TensorFlow's names of embedding hardware: what they ask for, and who has them."""

import enum

import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

OF_HARDWARE = {
    "v4": "V1",
    "v5e": "UNSUPPORTED",
    "v5p": "V2",
    "v6e": "V2",
    "tpu7x": "V2",
    "cpu": "UNSUPPORTED",
    "gpu": "UNSUPPORTED",
}
TABLE = te.TableConfig(vocabulary_size=10, dim=2, name="t")
FEATURE = te.FeatureConfig(table=TABLE)


class EmbeddingFeature(enum.Enum):
    """As TensorFlow's."""

    UNSUPPORTED = 0
    V1 = 1
    V2 = 2


def plan_of(hardware, feature, **options):
    return te.make_plan(
        FEATURE,
        mesh_of(2),
        hardware=te.hardware.hardware_by_name(hardware),
        embedding_feature=feature,
        **options,
    )


@pytest.mark.parametrize("hardware", OF_HARDWARE)
def test_none_replicates_on_any_hardware(hardware):
    for feature in ("UNSUPPORTED", EmbeddingFeature.UNSUPPORTED):
        (stack,) = plan_of(hardware, feature).stacks
        assert (stack.num_shards, stack.num_replicas) == (1, 2)


@pytest.mark.parametrize("feature", ["V1", "V2"])
@pytest.mark.parametrize(("hardware", "own"), OF_HARDWARE.items())
def test_a_version_needs_its_hardware(hardware, own, feature):
    if feature == own:
        plan = plan_of(hardware, feature)
        assert plan == plan_of(hardware, EmbeddingFeature[feature])
        assert plan == plan_of(hardware, None)
        assert plan.stacks[0].num_shards == 2
        return
    with pytest.raises(ValueError, match="embedding_feature must be") as error:
        plan_of(hardware, feature)
    assert f"{own!r} on {hardware}, got {feature!r}" in str(error.value)


WRONG = {
    "another name": ("V3", {}, ValueError, r"\('UNSUPPORTED', 'V1', 'V2'\).*'V3'"),
    "a number": (2, {}, TypeError, "embedding_feature must be one of .* got 2"),
    "sharded tables": (
        "UNSUPPORTED",
        dict(placement=te.Sharded()),
        ValueError,
        r"replicates tables, .*placement=Sharded\(axes=None\)",
    ),
    "replicated tables": (
        "V2",
        dict(placement=te.Replicated()),
        ValueError,
        r"'V2' shards tables, got placement=Replicated\(\)",
    ),
}


@pytest.mark.parametrize(
    ("feature", "options", "kind", "message"), WRONG.values(), ids=WRONG
)
def test_contradictions_are_refused(feature, options, kind, message):
    with pytest.raises(kind, match=message):
        plan_of("v5p", feature, **options)
