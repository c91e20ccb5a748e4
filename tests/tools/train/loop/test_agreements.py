"""Processes of a job agree on the checkpoint to resume from."""

import pathlib

import pytest

from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.tools.jobs.run_lock import RunDirectoryError
from tpu_embedding.tools.train.loop import agreements
from tpu_embedding.tools.train.loop.agreements import agree_on_checkpoint


class Listing:
    """The checkpoints as a host lists them, whose last listing is not stale."""

    directory = pathlib.Path("run/checkpoints")

    def __init__(self, *listings):
        self._listings = list(listings)

    @property
    def steps(self):
        return self._listings.pop(0) if len(self._listings) > 1 else self._listings[0]

    @property
    def latest_step(self):
        return max(self.steps, default=None)


def agreed(*hosts):
    return on_each(
        make_jobs(len(hosts)),
        lambda job: agree_on_checkpoint(job, hosts[job.process_index]),
    )


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([Listing([10, 20]), Listing([10, 20])], id="equal"),
        pytest.param([Listing([10, 20]), Listing([10], [10, 20])], id="late"),
        pytest.param([Listing([20]), Listing([], [], [20])], id="nothing yet"),
        pytest.param([Listing([10], [10, 20]), Listing([10, 20])], id="first is late"),
    ],
)
def test_all_resume_from_the_newest_checkpoint_that_one_sees(hosts):
    assert agreed(*hosts) == [20] * len(hosts)


def test_no_checkpoint_is_agreed_on():
    assert agreed(Listing([]), Listing([])) == [None, None]


def test_a_checkpoint_that_stays_unseen_is_an_error_on_all(monkeypatch):
    monkeypatch.setattr(agreements, "_VISIBLE_SECONDS", 0)
    for error in agreed(Listing([10, 20]), Listing([10]), Listing([10, 20])):
        assert isinstance(error, RunDirectoryError), error
        assert "the checkpoint of step 20 in run/checkpoints, but process 1" in (
            str(error)
        )
