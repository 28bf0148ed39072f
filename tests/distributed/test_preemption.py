"""Signals that stop a run: what each of them leads to, at once, and which are left alone."""

import os
import queue
import signal
import sys

import pytest
from conftest import importing

from vit_jax import errors
from vit_jax.distributed import preemption
from vit_jax.distributed.preemption import SaveRequest, Signals, signals

# The end of the process is the end of the thread here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STOPS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


@pytest.fixture
def ends(monkeypatch) -> queue.Queue:
    """(exit code, line) of the end of the process."""
    found = queue.Queue()
    said = []

    def leave(code):
        found.put((code, said[-1]))
        sys.exit()

    monkeypatch.setattr(errors, "say", said.append)
    monkeypatch.setattr(preemption.os, "_exit", leave)
    return found


def saved() -> str:
    return "the same command continues from step 40"


@pytest.mark.parametrize("number", STOPS)
def test_before_the_loop_a_signal_ends_the_process(number, ends):
    with signals.listening(saved):
        os.kill(os.getpid(), number)
        code, line = ends.get(timeout=5)
    assert code == (130 if number == signal.SIGINT else 75)
    assert line == f"error: stopped by {STOPS[number]}: the same command continues from step 40"


@pytest.mark.parametrize("number", STOPS)
def test_in_the_loop_the_first_asks_for_a_save_and_the_next_ends_the_process(number, ends):
    with signals.listening(str), SaveRequest(saved) as request:
        assert not request.due()
        os.kill(os.getpid(), number)
        while not request.due():
            pass
        assert signals.requested == STOPS[number]
        os.kill(os.getpid(), number)
        code, line = ends.get(timeout=5)
    assert code == 128 + number
    assert line == f"error: ended by {STOPS[number]} before the save was complete: {saved()}"
    assert request.due(), "what comes next must not run on"


def test_a_signal_is_heard_before_python_handles_it(ends, monkeypatch):
    """The main thread may be in a library for minutes."""
    monkeypatch.setattr(Signals, "handle", lambda self, number, frame: None)
    with signals.listening(saved):
        os.kill(os.getpid(), signal.SIGHUP)
        assert ends.get(timeout=5)[0] == 75


def test_a_signal_is_heard_while_a_library_listens_instead(ends):
    with signals.listening(saved):
        outer = signal.set_wakeup_fd(-1)
        os.kill(os.getpid(), signal.SIGHUP)
        assert ends.get(timeout=5)[0] == 75
        signal.set_wakeup_fd(outer)


def test_handlers_are_put_back_and_what_is_ignored_stays_so(ends):
    before = {number: signal.getsignal(number) for number in STOPS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals.listening(saved):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in STOPS} == before


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_during_imports_is_not_swallowed(number, tmp_path):
    job = importing(tmp_path, "jax.py", "train")
    job.send_signal(number)
    _, err = job.communicate(timeout=20)
    assert job.returncode == (130 if number == signal.SIGINT else 75)
    assert err == f"error: stopped by {STOPS[number]}: run the same command again\n"
