"""Exchanges and agreements between processes, which threads play."""

import concurrent.futures
import platform

import pytest

from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.distributed import AbsentProcessError, DisagreementError, current_job
from tpu_embedding.distributed import job as job_module


@pytest.mark.parametrize("num_processes", [1, 2, 5])
def test_an_exchange_combines_the_values_in_order(num_processes):
    jobs = make_jobs(num_processes)

    def exchange(job):
        return [
            job.exchange("values", [job.process_index, turn], combine=lambda x: x)
            for turn in range(3)
        ]

    expected = [[[p, turn] for p in range(num_processes)] for turn in range(3)]
    assert on_each(jobs, exchange) == [expected] * num_processes
    left = jobs[0].store.items("exchange")
    assert len(left) <= 1  # the last result, which is deleted by the next exchange


def test_exchanges_of_two_names_do_not_meet():
    jobs = make_jobs(2)

    def exchange(job):
        # In another order on each process, in a thread for each name.
        names = ["a", "b"] if job.is_first else ["b", "a"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda name: job.exchange(name, name, list), names)
            return dict(zip(names, found, strict=True))

    expected = {"a": ["a", "a"], "b": ["b", "b"]}
    assert on_each(jobs, exchange) == [expected] * 2


def test_an_absent_process_is_named():
    jobs = make_jobs(3)

    with pytest.raises(AbsentProcessError) as raised:
        jobs[0].exchange("batches", 1, max, timeout_seconds=0.05)
    first = raised.value
    host = platform.node()
    expected = f"process 1 (host {host}), process 2 (host {host}) did not arrive at"
    assert str(first).startswith(expected)
    assert "'batches' within 0.05 s" in str(first)


def test_an_abandoned_exchange_ends(monkeypatch):
    monkeypatch.setattr(job_module, "_WAIT_SECONDS", 0.01)
    for job in make_jobs(2):
        job.abandon("sizes")
        with pytest.raises(AbsentProcessError, match="'sizes' is abandoned"):
            job.exchange("sizes", 1, max)


def test_equal_facts_are_agreed_on():
    facts = {"num_steps": 3, "nested": {"b": [1, None], "a": 2.5}}
    assert on_each(make_jobs(3), lambda job: job.agree("run", facts)) == [None] * 3


def test_different_facts_raise_on_all_with_hosts_and_values():
    def agree(job):
        steps = 700 if job.process_index == 2 else 600
        more = {} if job.is_first else {"only_others": True}
        job.agree("run", {"seed": 0, "num_steps": steps} | more)

    errors = on_each(make_jobs(3), agree)
    first, second, third = (f"process {i} (host {platform.node()})" for i in range(3))
    for error in errors:
        assert isinstance(error, DisagreementError)
        lines = str(error).splitlines()[1:]
        assert lines == [
            f"  num_steps is 600 on {first}, {second}",
            f"  num_steps is 700 on {third}",
            f"  only_others is nothing on {first}",
            f"  only_others is true on {second}, {third}",
        ]


def test_process_0_tells_the_others():
    found = on_each(make_jobs(3), lambda job: job.broadcast("it", job.process_index))
    assert found == [0, 0, 0]


def test_a_process_without_a_job_is_alone():
    job = current_job()
    assert (job.process_index, job.num_processes, job.is_first) == (0, 1, True)
    job.agree("run", {"num_steps": 1})
    assert job.broadcast("it", 7) == 7
