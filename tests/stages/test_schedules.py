"""Tests of schedules: every legal combination equals the micro-batches run in sequence."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.comm import run_local
from pydist.errors import NotSupported, UsageError
from pydist.stages import Stages, pipeline
from pydist.stages.micro_batch import MicroBatch
from pydist.stages.schedule import SCHEDULES, Schedule, most_alive
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.staged import (
    DEEP,
    ONE,
    TWO_GROUPS,
    check_stages,
    in_sequence,
    on_stages,
    results,
    step_of,
)

BATCH = 8


class SmallUNet(nn.Module):
    """Two levels, with norms, in-place activations and two skips."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.norm = nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3)
        self.down = nn.Conv3d(3, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv3d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose3d(4, 3, 2, stride=2)
        self.last = nn.Conv3d(6, 2, 3, padding=1)
        self.act = nn.LeakyReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        top = self.act(self.norm(self.top(x)))
        down = self.act(self.down(top))
        deep = self.act(self.deep(down)) + down
        return self.last(torch.cat([top, self.up(deep)], 1))


def unet_task(batch: int = BATCH) -> Task:
    x, target = randn(batch, 1, 6, 4, 4, seed=1), randn(batch, 2, 6, 4, 4, seed=2)
    return Task(initialized(SmallUNet()), x, target, F.mse_loss)


LINES = ("gpipe", "1f1b", "zero-bubble")
"""Schedules that run networks with running statistics."""
KINDS = ("forward", "backward", "weight")
ORDERS = ([0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1], [0, 1, 0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 0, 0])


def without_statistics(task: Task) -> Task:
    """Replaces the batch norm, which GEMS refuses in training, by a group norm."""
    model = copy.deepcopy(task.model)
    model.norm = initialized(nn.GroupNorm(1, 3))
    return task._replace(model=model)


@pytest.mark.parametrize("skips", ["direct", "relay"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("schedule", LINES)
def test_a_step_equals_the_micro_batches_in_sequence(schedule, micro_batches, stages, skips):
    check_stages(unet_task(), [ONE] * stages, micro_batches, schedule=schedule, skips=skips)


def test_activations_are_computed_again_from_what_was_received():
    """The forward pass of a stage changes its argument in place."""
    layers = nn.Conv3d(1, 2, 3, padding=1), nn.LeakyReLU(0.3, inplace=True), nn.Conv3d(2, 2, 1)
    task = unet_task()._replace(model=initialized(nn.Sequential(*layers)))
    check_stages(task, [ONE, ONE], 4, cuts=["1"], schedule="gpipe", recompute=True)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
@pytest.mark.parametrize("schedule", LINES)
def test_several_stages_on_a_mesh(schedule, micro_batches, order):
    meshes = [ONE] * (max(order) + 1)
    check_stages(unet_task(), meshes, micro_batches, schedule=schedule, order=order)


@pytest.mark.parametrize("options", [{"recompute": True}, {"skips": "relay"}], ids=str)
@pytest.mark.parametrize("meshes", [[DEEP, ONE], [TWO_GROUPS] * 2, [DEEP, DEEP]], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 0, 1], [0, 1, 1, 0]], ids=str)
def test_several_stages_on_larger_meshes(order, meshes, options):
    check_stages(unet_task(), meshes, 4, order=order, **options)


@pytest.mark.parametrize("skips", ["direct", "relay"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_micro_batches_that_go_forth_and_back(micro_batches, stages, skips):
    task = without_statistics(unet_task())
    check_stages(task, [ONE] * stages, micro_batches, schedule="gems", skips=skips)


@pytest.mark.parametrize("meshes", [[DEEP] * 2, [TWO_GROUPS] * 2], ids=str)
def test_forth_and_back_over_larger_meshes(meshes):
    """GEMS and data parallelism, and spatial parallelism."""
    check_stages(without_statistics(unet_task()), meshes, 4, schedule="gems")


@pytest.mark.parametrize("schedule", LINES)
@pytest.mark.parametrize("meshes", [[ONE] * 3, [DEEP, ONE], [TWO_GROUPS] * 2], ids=str)
def test_a_step_that_computes_activations_again(schedule, meshes):
    """Also the statistics of the batch norm are updated once."""
    check_stages(unet_task(), meshes, 4, schedule=schedule, recompute=True)


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(4, 1, 1, 1, dtype=x.dtype)


def test_random_numbers_are_the_same_when_computed_again():
    net = nn.Sequential(nn.Conv3d(1, 4, 1), nn.Dropout(0.4), Noisy(), nn.Conv3d(4, 2, 1),
                        nn.Dropout3d(0.4))  # fmt: skip
    task = unet_task()._replace(model=initialized(net))

    def gradients(stages, recompute):
        own = task._replace(model=copy.deepcopy(task.model))
        made, _ = step_of(own, stages, micro_batches=4, schedule="gpipe", recompute=recompute)
        return [p.grad for p in made.model.parameters()]

    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        # One rank at a time draws, as ranks that are threads share the generator.
        found.append(on_stages([ONE], lambda s, r=recompute: gradients(s, r)))
    kept, again = found
    for ours, theirs in zip(again, kept, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None and other is None) or torch.equal(mine, other)


def test_activations_that_are_computed_again_are_freed(monkeypatch):
    """Of the micro-batches in flight no graph is alive when the backward passes begin."""
    graphs: list[int] = []
    left = MicroBatch.backward

    def leave(self):
        if self._stages.index == 0:
            gc.collect()
            nodes = [x for x in gc.get_objects() if isinstance(x, MicroBatch) and x._sent]
            graphs.append(len([x for x in nodes if x._stages is self._stages]))
        left(self)

    monkeypatch.setattr(MicroBatch, "backward", leave)
    for recompute, most in ((False, 6), (True, 1)):
        graphs.clear()
        on_stages([ONE] * 2, lambda stages, recompute=recompute: step_of(
            unet_task(), stages, micro_batches=6, schedule="gpipe", recompute=recompute
        ))  # fmt: skip
        assert max(graphs) == most


@pytest.mark.parametrize("order", [None, [0, 1, 2, 0, 1, 2]], ids=str)
@pytest.mark.parametrize("schedule", LINES)
def test_bits_are_those_of_one_stage(schedule, order):
    """A rank computes what one device would: no sum is split."""

    def gradients(stages):
        task = unet_task()
        own = task._replace(model=copy.deepcopy(task.model))
        made, _ = step_of(own, stages, micro_batches=4, schedule=schedule)
        return {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}

    (whole,) = on_stages([ONE], gradients)
    for found in on_stages([ONE] * 3, gradients, order=order):
        assert found
        for name, grad in found.items():
            assert torch.equal(grad, whole[name]), name


@pytest.mark.parametrize("meshes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 16])
def test_orders_are_complete(meshes, micro_batches):
    """Each stage runs all micro-batches in turn, and no order of the meshes waits for itself."""
    forth = [*range(meshes)]
    back = forth[::-1]
    for order in (
        forth, forth * 2, forth * 3, forth + back, forth + back + forth, forth + forth[1:] + back,
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
     ("zero-bubble", [0, 1, 2, 2, 1, 0], 3 * 6 * 2 + 2)],
)  # fmt: skip
def test_the_running_system_takes_the_time_of_its_schedule(monkeypatch, schedule, order, expected):
    """Counted by the passes that ran, and the messages that each of them received: the idle time
    of the formulas, (S - 1) (F + B), over V for V stages in turn, and GEMS's overlap."""
    events: dict[int, list[tuple[Event, set[Event]]]] = {}
    needed: dict[int, set[Event]] = {}
    receive, end, back = MicroBatch._receive, MicroBatch.end_of_network, MicroBatch.backward
    finished = MicroBatch.finish_weights

    def received(self, route, *args):
        needed.setdefault(id(self), set()).add(("forward", route.source, self.index))
        return receive(self, route, *args)

    def ended(self):
        end(self)
        event = "forward", self.own, self.index
        events.setdefault(self._stages.index, []).append((event, needed.pop(id(self), set())))

    def backward(self):
        gradients = {each.transfer.route.target for each in self._sent}
        back(self)
        event = "backward", self.own, self.index
        needs = {("backward", target, self.index) for target in gradients}
        events[self._stages.index].append((event, needs))

    def finish(self):
        finished(self)
        event = "weight", self.own, self.index
        events[self._stages.index].append((event, {("backward", self.own, self.index)}))

    monkeypatch.setattr(MicroBatch, "_receive", received)
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


def test_gems_refuses_what_it_can_not_run():
    def running_statistics(stages):
        made = pipeline(unet_task().model, stages, unet_task().x[:1], schedule="gems")
        with pytest.raises(NotSupported, match="running statistics"):
            made.step(unet_task().x, unet_task().target, F.mse_loss)

    on_stages([ONE] * 2, running_statistics)

    def other_meshes(stages):
        with pytest.raises(UsageError, match="equal meshes"):
            pipeline(unet_task().model, stages, unet_task().x[:1], schedule="gems")

    on_stages([DEEP, ONE], other_meshes)


def with_batch_statistics(task: Task, micro_batches: int, data: int = 1) -> dict[str, Tensor]:
    """Returns the buffers after a step whose micro-batches change running statistics once."""
    given: dict[str, list[Tensor]] = {}
    model = copy.deepcopy(task.model)
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm3d):
            keep = given.setdefault(name, [])
            module.register_forward_pre_hook(lambda _, args, keep=keep: keep.append(args[0]))
    in_sequence(task._replace(model=model), micro_batches, data=data, copies=False)
    found = {}
    for name, inputs in given.items():
        alone = copy.deepcopy(task.model.get_submodule(name))
        alone(torch.cat(inputs).detach())
        found |= {f"{name}.{key}": value for key, value in alone.named_buffers()}
    return found


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("meshes", "options"),
    [([ONE], {}), ([ONE] * 3, {}), ([ONE] * 3, {"recompute": True}), ([DEEP, ONE], {}),
     ([TWO_GROUPS] * 2, {}), ([ONE] * 2, {"order": [0, 1, 1, 0]}),
     ([ONE] * 2, {"schedule": "gems"}), ([TWO_GROUPS] * 3, {"schedule": "gems"})], ids=str,
)  # fmt: skip
def test_running_statistics_of_the_batch(meshes, options, momentum):
    """They are those of torch's batch norm on what all micro-batches give it."""
    task = unet_task(12)
    task.model.norm.momentum = momentum
    task.model.down = nn.Sequential(task.model.down, initialized(nn.BatchNorm3d(4)))
    task.model.down[1].num_batches_tracked.fill_(3)
    data, order = meshes[0].get("data", 1), options.pop("order", None)
    expected = with_batch_statistics(task, 3, data)
    grads = in_sequence(task, 3, data=data)

    def rank(stages):
        own = task._replace(model=copy.deepcopy(task.model))
        made, loss = step_of(own, stages, micro_batches=3, running_statistics="batch", **options)
        found = results(made, loss)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-13, msg=name)
        for name, _ in task.model.named_parameters():
            torch.testing.assert_close(found[name], grads[name], rtol=1e-9, atol=1e-12, msg=name)

    on_stages(meshes, rank, order=order)


def test_running_statistics_that_can_not_be_of_the_batch():
    def body(stages):
        net = nn.Sequential(nn.Conv3d(1, 2, 1), nn.InstanceNorm3d(2, track_running_stats=True))
        for given in ({"running_statistics": "step"}, {"batch_norm": "rank"}):
            with pytest.raises(UsageError, match="possible"):
                pipeline(net, stages, unet_task().x, **{"running_statistics": "batch", **given})
        made = pipeline(initialized(net), stages, unet_task().x, running_statistics="batch")
        with pytest.raises(NotSupported, match="batch norm with both running statistics"):
            made.step(unet_task().x, unet_task().target, F.mse_loss)

    on_stages([ONE] * 2, body)


class Twice(nn.Module):
    """The last call uses a weight; the first uses the same weight, or none."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.mid, self.last = nn.Conv3d(2, 2, 3, padding=1), nn.Conv3d(2, 2, 1)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x) if self.tied else F.relu(x)
        return self.last(self.mid(x))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", LINES)
def test_gradients_of_a_mesh_whose_first_stage_may_need_none(schedule, tied):
    """The ranks of the mesh reduce those of its last stage also if its first one has none."""
    x, target = randn(4, 2, 4, 4, 4, seed=1), randn(4, 2, 4, 4, 4, seed=2)
    task = Task(initialized(Twice(tied=tied)), x, target, F.mse_loss)
    for meshes in ([DEEP, ONE], [TWO_GROUPS] * 2):
        check_stages(task, meshes, 2, schedule=schedule, order=[0, 1, 0], cuts=["mid", "last"])


class Counting(nn.Module):
    """Changes its buffers and attributes, draws, and changes its argument in place."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.draws, self.number, self.seen = draws, 0, []
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, momentum=None)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.number += 1
        self.seen.append(self.number)
        x -= 0.5 * len(self.seen)
        y = self.norm(self.a(x).add_(self.count))
        z = self.b(y.mul_(self.number))
        if self.draws:
            z = z * torch.rand(4, dtype=x.dtype)
        return self.c(self.spectral(z.mul_(3)) + y) + x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", [[0], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0]], ids=str)
def test_what_a_forward_pass_changes_changes_once(order, recompute):
    """Also where several passes run it, for the stages of a mesh or to compute it again."""
    x, target = randn(8, 4, seed=1), randn(8, 4, seed=2)
    net = initialized(Counting(draws=max(order) == 0))  # ranks are threads with one generator
    torch.manual_seed(3)
    alone = copy.deepcopy(net)
    total = 0.0
    for m in range(4):
        rows = slice(2 * m, 2 * m + 2)
        loss = F.mse_loss(alone(x[rows].clone()), target[rows]) / 4
        loss.backward()
        total += loss.item()
    grads = {n: p.grad for n, p in alone.named_parameters()}

    def body(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x[:2].clone(), micro_batches=4, recompute=recompute)
        torch.manual_seed(3)
        loss = made.step(x.clone(), target, F.mse_loss)
        made.gather()
        assert own.seen == [1, 2, 3, 4]
        return loss.item(), own

    for loss, own in on_stages([ONE] * (max(order) + 1), body, order=order):
        assert loss == pytest.approx(total, rel=1e-12)
        for name, p in own.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, grads[name], rtol=1e-11, atol=1e-13)
        for (name, ours), theirs in zip(own.named_buffers(), alone.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14, msg=name)


def test_more_micro_batches_than_samples_are_refused():
    def body(stages):
        made = pipeline(unet_task().model, stages, unet_task().x[:1], micro_batches=3)
        with pytest.raises(UsageError, match="2 samples in 3 micro-batches"):
            made.step(unet_task(2).x, unet_task(2).target, F.mse_loss)

    on_stages([ONE] * 2, body)
