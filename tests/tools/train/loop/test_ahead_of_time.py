"""The programs of a run that `tpu-embedding compile` compiles beside the train step."""

import jax
import pytest

from tests.conftest import mesh_of
from tpu_embedding.tools.compile_report.device_memory import device_bytes
from tpu_embedding.tools.train import apply_overrides, load_config, make_run_plan
from tpu_embedding.tools.train.loop.ahead_of_time import PROGRAM_NAMES, other_programs
from tpu_embedding.tools.train.loop.run_program import prepare_run


@pytest.fixture(scope="module")
def run():
    settings = ["batch_size=16", "model.dim=4", "data.num_evaluation_samples=20"]
    config = apply_overrides(load_config("synthetic"), settings)
    data = config.data.outline(batch_size=config.batch_size, seed=0)
    return config, data, make_run_plan(config, data, mesh_of(2))


def shapes(tree):
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def test_names(run):
    names = [program.name for program in other_programs(*run)]
    assert names == [
        *("initial tables", "initial dense parameters", "initial slot variables"),
        *("evaluation step", "serving lookup", "save", "restore"),
    ]
    assert list(other_programs(*run, names=())) == []
    by_name = [len(list(other_programs(*run, names=(n,)))) for n in PROGRAM_NAMES]
    assert by_name == [3, 1, 1, 2]


def test_the_initial_values_are_the_state_of_the_run(run):
    config, data, plan = run
    state = prepare_run(config, None, mesh=plan.mesh).state
    programs = list(other_programs(config, data, plan, ["init"]))
    made = [
        jax.eval_shape(program.function, program.resident, *program.inputs)
        for program in programs
        if program.function is not None
    ]
    assert shapes(made) == shapes(state)


def test_what_lies_on_the_devices(run):
    """Each part of the state counts from the program that makes it."""
    _, _, plan = run
    found = {
        program.name: {part: device_bytes(x) for part, x in program.resident.items()}
        for program in other_programs(*run)
    }
    whole = found["save"]
    assert whole["tables"] == plan.table_bytes_per_device
    assert whole["slots"] >= plan.slot_bytes_per_device
    assert found["evaluation step"] == found["restore"] == whole
    tables, dense = ({part: whole[part]} for part in ("tables", "dense"))
    assert found["initial tables"] == {}
    assert found["initial dense parameters"] == found["serving lookup"] == tables
    assert found["initial slot variables"] == tables | dense
