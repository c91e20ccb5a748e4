"""The form in which each kind of hardware pools rows and applies gradients."""

import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

FORMS = {
    # The devices, hardware, options; if ids are sent, and the forms.
    "one device": (1, None, {}, False, "by_feature", "blocks"),
    "eight devices": (8, None, {}, True, "fused", "whole"),
    "copies": (8, None, {"placement": te.Replicated()}, False, "by_feature", "whole"),
    "asked for rounds": (1, None, {"capacity": 4}, True, "by_feature", "whole"),
    "one GPU": (1, "gpu", {}, False, "fused", "whole"),
    "one chip": (1, "v5p", {}, False, "whole", "whole"),
    "eight chips": (8, "v6e", {}, True, "whole", "whole"),
}
WITHOUT_BLOCKS = {
    "every_row": te.optimizers.every_row(optax.adam(0.1)),
    "sequence": te.optimizers.in_sequence(optax.sgd(0.1)),
    "totals": te.optimizers.clippy_adagrad(0.1),
}


def stack_of(num_devices, optimizer, **options):
    table = te.TableConfig(vocabulary_size=99, dim=8, name="t")
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(num_devices),
        optimizer=optimizer,
        **options,
    )
    return plan.stacks[0]


@pytest.mark.parametrize("case", FORMS)
def test_forms(case):
    num_devices, name, options, sends_ids, gathers, updates = FORMS[case]
    hardware = None if name is None else te.hardware.hardware_by_name(name)
    stack = stack_of(num_devices, optax.sgd(1.0), hardware=hardware, **options)
    assert stack.sends_ids == sends_ids
    assert (stack.gathers, stack.updates) == (gathers, updates)


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_rules_that_do_not_run_in_blocks(name):
    assert stack_of(1, WITHOUT_BLOCKS[name]).updates == "whole"
