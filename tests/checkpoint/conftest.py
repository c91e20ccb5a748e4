"""A checkpoint that many tests read.

The package is imported when it is used: jaxtyping checks only what is imported later
than this file.
"""

import pytest


@pytest.fixture(scope="session")
def plan():
    from tests.checkpoint.states import plan_of

    return plan_of()


@pytest.fixture(scope="session")
def saved(plan, tmp_path_factory):
    """A directory with a state, and its numbers. Tables have several chunks."""
    import tpu_embedding as te
    from tests.checkpoint.states import numbers_of, state_of, with_random_slots
    from tpu_embedding.tables import line_exchange

    directory = tmp_path_factory.mktemp("saved") / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 128)
        state = with_random_slots(state_of(plan), plan)
        te.save(directory, state, plan=plan, description={"run": "a"})
    return directory, numbers_of(state, plan)
