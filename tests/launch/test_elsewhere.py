"""Tests of hang reports about ranks on other machines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from pydist.comm import Transport, run_local
from pydist.launch import elsewhere
from pydist.launch.elsewhere import Elsewhere, Place, Waiting, describe, waiting_at
from support.jobs.children import wait_until

PLACES = [
    Place("n07", 11, "a"),
    Place("n07", 12, "a"),
    Place("n08", 21, "b"),
    Place("n08", 22, "b"),
]


def calls(*texts: str) -> str:
    return json.dumps([[i, [hash(text), text]] for i, text in enumerate(texts, 1)])


WAITING = Waiting("call 2 of ranks 0, 2: barrier", [0, 2], [2, 77], calls("halo", "barrier"))


def test_ranks_that_do_not_wait_come_first_and_calls_that_differ_are_named() -> None:
    others = {rank: PLACES[rank] for rank in (2, 3)}
    there = replace(
        WAITING, call="call 2 of ranks 0, 2: sum", state=[2, 5], calls=calls("halo", "sum")
    )
    assert describe(0, WAITING, others, {2: there, 3: None}).splitlines() == [
        "rank 3 (host n08, process 22) has not said that it waits: it computes, is stopped or has"
        " ended",
        "the ranks make different calls: call 2 of their group is barrier on rank 0 and sum on"
        " rank 2",
        "rank 2 (host n08, process 21) waits in call 2 of ranks 0, 2: sum",
    ]
    (line,) = describe(0, WAITING, {2: PLACES[2]}, {2: WAITING}).splitlines()
    assert line == "rank 2 (host n08, process 21) waits in call 2 of ranks 0, 2: barrier"
    late = replace(WAITING, state=[1, 5], calls=calls("halo"))
    assert "different" not in describe(0, WAITING, {2: PLACES[2]}, {2: late})
    apart = replace(WAITING, group=[1, 2], state=[9, 9])  # another group: not comparable
    assert "different" not in describe(0, WAITING, {2: PLACES[2]}, {2: apart})


def test_of_many_ranks_some_are_listed() -> None:
    others = {rank: Place("n", rank, "b") for rank in range(1, 100)}
    lines = describe(0, WAITING, others, {}).splitlines()
    assert len(lines) == 33
    assert lines[-1] == "and 67 more ranks"


def test_ranks_hear_of_each_other_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(elsewhere.native, "tell_elsewhere", said.append)
    store = HashStore()
    here, there = Elsewhere(0, PLACES, store, keeper=2), Elsewhere(2, PLACES, store)
    assert said[0].splitlines() == [
        "rank 2 (host n08, process 21) does not answer: it is stopped, has ended, or is not"
        " connected",
        "rank 3 (host n08, process 22) is on another machine, and the job's store does not answer,"
        " which is in the process of rank 2",
    ]

    def report() -> str:
        before = len(said)
        here.ask(WAITING)
        # The first report covers a store that does not answer.
        wait_until(lambda: len(said) >= before + 2)
        return said[-1]

    assert "rank 2 (host n08, process 21) has not said" in report()
    there.tell(WAITING)
    wait_until(lambda: "rank 2 (host n08, process 21) waits in call 2" in report())
    there.tell(None)
    wait_until(lambda: "rank 2 (host n08, process 21) has not said" in report())


def test_the_call_is_that_of_the_group_on_the_stack() -> None:
    def body(t: Transport) -> Waiting:
        group = t.split(t.rank // 2, t.rank)
        group.barrier()
        return found_by(group)

    for rank, waiting in enumerate(run_local(body, 4)):
        first = rank // 2 * 2
        assert waiting.call.endswith(f"of ranks {first}, {first + 1}: barrier")
        assert waiting.group == [first, first + 1]
        assert waiting.state[0] == 1


def found_by(self: Transport) -> Waiting:
    """Returns the wait that the stack shows; `self` makes it look like the group's method."""
    return waiting_at([[sys._getframe()]])
