"""All processes stop before the same step, whichever gets the signal, and when."""

import random
import signal
import threading

import pytest

from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.distributed import poller
from tpu_embedding.tools.jobs.stop_signals import StopRequest


@pytest.mark.parametrize("seed", range(5))
def test_processes_stop_before_the_same_step(seed, monkeypatch):
    monkeypatch.setattr(poller, "POLL_SECONDS", 0.001)
    generator = random.Random(seed)
    victim, at_step = generator.randrange(3), generator.randrange(5)
    jobs = make_jobs(3)
    # A step needs all processes, as its collectives do: if one stopped earlier than
    # the others, they would wait here until the timeout.
    barrier = threading.Barrier(3)

    def run(job):
        index = job.process_index
        stop = StopRequest(job)
        with stop._agreeing():
            step = 0
            while not stop.reached(step):
                if index == victim and step == at_step:
                    stop.signal = signal.SIGTERM
                step += 1
                barrier.wait(timeout=30)
                assert step < 100_000
            assert stop.is_decided(step)
            assert stop.signal == signal.SIGTERM
            return step

    first, *others = on_each(jobs, run)
    assert others == [first, first]
    assert first > at_step


def test_a_process_that_has_not_begun_stops_before_its_first_step(monkeypatch):
    monkeypatch.setattr(poller, "POLL_SECONDS", 0.001)
    decided = threading.Barrier(2)

    def run(job):
        stop = StopRequest(job)
        if job.is_first:
            stop.signal = signal.SIGHUP
        with stop._agreeing():
            while not stop.is_decided(0):
                pass
            decided.wait(timeout=30)
            return stop.reached(0), stop.signal

    assert on_each(make_jobs(2), run) == [(True, signal.SIGHUP)] * 2


def test_all_learn_of_a_request_where_they_wait_for_each_other():
    jobs = make_jobs(3)

    def ask(job):
        stop = StopRequest(job)
        if job.process_index == 1:
            stop.signal = signal.SIGTERM
        return stop.requested_by_any(), stop.signal

    assert on_each(jobs, ask) == [(True, signal.SIGTERM)] * 3
    quiet = make_jobs(2)
    asked = on_each(quiet, lambda job: StopRequest(job).requested_by_any())
    assert asked == [False, False]


def test_a_later_agreement_ignores_earlier_requests(monkeypatch):
    monkeypatch.setattr(poller, "POLL_SECONDS", 0.001)
    jobs = make_jobs(2)

    def run(job):
        stopped = []
        for request in (signal.SIGTERM, None):
            stop = StopRequest(job)
            stop.signal = request
            with stop._agreeing():
                step = 0
                while step < 50 and not stop.reached(step):
                    job.exchange("step", step, max)
                    step += 1
                stopped.append(step < 50)
        return stopped

    assert on_each(jobs, run) == [[True, False]] * 2
