"""Signals: what a block does with them, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from tpu_embedding.tools.jobs import stop_signals
from tpu_embedding.tools.jobs.exit_status import STOP_SIGNALS
from tpu_embedding.tools.jobs.stop_signals import (
    RunStopped,
    StopRequest,
    stop_on_signals,
)
from tpu_embedding.tools.train.errors import as_config_error

BY_NAME = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda s: s.name)


@BY_NAME
def test_a_signal_is_noted_and_the_handlers_are_put_back(number, capsys):
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    threads = threading.active_count()
    with stop_on_signals() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.signal is number
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    expected = f"{number.name}: stopping after this step; another signal stops at once"
    assert capsys.readouterr().err == expected + "\n"


def test_the_ways_to_leave():
    stop = StopRequest()
    with pytest.raises(ValueError, match="needs a signal"):
        stop.exit("saved")
    stop.signal = signal.SIGHUP
    with pytest.raises(RunStopped, match="SIGHUP: saved") as stopped:
        stop.exit("saved")
    assert stopped.value.code == 75
    stop.signal = signal.SIGINT
    with pytest.raises(KeyboardInterrupt, match="SIGINT: saved"):
        stop.exit("saved")


def test_a_block_with_nothing_to_save_is_left_at_once(capsys):
    """Even if it is code of a config, whose calls of `exit` are errors."""
    with stop_on_signals() as stop:
        with pytest.raises(RunStopped, match="SIGTERM: nothing to save"):
            with stop.interrupting("nothing to save"), as_config_error("The config"):
                signal.raise_signal(signal.SIGTERM)
                raise AssertionError("still in the block")
        with pytest.raises(RunStopped):  # A signal that came before counts, too.
            with stop.interrupting("nothing to save"):
                raise AssertionError("entered")
    assert capsys.readouterr().err == ""


def test_an_ignored_signal_stays_ignored():
    """As under `nohup`."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_another_thread_requests_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def use():
        with stop_on_signals() as stop:
            found.append((stop.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_signals_in_quick_succession_are_one_request(monkeypatch):
    """GNU `timeout` sends two; two requests would end this process."""
    monkeypatch.setattr(stop_signals, "REPEAT_SECONDS", float("inf"))
    with stop_on_signals() as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert stop.signal is signal.SIGTERM


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,  # The package is imported, maybe on a busy machine.
        **options,
    )


SECOND_SIGNAL = """
import ctypes, os, signal, sys
from tpu_embedding.tools.jobs import stop_signals

stop_signals.REPEAT_SECONDS = 0
sys.stderr = open({writer}, "w")
with stop_signals.stop_on_signals() as stop:
    signal.raise_signal(signal.SIGTERM)
    os.read({reader}, 1)  # The watching thread prints once it knows of the signal.
    os.kill(os.getpid(), signal.{second})
    while True:
        ctypes.CDLL(None).pause()  # Nor does XLA let Python handle signals.
"""


@pytest.mark.parametrize(
    ("second", "status"),
    [("SIGTERM", 143), pytest.param("SIGINT", 130, marks=pytest.mark.full)],
)
def test_a_second_signal_ends_the_process_at_once(second, status):
    reader, writer = os.pipe()
    code = SECOND_SIGNAL.format(reader=reader, writer=writer, second=second)
    finished = run(code, pass_fds=(reader, writer))
    os.close(reader)
    os.close(writer)
    assert finished.returncode == status, finished.stderr


FORKED = """
import os, signal
from tpu_embedding.tools.jobs.stop_signals import stop_on_signals

with stop_on_signals() as stop:
    child = os.fork()
    if not child:
        signal.pause()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
assert not stop.requested
"""


@pytest.mark.full
def test_a_signal_to_a_forked_worker_is_its_own():
    finished = run(FORKED)
    assert finished.returncode == 0, finished.stderr
