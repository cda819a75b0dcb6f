"""Tests of the progress engine: when it polls."""

from __future__ import annotations

from pydist.comm.transports.mpi.progress import ProgressEngine


def test_it_polls_only_while_something_is_under_way():
    polls = []
    engine = ProgressEngine(lambda: polls.append(1))
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
