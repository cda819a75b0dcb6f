"""Tests of the order, time and memory of schedules, by formulas and on the running system."""

from __future__ import annotations

import copy

import pytest

from pydist.comm import run_local
from pydist.errors import UsageError
from pydist.stages import Stages
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.schedule import SCHEDULES, Schedule, most_alive
from pydist.stages.transfers import Transfers
from support.staged import (
    LINES,
    ONE,
    on_stages,
    step_of,
)
from support.staged_unet import unet_task, without_statistics

KINDS = ("forward", "backward", "weight")


@pytest.mark.parametrize("meshes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_orders_are_complete(meshes, micro_batches):
    """Each stage runs all micro-batches in turn, and no order of the meshes waits for itself."""
    forth = [*range(meshes)]
    back = forth[::-1]
    for order in (
        forth, forth * 2, forth * 3, forth[:1] + forth, forth + back, forth + back + forth,
        forth + forth[1:] + back,
    ):  # fmt: skip
        stages = len(order)
        for name in SCHEDULES if order == forth else LINES:
            schedule = Schedule(name, order)
            passes = schedule.passes(micro_batches)
            for stage in range(stages):
                for kind in KINDS if schedule.splits else KINDS[:2]:
                    own = [e for each in passes for e in each if e[:2] == (kind, stage)]
                    assert sorted(e.micro_batch for e in own) == list(range(micro_batches))
                    for each in own:
                        assert each in passes[schedule.placed(each.micro_batch)[stage]]
            for own in passes:
                for stage in range(stages):
                    numbers = [e.micro_batch for e in own if e[:2] == ("forward", stage)]
                    assert numbers == sorted(numbers)
            assert makespan(name, order, micro_batches) >= 3 * micro_batches * stages / meshes


Event = tuple[str, int, int]  # kind, stage, micro-batch


def time_of_events(passes: dict[int, list[tuple[Event, set[Event]]]]) -> int:
    """Returns the time of passes if a forward one takes 1, a backward one 2, and messages none.

    Where gradients of weights have passes of their own, each kind takes 1.

    Args:
        passes: of each mesh, in the order in which they ran, with those whose messages they needed.
    """
    splits = any(event[0] == "weight" for own in passes.values() for event, _ in own)
    ends: dict[Event, int] = {}
    left, free = {mesh: list(own) for mesh, own in passes.items()}, dict.fromkeys(passes, 0)
    while any(left.values()):
        mesh = next(m for m, own in left.items() if own and own[0][1] <= ends.keys())
        event, needed = left[mesh].pop(0)
        start = max([free[mesh], *(ends[each] for each in needed)])
        ends[event] = free[mesh] = start + (1 if splits or event[0] == "forward" else 2)
    return max(free.values())


def makespan(name: str, order: list[int], micro_batches: int) -> int:
    """Returns the time of a batch, if each pass needs that of the stage before it."""
    events, last = {}, len(order) - 1
    for mesh, own in enumerate(Schedule(name, order).passes(micro_batches)):
        events[mesh] = []
        for kind, stage, m in own:
            ahead = ("forward", stage, m) if kind == "backward" else ("forward", stage - 1, m)
            needed = {ahead} if kind == "backward" or stage else set()
            if kind == "weight":
                needed = {("backward", stage, m)}
            if kind == "backward" and stage < last:
                needed.add(("backward", stage + 1, m))
            events[mesh].append(((kind, stage, m), needed))
    return time_of_events(events)


@pytest.mark.parametrize("meshes", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8, 12])
def test_the_least_time_of_a_batch(meshes, micro_batches):
    """The formulas of the papers, with backward passes twice as long as forward ones."""
    line = [*range(meshes)]
    for name in ("gpipe", "1f1b"):
        assert makespan(name, line, micro_batches) == 3 * (micro_batches + meshes - 1)
    gems = micro_batches * meshes * 3 - (micro_batches - 1) * (meshes - 1)
    assert makespan("gems", line, micro_batches) == gems
    if micro_batches % meshes == 0:
        for rounds in (2, 3):
            least = makespan("1f1b", line * rounds, micro_batches)
            assert least == 3 * (rounds * micro_batches + meshes - 1)


@pytest.mark.parametrize("meshes", [1, 2, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_zero_bubble_schedule_only_waits_for_the_first_pass(meshes, rounds):
    """In a V, with the memory of 1F1B: a mesh keeps half of the layers of 2 S micro-batches."""
    micro_batches, line = rounds * meshes, [*range(meshes)]
    v = line + line[::-1]
    assert makespan("zero-bubble", v, 2 * micro_batches) == 3 * 4 * micro_batches + meshes - 1
    passes = Schedule("zero-bubble", v).passes(2 * micro_batches)
    assert max(most_alive(own) for own in passes) <= 2 * meshes
    idle = makespan("zero-bubble", line, micro_batches) - 3 * micro_batches
    assert idle <= 2 * (meshes - 1)
    assert max(map(most_alive, Schedule("zero-bubble", line).passes(micro_batches))) <= meshes


def test_gems_takes_the_times_of_its_paper():
    assert [makespan("gems", [0, 1, 2, 3], n) for n in (2, 16)] == [21, 147]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_peaks_of_micro_batches(stages, micro_batches):
    """GPipe keeps all, 1F1B at most as many as stages are left, GEMS one."""
    line = range(stages)
    for stage, own in enumerate(Schedule("gpipe", line).passes(micro_batches)):
        assert most_alive(own) == micro_batches
        assert Schedule("gpipe", line).most_alive(stage, micro_batches) == micro_batches
    for stage, own in enumerate(Schedule("1f1b", line).passes(micro_batches)):
        assert most_alive(own) == min(micro_batches, stages - stage)
    for own in Schedule("gems", line).passes(micro_batches):
        assert most_alive(own) == 1


def test_peaks_forth_and_back():
    """The first mesh holds the first and the last stage, and no more than 1F1B of 8 stages."""
    passes = Schedule("1f1b", [0, 1, 2, 3, 3, 2, 1, 0]).passes(16)
    assert max(most_alive(own) for own in passes) <= 9
    for stage in range(8):
        assert max(most_alive(own, stage) for own in passes) <= 8 - stage


@pytest.mark.parametrize(
    ("schedule", "order", "expected"),
    [("gpipe", None, [8, 8, 8]), ("1f1b", None, [3, 2, 1]), ("gems", None, [1, 1, 1]),
     ("1f1b", [0, 1, 2, 0, 1, 2], None), ("zero-bubble", None, [3, 3, 3]),
     ("zero-bubble", [0, 1, 2, 2, 1, 0], [6, 6, 6])],
)  # fmt: skip
def test_the_running_system_keeps_as_many(monkeypatch, schedule, order, expected):
    """Counted by the micro-batches that have a graph, on each mesh."""
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    last = "finish_weights" if schedule == "zero-bubble" else "backward"
    entered, left = MicroBatch.end_of_network, getattr(MicroBatch, last)

    def enter(self):
        mesh = self._stages.index
        alive[mesh] = alive.get(mesh, 0) + 1
        most[mesh] = max(most.get(mesh, 0), alive[mesh])
        entered(self)

    def leave(self):
        left(self)
        alive[self._stages.index] -= 1

    monkeypatch.setattr(MicroBatch, "end_of_network", enter)
    monkeypatch.setattr(MicroBatch, last, leave)
    task = without_statistics(unet_task()) if schedule == "gems" else unet_task()
    on_stages([ONE] * 3, lambda stages: step_of(task._replace(model=copy.deepcopy(task.model)),
                                                stages, micro_batches=8, schedule=schedule),
              order=order)  # fmt: skip
    if expected is None:
        expected = [most_alive(own) for own in Schedule(schedule, order).passes(8)]
    assert [most[mesh] for mesh in range(3)] == expected


@pytest.mark.parametrize(
    ("schedule", "order", "expected"),
    [("gpipe", [0, 1, 2], 3 * 8), ("1f1b", [0, 1, 2], 3 * 8), ("gems", [0, 1, 2], 6 * 9 - 5 * 2),
     ("1f1b", [0, 1, 2, 0, 1, 2], 3 * 6 * 2 + 3 * 2), ("gpipe", [0, 1, 0, 1], 3 * 6 * 2 + 3),
     ("zero-bubble", [0, 1, 2], 3 * 6 + 3),
     ("zero-bubble", [0, 1, 2, 2, 1, 0], 3 * 6 * 2 + 2)],
)  # fmt: skip
def test_the_running_system_takes_the_time_of_its_schedule(monkeypatch, schedule, order, expected):
    """Counted by the passes that ran, and the messages that each of them received: the idle time
    of the formulas, (S - 1) (F + B), over V for V stages in turn, and GEMS's overlap."""
    events: dict[int, list[tuple[Event, set[Event]]]] = {}
    needed: dict[int, set[Event]] = {}  # by mesh
    receive, end, back = Transfers.receive, MicroBatch.end_of_network, MicroBatch.backward
    finished = MicroBatch.finish_weights

    def received(self, route, call, mark, shape):
        event = "forward", route.source, mark.number - 1  # of the first batch
        needed.setdefault(self._stages.index, set()).add(event)
        return receive(self, route, call, mark, shape)

    def ended(self):
        end(self)
        event = "forward", self.own, self.index
        own = needed.pop(self._stages.index, set())
        events.setdefault(self._stages.index, []).append((event, own))

    def backward(self):
        gradients = {each.transfer.route.target for each in self.boundary.sent}
        back(self)
        event = "backward", self.own, self.index
        needs = {("backward", target, self.index) for target in gradients}
        events[self._stages.index].append((event, needs))

    def finish(self):
        finished(self)
        event = "weight", self.own, self.index
        events[self._stages.index].append((event, {("backward", self.own, self.index)}))

    monkeypatch.setattr(Transfers, "receive", received)
    monkeypatch.setattr(MicroBatch, "finish_weights", finish)
    monkeypatch.setattr(MicroBatch, "end_of_network", ended)
    monkeypatch.setattr(MicroBatch, "backward", backward)
    task = without_statistics(unet_task(6))
    on_stages([ONE] * 3 if 2 in order else [ONE] * 2,
              lambda stages: step_of(task._replace(model=copy.deepcopy(task.model)), stages,
                                     micro_batches=6, schedule=schedule), order=order)  # fmt: skip
    kinds = 3 if schedule == "zero-bubble" else 2
    assert sum(map(len, events.values())) == kinds * 6 * len(order)
    assert time_of_events(events) == expected


def test_wrong_schedules_are_refused():
    with pytest.raises(UsageError, match="gpipe, 1f1b, gems, zero-bubble"):
        Schedule("zero bubble", [0, 1])
    with pytest.raises(UsageError, match="each mesh must have one stage"):
        Schedule("gems", [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("order", "message"),
    [([0, 1, 2], "each of 0 to 1"), ([0, 0], "each of 0 to 1"), (["0", 1], "each of 0 to 1"),
     ([0, 1] * 65, "at most 128")],
)  # fmt: skip
def test_wrong_orders_are_refused(order, message):
    def body(world):
        with pytest.raises(UsageError, match=message):
            Stages(world, [ONE, ONE], order=order)

    run_local(body, 2)
