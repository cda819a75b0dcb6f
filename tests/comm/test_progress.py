"""Tests of the progress engine: which thread polls, and when."""

from __future__ import annotations

import threading
import time

import pytest

from pydist.comm.transports.mpi.progress import VARIABLE, ProgressEngine
from pydist.errors import UsageError


def test_calls_poll_only_while_something_is_under_way():
    polls = []
    engine = ProgressEngine(lambda: polls.append(1), "calls")
    engine.progress()
    assert not polls
    engine.started()
    engine.started()
    engine.progress()
    engine.ended()
    engine.progress()
    assert len(polls) == 2
    engine.ended()
    engine.progress()
    assert len(polls) == 2
    engine.close()


def test_off_never_polls():
    engine = ProgressEngine(lambda: pytest.fail("polled"), "off")
    engine.started()
    engine.progress()


def test_a_thread_polls_by_itself_while_something_is_under_way():
    polls = []
    polled = threading.Event()

    def poll():
        polls.append(threading.current_thread().name)
        polled.set()

    engine = ProgressEngine(poll, "thread")
    time.sleep(0.02)
    assert not polls
    for _ in range(2):
        polled.clear()
        engine.started()
        assert polled.wait(10)
        engine.ended()
    assert set(polls) == {"pydist progress"}
    engine.progress()  # left to the thread
    engine.close()
    engine.close()
    assert "pydist progress" not in [thread.name for thread in threading.enumerate()]


def test_a_forgotten_thread_ends():
    engine = ProgressEngine(lambda: None, "thread")
    engine.started()
    del engine
    deadline = time.monotonic() + 10
    while "pydist progress" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    polls = []
    engine = ProgressEngine.from_environment(lambda: polls.append(1), threads=False)
    engine.started()
    engine.progress()
    assert polls == [1]
    monkeypatch.setenv(VARIABLE, "thread")
    with pytest.raises(UsageError, match="PYDIST_PROGRESS=thread needs an MPI"):
        ProgressEngine.from_environment(lambda: None, threads=False)
    ProgressEngine.from_environment(lambda: None, threads=True).close()
    monkeypatch.setenv(VARIABLE, "always")
    with pytest.raises(UsageError, match="PYDIST_PROGRESS=always is none of calls, thread, off"):
        ProgressEngine.from_environment(lambda: None, threads=True)
