"""Rules of the configuration classes, each with a value that breaks only it."""

import enum
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.rejections import rejects
from tpu_embedding.config import placement_of_embedding_feature

TABLE = te.TableConfig(vocabulary_size=7, dim=3, name="movie")
QUANTIZATION = te.QuantizationConfig(num_buckets=16, lower=-1.0, upper=1.0)
NAN, INF = math.nan, math.inf


def table(**options):
    return te.TableConfig(**{"vocabulary_size": 7, "dim": 3, "name": "t"} | options)


def feature(**options):
    return te.FeatureConfig(**{"table": TABLE, "name": "f"} | options)


def quantization(**options):
    return te.QuantizationConfig(
        **{"num_buckets": 16, "lower": -1.0, "upper": 1.0} | options
    )


def shape_initializer(shape, dtype=None):
    return jnp.zeros(shape, dtype)


class KerasInitializer:
    """As Keras and TensorFlow have them."""

    def __call__(self, shape, dtype=None, **kwargs):
        return jnp.zeros(shape, dtype)


WRONG = {
    table: [
        ("vocabulary_size", 0),
        ("vocabulary_size", 2**31 - 1),
        ("vocabulary_size", True),
        ("dim", 0),
        ("initializer", 0.5),
        ("initializer", shape_initializer),
        ("initializer", KerasInitializer()),
        ("optimizer", "adamm"),
        ("combiner", "max"),
        ("name", ""),
        ("name", 3),
        ("quantization_config", 16),
        ("dtype", np.float64),
        ("placement", print),
    ],
    feature: [
        ("table", None),
        ("table", (TABLE, TABLE)),
        ("max_sequence_length", -1),
        ("validate_weights_and_indices", 1),
        ("output_shape", 4),
        ("output_shape", (2, 0)),
        ("output_shape", np.array([-1])),
        ("output_shape", (-1, 2)),
        ("default_id", -1),
        ("default_id", 7),
        ("name", ""),
        ("name", 3),
        ("out_of_range_ids", "ignore"),
        ("expected_valence", 0),
        ("expected_valence", NAN),
    ],
    te.Sharded: [("axes", "data"), ("axes", ()), ("axes", ("a", "a"))],
    quantization: [
        ("num_buckets", 1),
        ("lower", 1.0),
        ("lower", NAN),
        ("upper", -1.0),
        ("upper", NAN),
    ],
}
CASES = [
    # The address of an object would differ between the processes of a test run.
    pytest.param(
        make,
        field,
        value,
        id=re.sub(" at 0x[0-9a-f]+", "", f"{make.__name__}-{field}-{value}"),
    )
    for make, cases in WRONG.items()
    for field, value in cases
]


@pytest.mark.parametrize(("make", "field", "value"), CASES)
def test_a_wrong_value_is_rejected_by_field(make, field, value):
    expected = dict(field=field, value=value)
    if field == "upper":  # The rule is one for both bounds.
        expected = dict(field="lower", fix=f"upper={value}")
    with rejects(**expected) as error:
        make(**{field: value})
    is_owned = make in (table, feature) and field != "name"
    assert not is_owned or f"'{make.__name__[0]}'" in str(error.value)


RIGHT = [
    (table, dict(vocabulary_size=1, dim=1)),
    (table, dict(vocabulary_size=2**31 - 2)),
    (table, dict(initializer=jax.nn.initializers.zeros)),
    (table, dict(quantization_config=QUANTIZATION)),
    (table, dict(dtype=jnp.bfloat16)),
    (table, dict(vocabulary_size=np.int64(7), dim=np.uint8(3))),
    (feature, dict(output_shape=(np.int64(2), 3))),
    (feature, dict(output_shape=(-1,))),
    (feature, dict(default_id=np.int64(6))),
    (quantization, dict(lower=np.float32(-2), upper=np.float64(2))),
    (quantization, dict(num_buckets=np.int64(16))),
    (table, dict(optimizer="adagrad")),
]


@pytest.mark.parametrize(("make", "options"), RIGHT)
def test_right_values_are_kept(make, options):
    config = make(**options)
    for field, value in options.items():
        kept = getattr(config, field)
        assert kept == value
        # NumPy's narrow integers would wrap in arithmetic.
        for part in kept if isinstance(kept, tuple) else (kept,):
            assert not isinstance(part, np.integer)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("max_sequence_length", dict(output_shape=(3,))),
        ("combiner", dict(combiner="sum")),
        ("default_id", dict(default_id=3)),
    ],
)
def test_fields_that_contradict_each_other(field, options):
    with rejects(field=field, fix="'f'"):
        feature(max_sequence_length=2, **options)


def test_row_id_initializer():
    values = te.initializers.RowIdInitializer(5)(jax.random.key(0), (4, 2), jnp.float32)
    np.testing.assert_array_equal(values, [[5, 5], [6, 6], [7, 7], [8, 8]])
    assert values.dtype == jnp.float32
    initializer = te.initializers.RowIdInitializer(2**31 - 3)
    values = initializer(jax.random.key(0), (6, 1), jnp.float32)
    np.testing.assert_array_equal(values[:, 0], np.float32(2**31 - 3 + np.arange(6)))
    named = table(initializer=te.initializers.RowIdInitializer(-1))
    plan = te.make_plan(te.FeatureConfig(table=named))
    tables = te.functional.unstack_tables(
        te.functional.init_tables(plan, jax.random.key(0)), plan
    )
    np.testing.assert_array_equal(tables["t"], np.arange(-1, 6)[:, None] * np.ones(3))


def test_an_initializer_of_another_library_says_how_to_wrap_it():
    with rejects(field="initializer", fix="lambda key, shape, dtype:"):
        table(initializer=KerasInitializer())
    wrapped = table(
        initializer=lambda key, shape, dtype: jnp.asarray(
            shape_initializer(shape), dtype
        )
    )
    plan = te.make_plan(te.FeatureConfig(table=wrapped))
    assert not te.functional.unstack_tables(
        te.functional.init_tables(plan, jax.random.key(0)), plan
    )["t"].any()


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
