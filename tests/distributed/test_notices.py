"""A failure in one process ends all, with its message and its status."""

import platform
import threading

import pytest

from tests.distributed.jobs import make_jobs, on_each
from tpu_embedding.distributed import notices, poller


class Left(BaseException):
    """Stands for the end of a process, which only ends a thread here."""


@pytest.fixture
def ends(monkeypatch):
    """The exits of processes, in order: the thread's name and the status."""
    found = []

    def leave(status):
        found.append((threading.current_thread().name, status))
        raise Left

    monkeypatch.setattr(notices.os, "_exit", leave)
    for module in (notices, poller):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    return found


def wait_for_the_end(job):
    """Plays the watcher of a process, until a notice ends it."""
    threading.current_thread().name = str(job.process_index)
    while True:
        notices._end_if_noticed(job)


@pytest.mark.parametrize("author", [0, 1, 2])
def test_all_end_and_process_0_last(author, ends, capsys, monkeypatch):
    jobs = make_jobs(3)
    acts, printed, read_at_end = [], [], []
    leave, print_line = notices.os._exit, notices.print_line

    def print_and_note(line, file):
        print_line(line, file)
        printed.append(line)

    def note_and_leave(status):
        read_at_end.append(len(printed))
        leave(status)

    monkeypatch.setattr(notices, "print_line", print_and_note)
    monkeypatch.setattr(notices.os, "_exit", note_and_leave)

    def run(job):
        try:
            with job.before_failure(lambda: acts.append(job.process_index)):
                if job.process_index == author:
                    threading.current_thread().name = str(author)
                    notices.end_job(job, "clicks.tsv, line 7: bad", 2)
                wait_for_the_end(job)
        except Left:
            return True

    assert on_each(jobs, run) == [True] * 3
    order = [int(name) for name, _ in ends]
    assert sorted(order) == [0, 1, 2]
    assert order[-1] == 0
    # The end of one breaks the connections of the others.
    assert read_at_end == [3, 3, 3]
    assert {status for _, status in ends} == {2}
    assert sorted(acts) == [0, 1, 2]
    line = f"error: process {author} (host {platform.node()}): clicks.tsv, line 7: bad"
    assert capsys.readouterr().err == f"{line}\n" * 3


@pytest.mark.parametrize("is_final", [False, True])
def test_who_reads_of_a_final_error_tells_its_parent(is_final, ends):
    """The error is one host's, but no host may restart its process."""
    told = []

    def run(job):
        job.final_acts.append(lambda: told.append("final"))
        try:
            if job.is_first:
                notices.end_job(job, "The loss is nan", 1, is_final=is_final)
            wait_for_the_end(job)
        except Left:
            return True

    assert on_each(make_jobs(3), run) == [True] * 3
    assert told == (["final"] * 2 if is_final else [])


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("wrong"), 1, "ValueError: wrong"),
        (SystemExit(7), 7, "SystemExit: 7"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt: "),
    ],
)
def test_an_error_of_the_block_ends_all(error, status, text, ends, monkeypatch, capsys):
    monkeypatch.setattr(notices, "watch_job", lambda job: None)

    def run(job):
        try:
            with notices.ending_together(job):
                if not job.is_first:
                    raise error
                wait_for_the_end(job)
        except Left:
            return True

    assert on_each(make_jobs(2), run) == [True, True]
    assert {found for _, found in ends} == {status}
    assert f"error: process 1 (host {platform.node()}): {text}" in (
        capsys.readouterr().err
    )


def test_an_exit_with_success_is_no_failure(ends, monkeypatch):
    monkeypatch.setattr(notices, "watch_job", lambda job: None)

    def leave(job):
        with notices.ending_together(job):
            raise SystemExit(0)

    assert [type(end) for end in on_each(make_jobs(2), leave)] == [SystemExit] * 2
    assert not ends


@pytest.mark.parametrize(
    ("block", "end"),
    [
        (notices.leaving_together, None),
        (notices.leaving_together, SystemExit(75)),
        (notices.leaving_together, KeyboardInterrupt()),
        (notices.ending_together, None),
        (notices.ending_together, SystemExit(0)),
    ],
)
def test_no_process_leaves_before_the_last_one(block, end, ends, monkeypatch):
    """Who has left does not hear of a failure any more."""
    monkeypatch.setattr(notices, "watch_job", lambda job: None)
    events = []

    def leave(job):
        try:
            with block(job):
                if job.is_first:
                    while len(job.store.items("exchange/end/0")) < 2:
                        pass
                    events.append("the last one arrives")
                if end is not None:
                    raise end
        finally:
            events.append("left")

    on_each(make_jobs(3), leave)
    assert events == ["the last one arrives", "left", "left", "left"]
    assert not ends


def test_an_error_does_not_wait_for_the_others():
    with pytest.raises(ValueError), notices.leaving_together(make_jobs(2)[1]):
        raise ValueError


def test_an_error_that_follows_from_a_failure_is_not_reported(ends, capsys):
    """As XLA's, whose connection to the failed process breaks."""
    jobs = make_jobs(3)
    failed = threading.Event()

    def run(job):
        threading.current_thread().name = str(job.process_index)
        try:
            if job.process_index == 1:
                store_set = job.store.set

                def set_and_tell(key, value):
                    store_set(key, value)
                    failed.set()

                job.store.set = set_and_tell
                notices.end_job(job, "the cause", 2)
            assert failed.wait(timeout=30)
            notices.end_job(job, "connection closed by peer", 1)
        except Left:
            return True

    assert on_each(jobs, run) == [True] * 3
    assert {status for _, status in ends} == {2}
    assert "connection closed" not in capsys.readouterr().err


def test_a_process_whose_threads_fail_together_prints_one_error(ends, capsys):
    """Its own error and the notice of another one may arrive at once."""
    (job,) = make_jobs(1)

    def fail(message):
        try:
            notices.end_job(job, message, 1)
        except Left:
            return True

    threads = [
        threading.Thread(target=fail, args=(f"error {i}",), daemon=True)
        for i in range(2)
    ]
    for thread in threads:
        thread.start()
    while not ends:
        threads[0].join(timeout=0.01)
    threads[0].join(timeout=0.1)
    threads[1].join(timeout=0.1)
    assert len(ends) == 1  # The other thread waits for the end of the process.
    assert len(capsys.readouterr().err.splitlines()) == 1
