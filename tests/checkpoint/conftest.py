"""A checkpoint that many tests read."""

import pytest

import tpu_embedding as te
from tests.checkpoint.states import numbers_of, plan_of, state_of, with_random_slots
from tpu_embedding.tables import line_exchange


@pytest.fixture(scope="session")
def plan():
    return plan_of()


@pytest.fixture(scope="session")
def saved(plan, tmp_path_factory):
    """A directory with a state, and its numbers. Tables have several chunks."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 128)
        state = with_random_slots(state_of(plan), plan)
        te.save(directory, state, plan=plan, description={"run": "a"})
    return directory, numbers_of(state, plan)
