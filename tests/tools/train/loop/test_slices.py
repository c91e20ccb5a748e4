"""Runs on two emulated slices, with tables split over all devices or over a slice."""

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.tools.train.loop.test_training_loop import losses, tiny_config
from tpu_embedding.tools.train import SyntheticClicksSource, make_run_plan, train

DATA = SyntheticClicksSource(num_evaluation_samples=10).open(
    None, batch_size=50, seed=0
)


@pytest.mark.parametrize("split_over", ["all", "slice"])
def test_plan_on_two_slices(split_over):
    config = tiny_config(f"tables_split_over={split_over}")
    plan = make_run_plan(config, DATA, te.device_mesh(num_slices=2))
    (stack,) = plan.stacks
    if split_over == "all":
        assert (stack.shard_axes, stack.num_replicas) == (("slice", "shard"), 1)
    else:
        assert (stack.shard_axes, stack.num_replicas) == (("shard",), 2)
    assert plan.num_shards == len(jax.devices())
    one_slice = make_run_plan(config, DATA, te.device_mesh())
    assert one_slice.stacks[0].num_replicas == 1


@pytest.mark.full
def test_slices_change_no_numbers(tmp_path):
    found = {}
    for name, num_slices, split_over in (
        ("one", None, "slice"),
        ("slice", 2, "slice"),
    ):
        config = tiny_config(f"tables_split_over={split_over}", "num_steps=4")
        mesh = te.device_mesh(num_slices=num_slices)
        result = train(config, tmp_path / name, mesh=mesh)
        assert result is not None
        found[name] = [*losses(tmp_path / name).values(), *result.metrics.values()]
    # Devices sum in another order.
    np.testing.assert_allclose(found["slice"], found["one"], rtol=2e-5, atol=2e-6)
