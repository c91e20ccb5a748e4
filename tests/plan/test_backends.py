"""The one decision: which backend runs, and the reason that the plan gives."""

import jax.numpy as jnp
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.plan.backends import FeatureBatch, choose_for_batch

pytestmark = needs_kernels


def stack_of(
    dim, optimizer=None, kernels="interpreter", num_rows=1000, dtype="float32"
):
    table = te.TableConfig(vocabulary_size=num_rows, dim=dim, name="t", dtype=dtype)
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(1),
        optimizer=te.optimizers.adagrad(0.1) if optimizer is None else optimizer,
        kernels=kernels,
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    return plan.stacks[0]


@pytest.mark.parametrize(
    ("dim", "num_rows", "reason"),
    [
        (100, 9, "dim 100"),
        (1, 9, "32"),
        (4, 9, "32"),
        (64, 2**27, "16 GiB"),
    ],
)
def test_rows_out_of_reach(dim, num_rows, reason):
    stack = stack_of(dim, num_rows=num_rows)
    for choice in stack.backends:
        assert choice.backend == "xla"
        assert reason in choice.reason
    assert (stack.kernels, stack.layout.spare_lines) == (None, 0)


NO_UPDATE = {
    "every_row": (te.optimizers.every_row(optax.adam(0.1)), "every row"),
    "sequence": (te.optimizers.in_sequence(optax.sgd(0.1)), "each occurrence"),
    "bfloat16": (te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16), "bfloat16"),
    "counts": (te.optimizers.frequency_aware_adagrad(0.1), "int32"),
    "totals": (te.optimizers.clippy_adagrad(0.1), "total"),
    "operation": (optax.stateless(lambda u, _: jnp.sin(u)), "sin"),
}


@pytest.mark.parametrize(("optimizer", "reason"), NO_UPDATE.values(), ids=NO_UPDATE)
def test_rules_that_no_kernel_runs(optimizer, reason):
    backends = stack_of(8, optimizer).backends
    assert (backends.read.backend, backends.update.backend) == ("interpreter", "xla")
    assert backends.write == backends.read
    assert reason in backends.update.reason


def plain(num_samples, valence=1):
    return FeatureBatch(num_samples * valence, num_samples, valence, False, False)


def weighted(num_samples, valence=2):
    return FeatureBatch(num_samples * valence, num_samples, valence, False, True)


def ragged(num_samples, num_ids):
    return FeatureBatch(num_ids, num_samples, 1, True, False)


KERNEL, XLA = "interpreter", "xla"
BATCHES = {
    # Rows of 32 share lines: 4 x 8 samples fill a tile of lines.
    "narrow": (32, [plain(32), plain(32, 5)], 32, KERNEL, KERNEL),
    "narrow_weighted": (32, [plain(32), weighted(32)], 32, KERNEL, XLA),
    "narrow_ragged": (32, [plain(32), ragged(32, 64)], None, XLA, XLA),
    "narrow_unequal": (32, [plain(32), plain(64)], None, XLA, XLA),
    "wide": (128, [plain(8), plain(16, 5)], None, KERNEL, KERNEL),
    "wide_weighted": (128, [plain(8), weighted(8)], None, KERNEL, XLA),
    "wide_unaligned": (128, [plain(8), plain(9)], None, XLA, XLA),
}


@pytest.mark.parametrize("case", BATCHES)
def test_choice_for_a_batch(case):
    dim, features, samples, pool, spread = BATCHES[case]
    stack = stack_of(dim)
    choice = choose_for_batch(stack.layout, stack.backends, features)
    assert choice.samples_per_feature == samples
    assert (choice.pool.backend, choice.spread.backend) == (pool, spread)
    for made in (choice.pool, choice.spread):
        assert (made.reason == "requested") == (made.backend == KERNEL)


FORMS = {
    # The devices, hardware, options, and the forms of reading, pooling and spreading.
    "one device": (1, None, {}, "direct", "fused", "blocks"),
    "eight devices": (8, None, {}, "whole", "fused", "whole"),
    "copies": (8, None, {"placement": te.Replicated()}, "direct", "fused", "whole"),
    "asked for rounds": (1, None, {"capacity": 4}, "whole", "fused", "whole"),
    "one GPU": (1, "gpu", {}, "direct", "fused", "whole"),
    "one chip": (1, "v5p", {}, "direct", "whole", "whole"),
    "eight chips": (8, "v6e", {}, "whole", "whole", "whole"),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms_of_xla(case):
    num_devices, hardware, options, read, pool, spread = FORMS[case]
    plan = te.make_plan(
        te.FeatureConfig(table=te.TableConfig(vocabulary_size=99, dim=8)),
        mesh_of(num_devices),
        optimizer=optax.sgd(1.0),
        hardware=None if hardware is None else te.hardware.hardware_by_name(hardware),
        **options,
    )
    backends = plan.stacks[0].backends
    assert (backends.read.form, backends.pool.form) == (read, pool)
    assert backends.spread.form == backends.update.form == spread
    assert backends.write.form == "whole"


def test_rules_that_do_not_run_in_blocks():
    for name in ("every_row", "sequence", "totals"):
        table = te.TableConfig(vocabulary_size=9, dim=8, name="t")
        plan = te.make_plan(
            te.FeatureConfig(table=table), mesh_of(1), optimizer=NO_UPDATE[name][0]
        )
        assert plan.stacks[0].backends.spread.form == "whole"


@pytest.mark.parametrize(
    ("dim", "num_ids", "ids_per_block"),
    [(128, 10**6, 2048), (3, 10**6, 87424), (1024, 10, 128), (10**7, 200, 128)],
)
def test_blocks_fit_a_cache(dim, num_ids, ids_per_block):
    table = te.TableConfig(vocabulary_size=9, dim=dim, name="t")
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(1), optimizer=optax.sgd(1.0)
    )
    (stack,) = plan.stacks
    choice = choose_for_batch(stack.layout, stack.backends, [plain(num_ids)])
    assert choice.ids_per_block == ids_per_block
