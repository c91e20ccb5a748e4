"""A whole run with bfloat16 tables learns what one with float32 tables does."""

import pytest

from tests.conftest import mesh_of
from tpu_embedding.rows.narrow_rows import encode_rows
from tpu_embedding.tools.train import apply_overrides, load_config, train
from tpu_embedding.update import table_writer


def log_loss(directory, dtype):
    config = apply_overrides(
        load_config("synthetic"),
        [f"table_dtype={dtype}", "evaluate_every=0", "checkpoint_every=0"],
    )
    # One device takes least time, and eight give the same but for rounding.
    return train(config, directory, mesh=mesh_of(1)).metrics["log_loss"]


@pytest.mark.exhaustive
def test_bfloat16_ends_near_float32_and_needs_random_rounding(tmp_path, monkeypatch):
    float32 = log_loss(tmp_path / "float32", "float32")
    stochastic = log_loss(tmp_path / "stochastic", "bfloat16")
    monkeypatch.setattr(
        table_writer, "encode_rows", lambda rows, dtype, bits: encode_rows(rows, dtype)
    )
    nearest = log_loss(tmp_path / "nearest", "bfloat16")
    # Seen with the seeds 0, 1 and 2: 0.02, 0.01 and 0.00 % above float32, and 0.07,
    # 0.03 and 0.03 % where updates are rounded to the nearest number.
    assert abs(stochastic / float32 - 1) < 0.002
    assert nearest > stochastic > float32
