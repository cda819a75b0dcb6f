"""Estimates one training step of a network in stages, on equal meshes.

The calls are cut as `pydist.stages.plan` cuts recorded ones, by their predicted times, and the
passes of the schedule follow each other as soon as what they need has arrived.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pydist.backend.problem import ConvProblem
from pydist.grid import Grid
from pydist.hardware import Interconnect
from pydist.plan.estimate import (
    PARTS,
    ConvTimes,
    Estimate,
    InStages,
    KeptSeconds,
    StepModel,
)  # fmt: skip
from pydist.plan.on_mesh import StepOnMesh
from pydist.plan.trace import Trace
from pydist.stages.balance import partition
from pydist.stages.plan import times
from pydist.stages.schedule import Pass, Schedule, needed_passes


def estimate_in_stages(model: StepModel, grid: Grid, given: InStages) -> Estimate | None:
    """Estimates a training step in stages.

    Args:
        model: of the step; its passes do not matter.
        grid: the mesh of each stage.
        given: the stages.

    Returns:
        The estimate; `None` if the network has fewer calls than stages.
    """
    micro = copy.copy(model)
    micro.training = replace(model.training, passes=given.micro_batches, partitioned=False)
    micro.kept = _kept_of_batch(model, grid)
    # With GEMS a single micro-batch is in flight, so the other stages wait.
    working = grid.size() * (1 if given.schedule == "gems" else given.stages)
    step, trace = StepOnMesh(micro, grid, working), model.trace
    of_calls = np.asarray([*step.forward.values(), *step.backward.values()]).sum(0)
    sent, legal = _cuts(step, trace)
    if 1 + int(legal.sum()) < given.stages:
        return None
    order = range(given.stages)
    at = partition([times(of_calls, 1)] * given.stages, sent, legal, order)
    stages = [range(a, b) for a, b in pairwise([0, *at, len(trace.calls)])]
    schedule = Schedule(given.schedule, range(given.stages))
    link = _link(model, grid, given.stages)
    sending = [0.0, *(link.latency + float(sent[i]) / link.bandwidth for i in at)]
    durations = [_durations(step, calls, splits=schedule.splits) for calls in stages]
    ends = _simulated(schedule, given.micro_batches, durations, sending)
    parameters = [
        [trace.parameters[n] for call in trace.calls[c.start : c.stop] for n in call.parameters]
        for c in stages
    ]
    # A mesh has one stage; of GEMS two, which run a part of the micro-batches each.
    on_mesh = [
        [stage for stage in range(given.stages) if mesh in schedule.meshes(stage)]
        for mesh in range(given.stages)
    ]
    tails = [_tail(step, own, stages, parameters, link) for own in on_mesh]
    finished = [end + sum(tail.values()) for end, tail in zip(ends, tails, strict=True)]
    placed = [schedule.placed(number) for number in range(given.micro_batches)]
    busy = [
        _sums(
            (sum(each[stage] == mesh for each in placed), step.of_calls(stages[stage]))
            for stage in own
        )
        | tail
        for mesh, (own, tail) in enumerate(zip(on_mesh, tails, strict=True))
    ]
    seconds = dict.fromkeys(PARTS, 0.0) | max(busy, key=lambda each: sum(each.values()))
    seconds["waiting"] += max(finished) - sum(seconds.values())
    seconds["reading"] = max(0.0, step.reading() - max(finished))
    of_stages = [
        step.memory_of(calls, own, schedule.most_alive(stage, given.micro_batches))
        for stage, (calls, own) in enumerate(zip(stages, parameters, strict=True))
    ]
    memories = [_memory([of_stages[stage] for stage in own]) for own in on_mesh]
    largest = max(memories, key=lambda each: sum(each.values()))
    batch = model.training.batch
    moved = step.gathered_layers(), step.layers_on_channels()
    return Estimate(grid, batch, seconds, largest, *moved, in_stages=given)


def _tail(
    step: StepOnMesh, own: Sequence[int], stages: Sequence[range],
    parameters: Sequence[Sequence[int]], link: Interconnect,
) -> dict[str, float]:  # fmt: skip
    """Returns the seconds of a mesh's gradients and optimizer, after its passes.

    Args:
        step: of the network.
        own: stages of the mesh; two are also on another mesh, and their gradients are summed.
        stages: calls of each stage.
        parameters: bytes of each stage's parameters.
        link: connection of a rank to one of another mesh.
    """
    hiding = sum(sum(step.backward["compute"][stages[s].start : stages[s].stop]) for s in own)
    found = step.of_gradients([n for s in own for n in parameters[s]], hiding)
    if len(own) > 1:
        nbytes = sum(sum(parameters[s]) for s in own)
        found["gradients"] += len(own) * link.latency + nbytes / link.bandwidth
    return found


def _sums(weighted: Iterable[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Returns weighted sums by key."""
    found = dict[str, float]()
    for weight, each in weighted:
        for key, value in each.items():
            found[key] = found.get(key, 0.0) + weight * value
    return found


def _memory(of_stages: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the bytes of a mesh by kind: it holds all stages, and runs one of them at a time."""
    held = ("parameters", "gradients", "optimizer", "buckets")
    return {
        kind: (sum if kind in held else max)(each[kind] for each in of_stages)
        for kind in of_stages[0]
    }


def _kept_of_batch(model: StepModel, grid: Grid) -> KeptSeconds:
    """Returns times of a micro-batch, as its part of those of a sample group's batch.

    So nothing is measured for each number of micro-batches.
    """
    batch = math.ceil(model.training.batch / grid.size(("data",)))

    def kept(problem: ConvProblem, ranks: int) -> ConvTimes | None:
        samples, *block = problem.input
        found = model.kept(replace(problem, input=(batch, *block)), ranks)
        if found is None:
            return None
        part = samples / batch
        forward, dgrad, wgrad = (part * seconds for seconds in found[:3])
        return found._replace(forward=forward, dgrad=dgrad, wgrad=wgrad)

    return kept


@dataclass(frozen=True)
class _Durations:
    """Seconds that a stage's passes over a micro-batch take."""

    forward: float
    backward: float
    weight: float

    def of(self, each: Pass) -> float:
        return float(getattr(self, each.kind))


def _durations(step: StepOnMesh, calls: range, *, splits: bool) -> _Durations:
    forward, backward = (
        sum(sum(row[calls.start : calls.stop]) for row in rows.values())
        for rows in (step.forward, step.backward)
    )
    # Gradients of weights take about half of a backward pass.
    return _Durations(forward, backward / 2 if splits else backward, backward / 2 if splits else 0)


def _simulated(
    schedule: Schedule, micro_batches: int, durations: Sequence[_Durations],
    sending: Sequence[float],
) -> list[float]:  # fmt: skip
    """Returns when each mesh has finished its passes.

    Args:
        schedule: of the passes.
        micro_batches: their number.
        durations: of the passes of each stage.
        sending: seconds of the messages into each stage, from the one before; back the same.
    """
    passes = schedule.passes(micro_batches)
    done, free, position = dict[Pass, float](), [0.0] * len(passes), [0] * len(passes)
    left = sum(map(len, passes))
    while left:
        for mesh, own in enumerate(passes):
            while position[mesh] < len(own):
                each = own[position[mesh]]
                needed = needed_passes(each, len(durations))
                if any(other not in done for other in needed):
                    break
                arrived = (
                    done[n] + (sending[max(n.stage, each.stage)] if n.stage != each.stage else 0.0)
                    for n in needed
                )
                start = max([free[mesh], *arrived])
                done[each] = free[mesh] = start + durations[each.stage].of(each)
                position[mesh] += 1
                left -= 1
    return free


def _cuts(step: StepOnMesh, trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes that a cut before each call sends, and whether a stage may begin there."""
    calls = len(trace.calls)
    made, last = np.zeros(len(trace.tensors), int), np.zeros(len(trace.tensors), int)
    legal = np.asarray([call.kind != "view" for call in trace.calls])
    legal[:1] = False
    for i, call in enumerate(trace.calls):
        made[call.outputs] = i
        last[call.inputs] = i
        known = {trace.tensors[n].memory for n in call.inputs}
        # An activation in place belongs to the call that made its operand.
        if known.intersection(trace.tensors[n].memory for n in call.outputs):
            legal[i] = False
    sent = np.zeros(calls)
    for number in range(1, len(trace.tensors)):
        sent[made[number] + 1 : last[number] + 1] += step.blocks.nbytes(number)
    return sent, legal


def _link(model: StepModel, grid: Grid, stages: int) -> Interconnect:
    """Returns the connection of a rank to the stage after its own."""
    hardware = model.hardware
    if grid.size() * stages <= hardware.ranks_per_node:
        return hardware.within
    sharing = min(grid.size(), hardware.ranks_per_node)
    return Interconnect(hardware.between.latency, hardware.between.bandwidth / sharing)
