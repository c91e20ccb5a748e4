"""The watchdog: a child that hangs or crashes is reported, killed and started again."""

import pathlib
import sys
import threading

import pytest

from tpu_embedding.tools.doctor.isolated import Deadlines, output_of, run_isolated
from tpu_embedding.tools.doctor.protocol import CaseStarted, Planned, to_line

FAKE = pathlib.Path(__file__).parent / "fake_child.py"
# A case ends at once, or never. A loaded machine starts Python in a few seconds.
DEADLINES = Deadlines(start=60, case=1.0, total=120)


def run(*cases, deadlines=DEADLINES, **options):
    return run_isolated(
        [sys.executable, str(FAKE), *cases],
        deadlines,
        **options,
    )


def outcomes(ran):
    return {result.case: result.problem for result in ran.results}


def test_all_cases_run_in_one_child():
    events = []
    ran = run("read:ok", "update:wrong", "write:ok", on_event=events.append)
    assert ran.planned == {c: f"{c}, dim 8" for c in ("read", "update", "write")}
    assert ran.problem is None
    assert outcomes(ran) == {"read": None, "update": "row 7 is zero", "write": None}
    assert [result.ok for result in ran.results] == [True, False, True]
    assert [type(event) is CaseStarted for event in events] == [True, False] * 3


LOST = {
    "hang": "hangs: no result in 1 s; killed",
    "hang_with_child": "hangs: no result in 1 s; killed",
    "noise": "hangs: no result in 1 s; killed",
    "abort": "crashed by SIGABRT: F0000 Check failed: the chip has halted",
    "segfault": "crashed by SIGSEGV",
    "exit": "ended with exit status 3: RuntimeError: no TPU left",
}


@pytest.mark.parametrize("deed", LOST)
def test_cases_after_a_lost_one_run_in_a_new_child(deed):
    ran = run("read:ok", f"update:{deed}", "write:ok")
    problems = outcomes(ran)
    assert list(problems) == ["read", "update", "write"]
    # Python prints the stack of a fatal signal if the tests ask for it.
    assert (problems["update"] or "").startswith(LOST[deed])
    assert problems["read"] is problems["write"] is ran.problem is None


def test_a_child_that_cannot_start():
    ran = run("start:no jax here", "read:ok")
    assert ran.results == ()
    assert ran.problem == "ended with exit status 1: ValueError: no jax here"


def test_a_child_that_cannot_start_again():
    ran = run("read:ok", "update:exit", "start:the chip is lost", "write:ok")
    assert list(outcomes(ran)) == ["read", "update"]
    assert ran.problem is not None and "the chip is lost" in ran.problem


def test_a_child_that_starts_no_case():
    ran = run_isolated(
        [sys.executable, "-c", "import threading as t; t.Event().wait()"],
        Deadlines(start=0.3, case=60, total=60),
    )
    assert ran.results == ()
    assert ran.problem == "hangs: no case started in 0.3 s"


def child_that_prints(*events):
    """Returns the command of a child that prints events, and then hangs."""
    prints = "".join(f"print({to_line(event)!r}, flush=True)\n" for event in events)
    return [sys.executable, "-c", f"{prints}import threading as t; t.Event().wait()"]


READ = CaseStarted(case="read", capability="read, dim 8")


def test_a_case_that_does_not_return_is_a_hang_whatever_time_is_left():
    # The total ends while the case runs, before the deadline of the case.
    plan = Planned(capabilities={"read": "read, dim 8"})
    ran = run_isolated(
        child_that_prints(plan, READ), Deadlines(start=60, case=6, total=5)
    )
    assert outcomes(ran) == {"read": "hangs: no result in 6 s; killed"}
    assert ran.problem is None and ran.cases_not_run() == {}


def test_no_case_starts_after_the_total_time():
    plan = Planned(capabilities={"read": "read, dim 8", "pool": "pool, dim 8"})
    ran = run_isolated(child_that_prints(plan), Deadlines(start=60, case=60, total=0.5))
    assert ran.problem == "stopped after 0.5 s; the remaining cases did not run"
    assert ran.ended_by == "deadline" and ran.results == ()


def test_cases_that_did_not_run_are_known():
    ran = run("read:ok", "update:exit", "start:the chip is lost", "write:ok")
    assert ran.cases_not_run() == {"write": "write, dim 8"}


def test_a_cancelled_run_ends():
    cancelled = threading.Event()
    # The first event of the child cancels the run from within; the case never ends.
    ran = run("read:hang", on_event=lambda _: cancelled.set(), cancelled=cancelled)
    assert ran.results == () and ran.ended_by == "deadline"


@pytest.mark.full
def test_many_lost_children_end_the_run():
    ran = run(*(f"case{i}:exit" for i in range(12)))
    assert len(ran.results) == 8
    assert ran.problem == "stopped after 8 cases that hung or crashed"


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        ("print('a'); print('b')", "a\nb\n", None),
        ("raise SystemExit('no device')", None, "ended with exit status 1: no device"),
        ("import os; os.kill(os.getpid(), 9)", None, "crashed by SIGKILL"),
    ],
)
def test_output_of_a_command(code, output, problem):
    assert output_of([sys.executable, "-c", code], 60) == (output, problem)


def test_a_command_without_an_answer():
    code = "import threading; threading.Event().wait()"
    found = output_of([sys.executable, "-c", code], 0.3)
    assert found == (None, "no answer in 0.3 s")
