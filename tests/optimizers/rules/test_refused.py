"""Optimizers that are known by name only."""

import pytest

from tpu_embedding.optimizers.rules.refused import mdl_adagrad_light


def test_mdl_adagrad_light_says_why_and_what_else():
    with pytest.raises(NotImplementedError, match="update formula.*rowwise_adagrad"):
        mdl_adagrad_light(0.1, mdl_hard_limit=0.5)
