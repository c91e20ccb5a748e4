"""The synthetic data sets are the recorded ones, bit by bit, and their teacher is best.

A change of these checksums changes the numbers of the configs.
"""

import dataclasses
import zlib

import jax
import numpy as np
import pytest

from tests.rejections import rejects
from tpu_embedding.tools.data.teacher import ZipfIds
from tpu_embedding.tools.train import load_config


def source_of(config, **changes):
    changes = {"num_evaluation_samples": 1000} | changes
    return dataclasses.replace(load_config(config).data, **changes)


def open_source(config, batch_size=256, **changes):
    return source_of(config, **changes).open(None, batch_size=batch_size, seed=3)


def checksum(batch):
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        array = np.ascontiguousarray(np.asarray(leaf))
        form = repr((array.dtype.str, array.shape)).encode()
        checksum = zlib.crc32(array.tobytes(), zlib.crc32(form, checksum))
    return f"{checksum:08x}"


# Checksums of the batches of steps 0 and 1000 and of the first held-out batch, and the
# log loss of the teacher.
RECORDED = {
    "synthetic": ("6985fbcb feb38f62 3a5c5e8b", 0.3975851088549202),
    "synthetic_stream": ("82f7f9c2 7a785fbf 0bbb824a", 0.4724292881505592),
    "dlrm": ("7bba3278 b0067810 4ce49b27", 0.3991491509975822),
    "two_tower": ("0be0405e 53f4acea 96d1f204", 3.266904261280897),
}


@pytest.mark.parametrize("config", RECORDED)
def test_batches_are_the_recorded_ones(config):
    data = open_source(config)
    batches = [data.train_batch(0), data.train_batch(1000)]
    batches.append(next(data.evaluation_batches()))
    checksums, teacher = RECORDED[config]
    assert " ".join(map(checksum, batches)) == checksums
    assert data.teacher_log_loss() == pytest.approx(teacher, rel=1e-12)
    # Another data set goes on at any step.
    assert checksum(open_source(config).train_batch(1000)) == checksums.split()[1]


MANY = {"max_valence": 3, "vocabulary_size": 1000}


@pytest.mark.parametrize(
    ("config", "changes", "recorded", "rows"),
    [
        ("synthetic_stream", {"vocabulary": "hashed"}, "be541bda", {"user": 2952}),
        ("synthetic_stream", {"vocabulary": "unlimited"}, "04dd575b", {"user": 10_000}),
        # Several ids per sample.
        ("dlrm_dcnv2", MANY, "53709e4a", {"cat_00": 1000}),
    ],
)
def test_other_vocabularies(config, changes, recorded, rows):
    batch = (data := open_source(config, **changes)).train_batch(1000)
    assert checksum(batch) == recorded
    for name, size in rows.items():
        assert data.vocabulary_sizes[name] == size
        assert 0 <= batch.features[name].min() and batch.features[name].max() < size


@pytest.mark.parametrize("config", RECORDED)
def test_held_out_samples_count_once(config):
    data = open_source(config, num_evaluation_samples=600)
    weights = [batch.weights.sum() for batch in data.evaluation_batches()]
    assert weights == [256, 256, 88]
    outline = source_of(config).outline(batch_size=256, seed=0).train_batch(0)
    assert jax.tree.map(np.shape, outline) == jax.tree.map(
        np.shape, data.train_batch(5)
    )


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 2.5])
def test_zipf_ids_have_their_probabilities(exponent):
    law = ZipfIds(vocabulary_size=12, exponent=exponent)
    ranks = law.draw_ranks(np.random.default_rng(0), 40_000)
    expected = law.probabilities(np.arange(12))
    assert expected.sum() == pytest.approx(1)
    shares = np.bincount(ranks, minlength=12) / len(ranks)
    # Five standard errors.
    np.testing.assert_array_less(abs(shares - expected), 5 * 0.5 / 200)
    assert sorted(law.ids_of_ranks(np.arange(12))) == list(range(12))


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ("synthetic", "SyntheticClicksSource.valence", 0),
        ("synthetic_stream", "num_items", -1),
        ("dlrm", "CriteoSource.vocabulary_size", 0),
    ],
)
def test_wrong_fields_are_rejected(config, field, value):
    with rejects(field=field, value=value):
        source_of(config, **{field.rpartition(".")[2]: value})
